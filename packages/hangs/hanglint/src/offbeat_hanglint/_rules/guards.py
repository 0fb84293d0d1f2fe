"""Collectives that not every member of their group comes to: HL001 to HL005, HL010 and HL032."""

import ast
from collections.abc import Iterator
from typing import Final

from offbeat_hanglint._axes import UNKNOWN, WORLD, meet, words
from offbeat_hanglint._program.conditions import SHARDED
from offbeat_hanglint._program.depend import LOCAL, Depends, only_axes
from offbeat_hanglint._program.expressions import dotted, terminates
from offbeat_hanglint._program.reach import Reached
from offbeat_hanglint._program.view import Event, FunctionView, Guard, normal_test, simple_kind
from offbeat_hanglint._rules.finding import Confidence, Finding
from offbeat_hanglint._rules.report import ORDER, axes_text, finding, steps_of, tags_text, what_is_called

DECIDES: Final = frozenset(("if", "else", "case", "rest", "except"))
_OPPOSITE: Final = {"if": ("else", "rest"), "else": ("if",), "rest": ("if", "else", "except"), "except": ("tried",)}
STRONG_LOCAL: Final = frozenset(("time", "error"))
_LONG_WORK: Final = frozenset(
    (
        "generate",
        "load",
        "save",
        "download",
        "compile",
        "run",
        "eval",
        "evaluate",
        "build",
        "convert",
        "fetch",
        "init",
        "create",
        "upload",
        "preprocess",
        "push",
        "train",
        "map",
        "tokenize",
        "process",
        "export",
        "write",
        "merge",
        "request",
        "snapshot",
        "from_pretrained",
        "launch",
    )
)


def check(view: FunctionView) -> Iterator[Finding]:
    """Report each condition once per rule, at the first collective behind it."""
    seen: set[tuple[int, str]] = set()
    for event in view.events:
        found = [
            (guard, result) for guard in event.guards() if _decides(guard) and (result := _judge(view, event, guard))
        ]
        if not found:
            continue
        guard, result = max(found, key=lambda pair: (bool(only_axes(pair[0].depends)), ORDER.index(pair[1].confidence)))
        if (id(guard.node), result.rule) not in seen:
            seen.add((id(guard.node), result.rule))
            yield result
            yield from _along_the_path(view, event, guard, result)
    yield from _leader_work(view)


def _along_the_path(view: FunctionView, event: Event, guard: Guard, result: Finding) -> Iterator[Finding]:
    """The same at the functions between the condition and the collective: the change may belong there."""
    hit = next((r for r in event.explicit if _apart(r, guard)), None)
    if hit is None or hit.through < 0 or hit.depth > 4 or guard.kind == "except":
        return
    for function, step in zip(view.reach.functions_below(hit), result.steps[2:], strict=False):
        fact = view.program.functions[function]
        yield Finding(
            result.rule, "low", step.path, step.line, step.line, 1, fact.qualified,
            f"`{hit.kind}` over {axes_text(hit.axes)} is reached from here, and {view.fact.qualified} "
            f"calls this only where a condition on {tags_text(guard.depends)} holds",
            result.ranks, result.steps, result.advice,
        )  # fmt: skip


def _decides(guard: Guard) -> bool:
    if guard.kind not in DECIDES or not guard.depends or isinstance(guard.exit, ast.Raise):
        return False
    return not (guard.kind == "except" and isinstance(terminates(guard.node.body), ast.Raise))  # type: ignore[attr-defined]


def _judge(view: FunctionView, event: Event, guard: Guard) -> Finding | None:
    """Return what a condition does to a call: nothing where the axes do not meet or the other side calls the same."""
    axes = only_axes(guard.depends)
    hit = next((r for r in event.explicit if _apart(r, guard)), None)
    if hit is None:
        return _judge_implicit(view, event, guard)
    if simple_kind(hit.kind) in _other_side(view, event, guard):
        return None
    if axes and not guard.is_membership:
        return _rank_guard(view, event, guard, hit)
    local = {tag: text for tag, text in guard.depends.items() if tag in LOCAL}
    return _local_guard(view, event, guard, hit, local) if local else None


def _apart(reached: Reached, guard: Guard) -> bool:
    if isinstance(reached.axes, str):
        return False
    if reached.kind in ("new_group", "split_group", "destroy_process_group", "init_device_mesh"):
        return False
    axes = only_axes(guard.depends)
    if axes and not guard.is_membership and meet(axes, reached.axes):
        return True
    if "beyond" in guard.depends:
        agreed = set(guard.depends["beyond"].split(","))
        return reached.axes != UNKNOWN and not reached.axes <= agreed
    return any(tag in LOCAL and tag != "beyond" for tag in guard.depends)


def _other_side(view: FunctionView, event: Event, guard: Guard) -> set[str]:
    """Kinds of collectives that the ranks call which do not pass the condition."""
    opposite = _OPPOSITE.get(guard.kind, ())
    others = [other for side in opposite for other in view.inside(guard.node, side)]
    if guard.kind == "case":
        others += [other for other in view.inside(guard.node, "case") if other.guard is not event.guard]
    test, is_true = normal_test(guard)
    return view.kinds_where.get((test, not is_true), set()).union(*(other.kinds() for other in others))


def _rank_guard(view: FunctionView, event: Event, guard: Guard, hit: Reached) -> Finding:
    confidence = "low" if view.other_half_calls(hit.kind) else _confidence(event, guard, hit)
    is_left = guard.kind == "rest"
    specific = only_axes(guard.depends) - {"world", "node", "rank"}
    rule = "HL010" if is_left else "HL001" if event.is_direct else "HL002"
    advice = "Let every member of the group make the call, and put only what one rank is to do under the condition."
    if hit.axes == WORLD and specific and specific == only_axes(guard.depends) and not event.group:
        rule, advice = "HL032", "Pass the group of the ranks that come here, or take the call out of the condition."
        confidence = (
            "high"
            if confidence == "high" and event.is_direct
            else min(confidence, "medium", key=("low", "medium", "high").index)
        )
    message = (
        f"{what_is_called(event)} spans {axes_text(hit.axes)} but runs "
        f"only where a condition on {tags_text(guard.depends)} holds"
    )
    if is_left:
        message = (
            f"{what_is_called(event)} spans {axes_text(hit.axes)}, but some ranks "
            f"have left before, by a condition on {tags_text(guard.depends)}"
        )
    ranks = (
        f"Ranks for which the condition holds enter `{hit.kind}`; members "
        f"of {axes_text(hit.axes)} for which it does not never come."
    )
    node = guard.exit if is_left and guard.exit is not None else event.node
    return finding(view, rule, confidence, node, message, ranks, advice, steps_of(view, guard, event, hit))


def _confidence(event: Event, guard: Guard, hit: Reached) -> Confidence:
    axes = only_axes(guard.depends)
    if not hit.is_sure or hit.axes == UNKNOWN:
        return "low"
    if any("under which it is set" in text for text in guard.depends.values()):
        return "medium"
    if hit.depth > 3 or "rank" in axes:
        return "medium"
    if hit.depth > 0 and SHARDED in hit.known:  # whether the tensors are, the caller knows
        return "medium"
    if any(g.kind == "with" and _is_lock(g.node) for g in event.guards()):
        return "medium"
    return "high"


def _is_lock(node: ast.AST) -> bool:
    return isinstance(node, ast.With) and any("first" in dotted(item.context_expr) for item in node.items)


def _local_guard(view: FunctionView, event: Event, guard: Guard, hit: Reached, local: Depends) -> Finding:
    is_strong = bool(STRONG_LOCAL & set(local)) or ("data" in local and _returns_before(event, guard))
    confidence: Confidence = "medium" if is_strong and hit.is_sure and hit.depth <= 2 and hit.axes != UNKNOWN else "low"
    is_left = guard.kind == "rest"
    rule = "HL004" if not is_left else "HL012" if "error" in local else "HL010"
    verb = (
        "is left out by ranks that went another way before"
        if guard.kind == "rest"
        else "runs only where a condition holds"
    )
    message = f"{what_is_called(event)} {verb}; the condition depends on {tags_text(local)}"
    ranks = (
        f"Ranks may decide differently: some enter `{hit.kind}` "
        f"over {axes_text(hit.axes)} and wait there for the others."
    )
    advice = "Agree on the condition first (all_reduce a flag over the same group), or make the call on every rank."
    node = guard.exit if guard.kind == "rest" and guard.exit is not None else event.node
    return finding(view, rule, confidence, node, message, ranks, advice, steps_of(view, guard, event, hit))


def _returns_before(event: Event, guard: Guard) -> bool:
    """Return True if ranks return from the very function that calls the collective: `if not grads: return`.

    A tensor that is tested for None is as a rule on all ranks or on none.
    """
    tests = [node for node in ast.walk(getattr(guard.node, "test", guard.node)) if isinstance(node, ast.Compare)]
    asks_for_none = any(isinstance(each.ops[0], ast.Is) for each in tests)
    return isinstance(guard.exit, ast.Return) and event.is_direct and not asks_for_none


def _judge_implicit(view: FunctionView, event: Event, guard: Guard) -> Finding | None:
    """HL003 and HL010: the forward or backward pass of a wrapped module where only some ranks come."""
    hit = next((r for r in event.reached if not r.is_explicit), None)
    if hit is None or guard.is_membership:
        return None
    axes = only_axes(guard.depends)
    if {simple_kind(hit.kind)} & _other_side(view, event, guard):
        return None
    if hit.kind == "DataLoader.__iter__" and axes:
        return finding(
            view, "HL003", "low", event.node,
            "the iteration of a DataLoader starts on some ranks only, and may broadcast a shared seed over all",
            "Ranks for which the condition holds wait in that broadcast for the others.",
            "Start the iteration on every rank, and read from it where it is needed.",
            steps_of(view, guard, event, hit),
        )  # fmt: skip
    if axes & {"world", "dp", "node"}:
        rule = "HL010" if guard.kind == "rest" and hit.kind == "backward" else "HL003"
        message = (
            f"{what_is_called(event)} runs a module on some ranks only; if it "
            f"is wrapped (DDP, FSDP, ZeRO) its {hit.kind} pass is a collective"
        )
        ranks = (
            f"Ranks for which the condition on {tags_text(guard.depends)} "
            "holds enter it; the others proceed to their next collective."
        )
        advice = "Run it on all ranks, or on the unwrapped module with parameters that are whole on this rank."
        return finding(view, rule, "low", event.node, message, ranks, advice, steps_of(view, guard, event, hit))
    is_skipped_round = guard.kind == "rest" and isinstance(guard.exit, ast.Continue)
    if (
        (hit.kind == "backward" or (hit.kind == "forward" and is_skipped_round))
        and {"data", "error"} & set(guard.depends)
        and event.is_direct
    ):
        rule = "HL012" if "error" in guard.depends else "HL010" if guard.kind == "rest" else "HL004"
        message = f"the {hit.kind} pass, a collective if sharded, is left out where this rank's data or errors say so"
        ranks = "Ranks that run it wait in its collectives (parameters, gradients) for those that do not."
        advice = "Agree over the data-parallel group whether to skip, or run the pass with a loss multiplied by zero."
        node = guard.exit if guard.kind == "rest" and guard.exit is not None else event.node
        return finding(view, rule, "low", node, message, ranks, advice, steps_of(view, guard, event, hit))
    return None


def _leader_work(view: FunctionView) -> Iterator[Finding]:
    """HL005: one rank works long, and the others wait for it in a collective that has a timeout."""
    for position, (statement, guard) in enumerate(view.statements):
        if not isinstance(statement, ast.If) or view.inside(statement, "if"):
            continue
        around = next(
            (g for s, g in view.statements[position + 1 :] if g is not None and g.node is statement and g.kind == "if"),
            None,
        )
        if around is None or not only_axes(around.depends) or around.is_membership:
            continue
        work = _long_work(statement.body)
        if work is None:
            continue
        after = _next_collective(view, statement, guard)
        if after is None or not meet(only_axes(around.depends), after.explicit[0].axes):  # type: ignore[arg-type]
            continue
        kind = after.explicit[0].kind
        yield finding(
            view, "HL005", "low", work,
            f"one rank runs `{dotted(work.func)}` while the others already wait in `{kind}`",
            f"The rank that passes the condition works; the others wait in `{kind}` until its timeout.",
            "Give the wait a timeout that covers the work, or let all ranks do it; on failure, notify the others.",
            steps_of(view, around, after, after.explicit[0]),
        )  # fmt: skip


def _long_work(body: list[ast.stmt]) -> ast.Call | None:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                name = dotted(node.func).rsplit(".", 1)[-1]
                if set(words(name)) & _LONG_WORK or name in _LONG_WORK:
                    return node
    return None


def _next_collective(view: FunctionView, statement: ast.If, guard: Guard | None) -> Event | None:
    last = statement.end_lineno or statement.lineno
    for event in view.events:
        if event.node.lineno <= last or not event.explicit or not event.explicit[0].is_sure:
            continue
        inner = event.guard
        is_below = inner is not None and inner.parent is guard and inner.kind in ("if", "else", "with", "try")
        if inner is guard or is_below:
            return event if event.node.lineno - last < 30 else None
    return None
