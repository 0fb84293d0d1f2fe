"""Waits without an end and peers that may be gone: HL050, HL051 and HL060 to HL065."""

import ast
from collections.abc import Iterator
from typing import Final

from offbeat_hanglint._axes import words
from offbeat_hanglint._program.expressions import dotted
from offbeat_hanglint._program.facts import returns_at_once
from offbeat_hanglint._program.view import FunctionView, Guard
from offbeat_hanglint._rules.finding import Confidence, Finding
from offbeat_hanglint._rules.report import finding, is_test

_QUEUE_WORDS: Final = frozenset(("queue", "q", "inbox", "mailbox", "channel"))
_EVENT_WORDS: Final = frozenset(
    ("event", "cond", "condition", "barrier", "ready", "done", "stop", "started", "finished", "semaphore")
)
_SOCKET_WORDS: Final = frozenset(
    ("socket", "sock", "zmq", "conn", "connection", "pipe", "dealer", "router", "subscriber")
)
_PROCESS_WORDS: Final = frozenset(("process", "proc", "thread", "worker", "p", "t", "processes", "threads"))
_FUTURE_WORDS: Final = frozenset(("future", "fut", "futures", "task", "handle"))
_RECEIVES: Final = frozenset(("recv", "recv_string", "recv_pyobj", "recv_multipart", "recv_json"))
_CLOCKS: Final = (
    "time.time",
    "monotonic",
    "perf_counter",
    "deadline",
    "timeout",
    "max_wait",
    "max_retries",
    "attempt",
    "retries",
    "elapsed",
    "range",
)


def check(view: FunctionView) -> Iterator[Finding]:
    """Report each wait once."""
    for node, callee, guard in view.calls:
        yield from _rendezvous(view, node, callee)
        yield from _ray(view, node, callee)
        yield from _wait(view, node, callee, guard)
    yield from _blocking_in_async(view)
    yield from _polling(view)
    yield from _one_task_awaited(view)
    yield from _unchecked_resources(view)
    yield from _dropped(view)


def _rendezvous(view: FunctionView, node: ast.Call, callee: str) -> Iterator[Finding]:
    last = callee.rsplit(".", 1)[-1]
    if last != "init_process_group":
        return
    given = {k.arg: k.value for k in node.keywords}
    rank, size = given.get("rank"), given.get("world_size")
    if rank is not None and _is_local_rank(view, rank):
        yield _wrong_rank(view, node, "rank", "the rank within the node")
    elif size is not None and _is_device_count(view, size):
        yield _wrong_rank(view, node, "world_size", "the number of devices of this node")
    if "timeout" not in given and None not in given and not is_test(view.file.path):
        yield finding(
            view, "HL051", "low", node,
            f"`{callee}` has no timeout of its own",
            "A rank that never comes is noticed only after the backend's default (10 to 30 minutes), or not at all.",
            "Pass `timeout=` with the longest wait that the program means to have.",
        )  # fmt: skip


def _is_local_rank(view: FunctionView, node: ast.expr, depth: int = 0) -> bool:
    if depth > 4:
        return False
    text = dotted(node)
    if isinstance(node, ast.Name) and (value := view.value_of(node.id, node)) is not None:
        return _is_local_rank(view, value, depth + 1)
    if isinstance(node, ast.Call) and node.args and dotted(node.func) in ("int", "os.getenv", "os.environ.get"):
        return _is_local_rank(view, node.args[0], depth + 1)
    if isinstance(node, ast.Constant):
        return node.value == "LOCAL_RANK"
    last = text.rsplit(".", 1)[-1].removesuffix("()")
    return "LOCAL_RANK" in text or words(last) in (("local", "rank"), ("get", "local", "rank"))


def _is_device_count(view: FunctionView, node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        node = view.value_of(node.id, node) or node
    return isinstance(node, ast.Call) and dotted(node.func).endswith("device_count")


def _wrong_rank(view: FunctionView, node: ast.Call, argument: str, what: str) -> Finding:
    return finding(
        view, "HL050", "high", node,
        f"`init_process_group` is given {what} as `{argument}`",
        "With more than one node several processes announce the same "
        "rank, or too few are expected; the rendezvous never completes.",
        "Use RANK and WORLD_SIZE of the launcher.",
    )  # fmt: skip


def _ray(view: FunctionView, node: ast.Call, callee: str) -> Iterator[Finding]:
    keywords = {k.arg for k in node.keywords}
    full = view.program.full_name(view.file, callee)
    if (
        full in ("ray.get", "ray.wait")
        and not keywords & {"timeout", None}
        and not (full == "ray.get" and len(node.args) > 1)
    ):
        inner = dotted(_one_of(view, node.args[0])) if node.args else ""
        what = "a placement group" if inner.endswith("ready()") else f"`{inner}`" if inner else "its arguments"
        confidence: Confidence = "high" if inner.endswith(".ready()") else "low"
        yield finding(
            view, "HL060", confidence, node,
            f"`{callee}` waits for {what} without a timeout",
            "If the actor is blocked, restarted or cannot be placed, this process waits for ever.",
            "Pass `timeout=` and name what was waited for when it passes.",
        )  # fmt: skip
    elif callee.endswith(".wait") and "pg" in words(callee.split(".")[0]) and not node.args and not keywords:
        yield finding(
            view, "HL060", "low", node, f"`{callee}` waits for a placement group without a timeout",
            "A cluster without the resources never gives it.", "Pass a timeout and say what was asked for.",
        )  # fmt: skip
    elif full == "ray.init" and not keywords & {"num_cpus", "address", "resources", None} and not node.args:
        yield finding(
            view, "HL065", "low", node, "`ray.init` does not say how many CPUs the cluster has",
            "Where the process may use fewer CPUs than the machine has, "
            "Ray starts a worker per CPU and start-up may hang.",
            "Pass `num_cpus=` from the configuration.",
        )  # fmt: skip


def _one_of(view: FunctionView, waited: ast.expr) -> ast.expr:
    """Return the expression waited for, or one entry of a list: of `[group.ready() for group in groups]`."""
    if isinstance(waited, ast.Name):
        waited = view.value_of(waited.id, waited) or waited
    if isinstance(waited, ast.ListComp | ast.GeneratorExp):
        return waited.elt
    return waited.elts[0] if isinstance(waited, ast.List | ast.Tuple) and waited.elts else waited


def _wait(view: FunctionView, node: ast.Call, callee: str, guard: Guard | None) -> Iterator[Finding]:
    receiver, _, last = callee.rpartition(".")
    if not receiver:
        return
    parts = set(words(receiver.removesuffix("()").rsplit(".", 1)[-1]))
    keywords = {k.arg for k in node.keywords}
    what = ""
    if last == "get" and parts & _QUEUE_WORDS and not node.args and not keywords & {"timeout", "block"}:
        what = "a queue"
    elif last == "wait" and parts & _EVENT_WORDS and not node.args and "timeout" not in keywords:
        what = "an event"
    elif last == "result" and parts & _FUTURE_WORDS and not node.args and "timeout" not in keywords:
        what = "a future"
    elif last == "join" and parts & _PROCESS_WORDS and not node.args and not keywords:
        what = "a thread or process"
    elif (
        last in _RECEIVES
        and parts & _SOCKET_WORDS
        and not any("RCVTIMEO" in ast.dump(n) for n in ast.walk(view.node) if isinstance(n, ast.Attribute))
        and not _never_blocks(node, receiver, guard)
    ):
        what = "a socket"
    elif last in ("get", "wait") and "store" in parts and (node.args or last == "wait") and "timeout" not in keywords:
        what = "a store" if (last == "wait" and len(node.args) < 2) or (last == "get" and "tcp" in parts) else ""
    elif last in ("wait", "communicate") and parts & {"process", "proc", "popen"} and not node.args and not keywords:
        what = "a process"
    elif callee in ("requests.get", "requests.post", "requests.put") and not keywords & {"timeout", None}:
        what = "a server"
    if what:
        yield finding(
            view, "HL061", _socket_confidence(view, receiver, parts, guard) if what == "a socket" else "low", node,
            f"`{callee}` waits for {what} without a timeout",
            "If the other side is gone or failed without an answer, this one waits for ever.",
            "Wait with a timeout in a loop that checks whether the other side lives, and answer errors, too.",
        )  # fmt: skip


def _never_blocks(node: ast.Call, socket: str, guard: Guard | None) -> bool:
    """Return whether a socket is read only when it has data: set not to block, or after `socket.poll(...)`."""
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    if any(flag in ast.unparse(argument) for argument in given for flag in ("DONTWAIT", "NOBLOCK")):
        return True
    tests = [getattr(around.node, "test", None) for around in (guard.chain() if guard else ())]
    asked = [call for test in tests if test is not None for call in ast.walk(test) if isinstance(call, ast.Call)]
    return any(dotted(call.func) == f"{socket}.poll" for call in asked)


def _socket_confidence(view: FunctionView, socket: str, parts: set[str], guard: Guard | None) -> Confidence:
    """Return whether a wait is a server's, for its next request: one for an answer needs a deadline.

    Code that made the socket may have given it a timeout, if it was not this function or its class.
    """
    loops = [g.node for g in (guard.chain() if guard else ()) if g.kind == "loop"]
    if any(isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant) for loop in loops):
        return "low"
    if _sets_timeouts(view):
        return "low"
    if "." not in socket and socket not in view.assigned:
        return "medium"
    return "medium" if parts & {"conn", "connection", "pipe"} else "high"  # a pipe whose other end has died says so


def _sets_timeouts(view: FunctionView) -> bool:
    """Return True if a socket gets a timeout, or never blocks, in this file or in that of a base class."""
    lineage = view.program.lineage(view.program.file_of[view.index], view.fact.class_name)
    return any(
        view.program.files[number].sets_timeouts
        for number in {view.program.file_of[view.index], *(n for n, _ in lineage)}
    )


def _blocking_in_async(view: FunctionView) -> Iterator[Finding]:
    if not view.fact.is_async:
        return
    nodes = list(ast.walk(view.node))
    awaited = {id(n.value) for n in nodes if isinstance(n, ast.Await)}
    written = {id(n) for n in nodes if isinstance(n, ast.Call)}
    for node, callee, _ in view.calls:
        if id(node) not in written:  # made by `asyncio.to_thread` and its like, in a thread
            continue
        full = view.program.full_name(view.file, callee)
        last = callee.rsplit(".", 1)[-1]
        parts = set(words(callee.rpartition(".")[0].rsplit(".", 1)[-1]))
        is_blocking = full in (
            "ray.get",
            "ray.wait",
            "time.sleep",
            "requests.get",
            "requests.post",
            "subprocess.run",
        ) or (last == "result" and parts & _FUTURE_WORDS - {"task", "handle"})
        through = "" if is_blocking or id(node) in awaited else _blocking_target(view, callee)
        if through:
            yield finding(
                view, "HL062", "medium", node,
                f"`{callee}` blocks the event loop of an async function: {through} waits in ray.get",
                "While it waits nothing else of this process runs, also not the call that would answer it.",
                "Await the reference instead, or run the call in a thread (`asyncio.to_thread`).",
            )  # fmt: skip
        if is_blocking and id(node) not in awaited and not returns_at_once(node):
            yield finding(
                view, "HL062", "high" if full in ("ray.get", "ray.wait") else "low", node,
                f"`{callee}` blocks the event loop of an async function",
                "While it waits nothing else of this process runs, also not the call that would answer it.",
                "Await instead (`await ref`, `asyncio.sleep`, `asyncio.to_thread`).",
            )  # fmt: skip


def _blocking_target(view: FunctionView, callee: str) -> str:
    """Return a plain function of the program that a call means and that waits in ray.get itself, "" if it is none."""
    for target in view.program.targets(view.index, callee):
        function = view.program.functions[target.function]
        file = view.program.files[view.program.file_of[target.function]]
        if not function.is_async and any(
            view.program.full_name(file, call.callee) in ("ray.get", "ray.wait") and not call.is_brief
            for call in function.calls
        ):
            return function.qualified
    return ""


def _one_task_awaited(view: FunctionView) -> Iterator[Finding]:
    """HL063: of several tasks only one is awaited; if another fails, no code sees it."""
    if not view.fact.is_async:
        return
    tasks: dict[str, ast.stmt] = {}
    for statement, _ in view.statements:
        value = statement.value if isinstance(statement, ast.Assign) else None
        if isinstance(value, ast.Call) and dotted(value.func).rsplit(".", 1)[-1] in ("create_task", "ensure_future"):
            tasks[dotted(statement.targets[0])] = statement  # type: ignore[attr-defined]
    if len(tasks) < 2 or any(c.rsplit(".", 1)[-1] == "wait" for _, c, _ in view.calls):
        return
    for node in ast.walk(view.node):
        if isinstance(node, ast.Await) and dotted(node.value) in tasks:
            others = ", ".join(f"`{name}`" for name in tasks if name != dotted(node.value))
            yield finding(
                view, "HL063", "low", node,
                f"only `{dotted(node.value)}` is awaited while {others} runs beside it",
                "If the other task fails, what it should have taken is never taken, and this one waits for ever.",
                "Wait for whichever ends first (asyncio.wait with "
                "FIRST_COMPLETED, or a TaskGroup) and raise its error.",
            )  # fmt: skip
            return


def _unchecked_resources(view: FunctionView) -> Iterator[Finding]:
    """HL065: placement groups are asked for without a look at what the cluster has."""
    if any("resources" in c for _, c, _ in view.calls) or is_test(view.file.path):
        return
    for node, callee, _ in view.calls:
        if callee.rsplit(".", 1)[-1] in view.program.placing_classes:
            yield finding(
                view, "HL065", "low", node,
                f"`{callee}` asks Ray for placement groups of a configured "
                "size, which nothing compares with the cluster",
                "If the cluster has fewer devices, the wait for the placement group never ends.",
                "Compare with `ray.cluster_resources()` first, and say what was asked for and what there is.",
            )  # fmt: skip
            return


def _polling(view: FunctionView) -> Iterator[Finding]:
    """HL063: a loop that sleeps until something is there, without a deadline."""
    for statement, _ in view.statements:
        if not isinstance(statement, ast.While):
            continue
        text_nodes = list(ast.walk(statement))
        calls = [dotted(n.func) for n in text_nodes if isinstance(n, ast.Call)]
        sleeps = any(c.rsplit(".", 1)[-1] == "sleep" for c in calls)
        if not sleeps:
            continue
        names = {dotted(n) for n in text_nodes if isinstance(n, ast.Name | ast.Attribute)}
        if any(clock in name for name in (*names, *calls) for clock in _CLOCKS):
            continue
        unset = _flag_never_set(view, statement)
        is_forever = isinstance(statement.test, ast.Constant)
        if is_forever and not unset and not any(isinstance(n, ast.Break | ast.Return) for n in text_nodes):
            continue
        message = (
            f"`{unset}` ends the loop but nothing in the program sets it"
            if unset
            else "a loop waits, asleep, for something that may never come"
        )
        yield finding(
            view, "HL063", "medium" if unset else "low", statement, message,
            "If the process that would change it has ended, this one stays here for ever.",
            "Count a deadline, and check in each round whether the other side lives.",
        )  # fmt: skip


def _flag_never_set(view: FunctionView, loop: ast.While) -> str:
    """Return an attribute that the loop tests and that the program assigns nowhere outside of constructors."""
    tests = [loop.test, *(n.test for n in ast.walk(loop) if isinstance(n, ast.If))]
    for test in tests:
        for node in ast.walk(test):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                name = node.attr
                if {
                    "shutdown",
                    "stop",
                    "stopped",
                    "exit",
                    "closed",
                    "running",
                    "terminate",
                    "done",
                    "quit",
                    "cancel",
                } & set(words(name)) and not _is_set(view, name):
                    return f"self.{name}"
    return ""


def _is_set(view: FunctionView, name: str) -> bool:
    return any(name in file.set_later for file in view.program.files)


def _dropped(view: FunctionView) -> Iterator[Finding]:
    """HL064: remote calls whose results are not kept, or answers that are dropped."""
    for statement, _ in view.statements:
        value = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
        if value is None or not isinstance(value, ast.Call):
            continue
        callee = dotted(value.func)
        is_dropped = isinstance(statement, ast.Expr) or (
            isinstance(statement, ast.Assign) and dotted(statement.targets[0]) == "_"
        )
        if not is_dropped:
            continue
        if callee.endswith(".remote") and isinstance(statement, ast.Expr):
            yield finding(
                view, "HL064", "low", statement,
                f"the result of `{callee}` is dropped, so no code waits for it or sees it fail",
                "The caller continues as if the call was done; if it failed, others wait for what it should have done.",
                "Keep the reference and wait for it with a timeout.",
            )  # fmt: skip
        elif isinstance(statement, ast.Assign) and view.program.full_name(view.file, callee).rsplit(".", 1)[-1] in (
            "get",
            "ray_get_with_progress",
            "gather",
            "wait",
        ):
            yield finding(
                view, "HL064", "low", statement,
                f"what `{callee}` returns is dropped; references within it are never waited for",
                "Calls that the answers stand for may still run, or have failed.",
                "Look at the answers; wait for the references that they hold.",
            )  # fmt: skip
