"""Ranks that leave by an exception: HL011, HL012 and HL013."""

import ast
from collections.abc import Iterator
from typing import Final

from offbeat_hanglint._axes import UNKNOWN, meet
from offbeat_hanglint._program.depend import Depends, only_axes
from offbeat_hanglint._program.expressions import dotted, terminates
from offbeat_hanglint._program.values import UNDER
from offbeat_hanglint._program.view import Event, FunctionView, Guard, normal_test
from offbeat_hanglint._rules.finding import Confidence, Finding
from offbeat_hanglint._rules.report import axes_text, finding, steps_of, tags_text, what_is_called
from offbeat_hanglint._rules.submodules import first_explicit

HOOKS: Final = ("sys.excepthook", "threading.excepthook")


def check(view: FunctionView) -> Iterator[Finding]:
    """Report raises of one rank, swallowed errors and teardown on the way of an exception."""
    yield from _one_rank_raises(view)
    yield from _swallowed(view)
    yield from _teardown(view)
    yield from _unprotected(view)


def _unprotected(view: FunctionView) -> Iterator[Finding]:
    """HL011: a call that the file guards elsewhere against an exception of its own, here unguarded."""
    for node, callee, guard in view.calls:
        raised = view.file.protected.get(callee)
        if not raised or any(g.kind in ("try", "except") for g in (guard.chain() if guard else ())):
            continue
        after = next((e for e in view.events if e.explicit and e.node.lineno > node.lineno), None)
        if after is None:
            continue
        hit = after.explicit[0]
        yield finding(
            view, "HL011", "low", node,
            f"`{callee}` may raise {raised}, which is caught elsewhere but not here, before {what_is_called(after)}",
            f"A rank whose data make it raise ends; the others wait in `{hit.kind}` over {axes_text(hit.axes)}.",
            f"Handle {raised} so that every rank makes the same calls.",
            steps_of(view, None, after, hit),
        )  # fmt: skip
        return


def _one_rank_raises(view: FunctionView) -> Iterator[Finding]:
    for left in view.exits:
        if not isinstance(left.node, ast.Raise) or left.guard is None:
            continue
        depends: Depends = {}
        for guard in left.guard.chain():
            if guard.kind in ("if", "else"):
                depends = depends | guard.depends
        if not depends or any(g.kind in ("try", "except") for g in left.guard.chain()):
            continue
        axes = only_axes(depends)
        after = next(
            (e for e in view.events if e.explicit and e.node.lineno > left.node.lineno and _is_later(e, left.guard)),
            None,
        )
        if after is None:
            continue
        hit = after.explicit[0]
        if axes and not meet(axes, hit.axes):  # type: ignore[arg-type]
            continue
        confidence: Confidence = "low"
        if axes and hit.is_sure and hit.axes != UNKNOWN:
            confidence = "high" if axes & {"world", "node"} and after.is_direct else "medium"
        if _has_found_nothing(left.guard, depends):
            confidence = "low"
        yield finding(
            view, "HL011", confidence, left.node,
            f"an error is raised where a condition on {tags_text(depends)} "
            f"holds, before {what_is_called(after)} in which the others wait",
            f"The rank that raises never comes to `{hit.kind}` over {axes_text(hit.axes)}.",
            "Share the outcome first: broadcast or all_reduce whether it failed, then raise on every rank.",
            steps_of(view, None, after, hit),
        )  # fmt: skip


def _has_found_nothing(guard: Guard, depends: Depends) -> bool:
    """Recognise an assertion that each rank found its own part in a loop over all: `if mine is None: raise`."""
    test = getattr(guard.node, "test", None)
    asked = [node for node in ast.walk(test) if isinstance(node, ast.Compare)] if test else []
    is_missing = any(
        isinstance(node.ops[0], ast.Is)
        and isinstance(node.comparators[0], ast.Constant)
        and node.comparators[0].value is None
        for node in asked
    )
    return is_missing and all(UNDER in depends[axis] for axis in only_axes(depends))


def _is_later(event: Event, guard: Guard) -> bool:
    """Return whether ranks that do not raise come to the event: it is not on another side of the same condition."""
    sides = {(id(g.node), g.kind) for g in guard.chain() if g.kind in ("if", "else")}
    opposite = {(node, "else" if kind == "if" else "if") for node, kind in sides}
    own = {(id(g.node), g.kind) for g in event.guards()}
    outer = list(guard.chain())
    return not own & opposite and not any(g.kind == "if" and (id(g.node), g.kind) in own for g in outer[:1])


def _swallowed(view: FunctionView) -> Iterator[Finding]:
    for statement, guard in view.statements:
        if not isinstance(statement, ast.Try) or not statement.handlers:
            continue
        inside = view.inside(statement, "try")
        for handler in statement.handlers:
            if _ends_by_raise(handler.body) or _is_import_error(handler):
                continue
            in_handler = view.inside(handler, "except")
            hit = next((e for e in inside if e.explicit), None) or next(
                (e for e in inside if e.reached[0].kind == "backward"), None
            )
            if hit is None or any(e.kinds() & hit.kinds() for e in in_handler):
                continue
            yield _swallow_finding(view, handler, hit, guard)
            break


def _swallow_finding(view: FunctionView, handler: ast.ExceptHandler, event: Event, guard: Guard | None) -> Finding:
    reached = event.explicit[0] if event.explicit else event.reached[0]
    in_loop = any(g.kind == "loop" for g in (guard.chain() if guard else ()))
    caught = dotted(handler.type) if handler.type else "every exception"
    is_wide = (
        caught
        in (
            "every exception",
            "Exception",
            "BaseException",
            "RuntimeError",
            "torch.cuda.OutOfMemoryError",
            "torch.OutOfMemoryError",
        )
        or not caught
    )
    confidence: Confidence = (
        "medium" if in_loop and is_wide and reached.is_sure and reached.is_explicit and event.is_direct else "low"
    )
    return finding(
        view, "HL012", confidence, handler,
        f"{caught or 'an error'} of one rank is swallowed around {what_is_called(event)}; the rank continues alone",
        f"The rank whose error is caught skips `{reached.kind}` over "
        f"{axes_text(reached.axes)}; the others wait there, or meet its next collective.",
        "Raise again, or let all ranks agree (all_reduce a flag) whether the step counts.",
        steps_of(view, None, event, reached),
    )  # fmt: skip


def _ends_by_raise(body: list[ast.stmt]) -> bool:
    if isinstance(terminates(body), ast.Raise):
        return True
    return any(
        isinstance(s, ast.Expr)
        and isinstance(s.value, ast.Call)
        and dotted(s.value.func).rsplit(".", 1)[-1] in ("exit", "_exit", "abort", "kill", "fail")
        for s in body
    )


def _is_import_error(handler: ast.ExceptHandler) -> bool:
    return handler.type is not None and any(
        name in ast.unparse(handler.type) for name in ("ImportError", "ModuleNotFoundError", "AttributeError")
    )


def _frees_the_others(view: FunctionView, event: Event, around: Guard) -> bool:
    """Return True if the ranks that skip a collective in `finally` are already waiting in the same one."""
    for guard in event.guards():
        if guard is around:
            return False
        if guard.kind in ("if", "else"):
            test, is_true = normal_test(guard)
            if event.kinds() & view.kinds_where.get((test, not is_true), set()):
                return True
    return False


def _only_one_can_fail(view: FunctionView, guard: Guard) -> bool:
    """Return True if only the ranks under a guard do anything in `try`, so that others already wait in `finally`."""
    guards = {id(statement): around for statement, around in view.statements}
    return all(
        isinstance(each, ast.If)
        and not each.orelse
        and (inside := guards[id(each.body[0])]) is not None
        and bool(only_axes(inside.depends))
        and not any(event.explicit for event in view.inside(each, "if"))
        for each in guard.node.body  # type: ignore[attr-defined]
    )


def _teardown(view: FunctionView) -> Iterator[Finding]:
    seen: set[int] = set()
    for event in view.events:
        for guard in event.guards():
            if guard.kind not in ("finally", "except") or id(guard.node) in seen or not event.explicit:
                continue
            hit = event.explicit[0]
            is_destroy = hit.kind == "destroy_process_group"
            if guard.kind == "finally" and (_frees_the_others(view, event, guard) or _only_one_can_fail(view, guard)):
                continue
            if guard.kind == "except" and (not is_destroy and not _ends_by_raise(guard.node.body)):  # type: ignore[attr-defined]
                continue
            seen.add(id(guard.node))
            confidence: Confidence = "medium" if hit.is_sure and hit.depth <= 2 else "low"
            if hit.is_sure and hit.depth <= 1 and hit.axes != UNKNOWN and guard.kind == "finally":
                confidence = "high"
            yield finding(
                view, "HL013", confidence, event.node,
                f"{what_is_called(event)} runs on the way of an exception, where the other ranks are elsewhere",
                "The rank that raised waits here for its peers, which wait for it "
                "in their own collective; its error is not shown before a timeout.",
                "Tear down after success only; on an exception let the process end, which ends its peers.",
                steps_of(view, guard, event, hit),
            )  # fmt: skip
            break
        else:
            continue
    yield from _hooks(view)


def _hooks(view: FunctionView) -> Iterator[Finding]:
    """HL013: `sys.excepthook = notify_all`, a function that is called only on the rank that has raised."""
    for statement, _ in view.statements:
        if not isinstance(statement, ast.Assign) or dotted(statement.targets[0]) not in HOOKS:
            continue
        name = dotted(statement.value)
        found = first_explicit(view, name) if name else None
        if found is not None and found[0] != "destroy_process_group":
            kind, axes, is_sure = found
            yield finding(
                view, "HL013", "medium" if is_sure else "low", statement,
                f"`{name}`, which reaches `{kind}` over {axes_text(axes)}, is called where an exception ends the rank",
                "The rank that raised waits there for its peers, which wait for it in their own collective.",
                "Print the error on this rank alone, and let the process end, which ends its peers.",
            )  # fmt: skip
