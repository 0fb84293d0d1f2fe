"""Modules that some ranks run, and collectives in threads and handlers: HL040 to HL042, and HL011 in handlers."""

import ast
from collections.abc import Iterator
from typing import Final

from offbeat_hanglint._axes import UNKNOWN, WORLD, Axes, words
from offbeat_hanglint._program.expressions import dotted
from offbeat_hanglint._program.view import Event, FunctionView
from offbeat_hanglint._program.views import HANDLES_SIGNALS
from offbeat_hanglint._rules.finding import Confidence, Finding
from offbeat_hanglint._rules.report import axes_text, finding, steps_of, what_is_called

MODAL: Final = frozenset(
    (
        "image",
        "images",
        "pixel",
        "video",
        "videos",
        "audio",
        "audios",
        "vision",
        "visual",
        "imgs",
        "img",
        "patches",
        "multimodal",
    )
)
_PARTS: Final = frozenset(
    (
        "visual",
        "vision",
        "tower",
        "encoder",
        "expert",
        "experts",
        "audio",
        "image",
        "projector",
        "adapter",
        "aligner",
        "vit",
    )
)
_ENDS: Final = ("destroy_process_group",)  # what waits for the others is its own matter
_HANDLER_BASES: Final = frozenset(
    (
        "Resource",
        "MethodView",
        "View",
        "BaseHTTPRequestHandler",
        "RequestHandler",
        "HTTPEndpoint",
        "SimpleHTTPRequestHandler",
    )
)
_HANDLER_METHODS: Final = frozenset(
    ("get", "post", "put", "delete", "patch", "do_GET", "do_POST", "do_PUT", "dispatch_request")
)
_ROUTES: Final = frozenset(("route", "post", "get", "put", "websocket", "api_route"))
_STARTERS: Final = {
    "Thread": "target",
    "Process": "",
    "submit": "",
    "run_in_executor": "",
    "create_task": "",
    "Timer": "function",
    "start_new_thread": "",
    "to_thread": "",
    "ensure_future": "",
}


def check(view: FunctionView) -> Iterator[Finding]:
    """Report each place once."""
    yield from _skipped_part(view)
    yield from _empty_stand_in(view)
    yield from _started(view)
    yield from _handler(view)
    yield from _at_any_line(view)


def _skipped_part(view: FunctionView) -> Iterator[Finding]:
    seen: set[int] = set()
    for event in view.events:
        hit = event.reached[0]
        if (
            hit.kind != "forward"
            or not event.is_direct
            or not set(words(event.callee.removesuffix(".forward").rsplit(".", 1)[-1])) & _PARTS
        ):
            continue
        for guard in event.guards():
            is_modal = "data" in guard.depends or (guard.kind in ("if", "else") and _is_modal_test(guard.node))
            if guard.kind not in ("if", "else", "rest") or not is_modal or id(guard.node) in seen:
                continue
            seen.add(id(guard.node))
            yield finding(
                view, "HL040", "low", event.node,
                f"`{event.callee}` runs only where this rank's data ask for "
                "it; if the model is sharded its forward pass is a collective",
                "Ranks with such data gather its parameters and wait for ranks without.",
                "Run it on every rank, in training and in evaluation: on ranks "
                "without data on a dummy whose output is added times zero.",
                steps_of(view, guard, event, hit),
            )  # fmt: skip
            break


def _is_modal_test(node: ast.AST) -> bool:
    test = getattr(node, "test", None)
    return test is not None and any(
        set(words(n.id if isinstance(n, ast.Name) else n.attr)) & MODAL
        for n in ast.walk(test)
        if isinstance(n, ast.Name | ast.Attribute)
    )


def _empty_stand_in(view: FunctionView) -> Iterator[Finding]:
    """HL041: data of a kind that this batch lacks are replaced by an empty tensor, and what reads them is skipped."""
    for statement, guard in view.statements:
        if not isinstance(statement, ast.Assign) or guard is None:
            continue
        if not any(g.kind in ("if", "else") and ("data" in g.depends or _is_modal_test(g.node)) for g in guard.chain()):
            continue
        name = dotted(statement.targets[0]).rsplit(".", 1)[-1]
        if set(words(name)) & MODAL and _is_empty_tensor(statement.value):
            yield finding(
                view, "HL041", "low", statement,
                f"`{name}` is replaced by an empty tensor where this rank's batch has none",
                "The encoder that reads it is skipped on this rank, or its output "
                "takes no part in the loss; other ranks wait in its collectives.",
                "Use a dummy of the usual shape, run the encoder, and add its output times zero.",
            )  # fmt: skip


def _is_empty_tensor(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = dotted(node.func).rsplit(".", 1)[-1]
    if name in ("to", "cuda") and isinstance(node.func, ast.Attribute):
        return _is_empty_tensor(node.func.value)
    if name == "tensor":
        return bool(node.args) and isinstance(node.args[0], ast.List) and not node.args[0].elts
    if name in ("empty", "zeros"):
        return any(isinstance(n, ast.Constant) and n.value == 0 for a in node.args for n in ast.walk(a))
    return False


def _started(view: FunctionView) -> Iterator[Finding]:
    """HL042: a function that reaches a collective is handed to a thread, a pool or a task."""
    for node, callee, _ in view.calls:
        last = callee.rsplit(".", 1)[-1]
        if last not in _STARTERS and not _hands_on(view, callee, node):
            continue
        keyword = _STARTERS.get(last, "")
        candidates = [k.value for k in node.keywords if k.arg == keyword] if keyword else node.args[:2]
        for candidate in candidates:
            name = dotted(candidate.func if isinstance(candidate, ast.Call) else candidate)
            found = first_explicit(view, name) if name else None
            if found is None:
                continue
            kind, axes, is_sure = found
            confidence: Confidence = "medium" if is_sure and last in ("Thread", "submit", "run_in_executor") else "low"
            yield finding(
                view, "HL042", confidence, node,
                f"`{name}`, which reaches `{kind}` over {axes_text(axes)}, runs in a thread or task of its own",
                "Collectives of one group must come in one order on all ranks; a thread's "
                "order is its own, and cancelled or late jobs are missing on some ranks.",
                "Give that thread a group of its own, submit the same jobs in the "
                "same order everywhere, and never cancel one that holds a collective.",
            )  # fmt: skip
            break


def _at_any_line(view: FunctionView) -> Iterator[Finding]:
    """HL042: signal handlers and `__del__` run between two lines of the program, on each rank between other ones."""
    for node, callee, _ in view.calls:
        if callee.rsplit(".", 1)[-1] not in HANDLES_SIGNALS or not _is_signal_call(callee) or len(node.args) < 2:
            continue
        name = dotted(node.args[1])
        found = first_explicit(view, name) if name else None
        if found is not None and found[0] not in _ENDS:
            kind, axes, is_sure = found
            yield finding(
                view, "HL042", "medium" if is_sure else "low", node,
                f"`{name}`, which reaches `{kind}` over {axes_text(axes)}, handles a signal, between any two lines",
                "A signal reaches the ranks at different calls, or one rank alone: it waits there for the others.",
                "Let the handler set a flag, agree on it at the end of a step (all_reduce with MAX), and act there.",
            )  # fmt: skip
    event = next((e for e in view.events if e.explicit and e.explicit[0].kind not in _ENDS), None)
    if view.fact.name == "__del__" and view.fact.class_name and event is not None:
        hit = event.explicit[0]
        yield finding(
            view, "HL042", "medium" if hit.is_sure else "low", event.node,
            f"{what_is_called(event)} runs in `__del__`: when the garbage collector comes, between any two lines",
            "Each rank collects garbage at another moment, and waits there for the others.",
            "Give the object a method that closes it, and call that at one place on every rank.",
            steps_of(view, None, event, hit),
        )  # fmt: skip


def _is_signal_call(callee: str) -> bool:
    return callee in ("signal.signal", "signal") or callee.endswith(".add_signal_handler")


def _hands_on(view: FunctionView, callee: str, node: ast.Call) -> bool:
    """Return whether a function of the program hands what it is given to a thread or a pool."""
    if not node.args or not any(isinstance(a, ast.Name | ast.Attribute) for a in node.args[:2]):
        return False
    return any(
        call.callee.rsplit(".", 1)[-1] in ("submit", "Thread", "run_in_executor")
        for target in view.program.targets(view.index, callee)
        for call in view.program.functions[target.function].calls
    )


def first_explicit(view: FunctionView, name: str) -> tuple[str, Axes | str, bool] | None:
    for target in view.program.targets(view.index, name):
        for entry in view.reach.of[target.function].values():
            if entry.is_explicit:
                return entry.kind, entry.axes, entry.is_sure and target.is_sure
    return None


def _handler(view: FunctionView) -> Iterator[Finding]:
    """HL042 and HL011 in handlers of requests: they run in threads, and a bad request fails on this rank alone."""
    if not _is_handler(view):
        return
    explicit = [e for e in view.events if e.explicit]
    if not explicit:
        return
    event = explicit[0]
    hit = event.explicit[0]
    if not any(
        isinstance(s, ast.With) and any("lock" in dotted(i.context_expr).lower() for i in s.items)
        for s, _ in view.statements
    ):
        yield finding(
            view, "HL042", "medium" if hit.is_sure else "low", event.node,
            f"{what_is_called(event)} runs in a handler of requests, which servers call from several threads",
            "Two requests interleave their collectives on this rank; the others expect one after the other.",
            "Serialise requests with a lock, or hand them to one thread that runs the model.",
            steps_of(view, None, event, hit),
        )  # fmt: skip
    yield finding(
        view, "HL011", "low", event.node,
        f"a request that fails after {what_is_called(event)} fails on this rank only",
        "The other ranks have been ordered to start and wait in the collectives that follow.",
        "Check the whole request before the first collective, and notify the others when it fails.",
        steps_of(view, None, event, hit),
    )  # fmt: skip


def _is_handler(view: FunctionView) -> bool:
    fact = view.fact
    if any(d.rsplit(".", 1)[-1] in _ROUTES and "." in d for d in fact.decorators):
        return True
    if fact.name not in _HANDLER_METHODS or not fact.class_name:
        return False
    class_ = view.file.classes.get(fact.class_name)
    return class_ is not None and any(base.rsplit(".", 1)[-1] in _HANDLER_BASES for base in class_.bases)


def control_message(view: FunctionView, event: Event) -> bool:
    """Return whether a handler's class sends a message to part of the ranks only."""
    class_ = view.file.classes.get(view.fact.class_name)
    is_server = class_ is not None and any(base.rsplit(".", 1)[-1] in _HANDLER_BASES for base in class_.bases)
    axes = event.reached[0].axes
    return is_server and event.is_direct and event.reached[0].kind == "broadcast" and axes not in (WORLD, UNKNOWN)


def check_control(view: FunctionView) -> Iterator[Finding]:
    """HL032: a server on one rank sends its commands to one axis of the others only."""
    for event in view.events:
        if control_message(view, event):
            hit = event.reached[0]
            yield finding(
                view, "HL032", "low", event.node,
                f"the server sends its commands to the others by a broadcast over {axes_text(hit.axes)} only",
                "Ranks of the same model that are not in that group "
                "(other pipeline stages) wait for the message for ever.",
                "Broadcast over all ranks of the model, from the server's global rank.",
                steps_of(view, None, event, hit),
            )  # fmt: skip
