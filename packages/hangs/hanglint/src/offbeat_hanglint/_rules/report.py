"""Findings from what a rule saw."""

import ast
from typing import Final

from offbeat_hanglint._axes import UNKNOWN, WORLD, Axes
from offbeat_hanglint._program.depend import LOCAL, Depends
from offbeat_hanglint._program.reach import Reached
from offbeat_hanglint._program.view import Event, FunctionView, Guard
from offbeat_hanglint._rules.finding import Confidence, Finding, Step

ORDER: Final = ("low", "medium", "high")


def finding(
    view: FunctionView,
    rule: str,
    confidence: Confidence,
    node: ast.AST,
    message: str,
    ranks: str,
    advice: str,
    steps: tuple[Step, ...] = (),
) -> Finding:
    """Return a finding at a place in a function. In tests, where asymmetry is often meant, at most medium."""
    line = getattr(node, "lineno", view.fact.line)
    if confidence == "high" and is_test(view.file.path):
        confidence = "medium"
    end = min(getattr(node, "end_lineno", None) or line, line + 40)
    column = getattr(node, "col_offset", 0) + 1
    return Finding(
        rule, confidence, view.file.path, line, end, column, view.fact.qualified, message, ranks, steps, advice
    )


def is_test(path: str) -> bool:
    """Return whether a file belongs to tests or benchmarks."""
    parts = path.lower().split("/")
    return any(
        p in ("tests", "test", "testing", "benchmarks", "unit_tests", "functional_tests") for p in parts[:-1]
    ) or parts[-1].startswith(("test_", "conftest", "bench"))


def axes_text(axes: Axes | str) -> str:
    """Return the text for axes: "dp and cp", "all ranks"."""
    if isinstance(axes, str) or axes == UNKNOWN:
        return "a group that the code does not name"
    if axes == WORLD or "world" in axes:
        return "all ranks"
    return " and ".join(sorted(axes))


def why(depends: Depends) -> str:
    """Return the names that a condition depends on, shortest first."""
    names = sorted(set(depends.values()), key=lambda name: (len(name), name))
    return ", ".join(f"`{name}`" if " " not in name else name for name in names[:3])


def tags_text(depends: Depends) -> str:
    """Return the text for what a condition depends on."""
    words = {
        "world": "the rank",
        "node": "the rank within the node",
        "rank": "the rank within a group",
        "data": "this rank's data",
        "time": "the moment at which this rank looks",
        "file": "files that this rank sees",
        "error": "an error of this rank",
        "fill": "what this rank has collected",
        "beyond": "a value that only part of the ranks agreed on",
    }
    return ", ".join(
        dict.fromkeys(words.get(tag, f"the {tag} rank") for tag in sorted(depends, key=lambda tag: (tag in LOCAL, tag)))
    )


def what_is_called(event: Event) -> str:
    """`all_reduce` or "`save` (which reaches `barrier`)"."""
    first = event.reached[0]
    name = event.callee.rsplit(".", 1)[-1]
    return f"`{name}`" if event.is_direct else f"`{name}`, which reaches `{first.kind}`,"


def steps_of(view: FunctionView, guard: Guard | None, event: Event, reached: Reached) -> tuple[Step, ...]:
    """From a condition to the collective behind it."""
    path = view.file.path
    steps: list[Step] = []
    if guard is not None:
        label = {"loop": "loop", "rest": "some ranks leave", "except": "handler", "finally": "finally"}.get(
            guard.kind, "condition"
        )
        reasons = f" on {why(guard.depends)}" if guard.depends else ""
        steps.append(Step(path, getattr(guard.node, "lineno", view.fact.line), f"{label}{reasons}"))
    if reached.through < 0:
        steps.append(Step(path, event.node.lineno, f"{reached.kind} over {axes_text(reached.axes)}"))
        return tuple(steps)
    steps.append(Step(path, event.node.lineno, f"calls {view.program.functions[reached.through].qualified}"))
    below = [e for e in view.reach.of[reached.through].values() if e.kind == reached.kind]
    if below:
        chosen = min(below, key=lambda e: (e.axes != reached.axes, e.depth))
        for function, line, called in view.reach.path(reached.through, chosen):
            where = view.program.files[view.program.file_of[function]].path
            is_last = called == reached.kind
            steps.append(
                Step(where, line, f"{called} over {axes_text(reached.axes)}" if is_last else f"calls {called}")
            )
    return tuple(steps)
