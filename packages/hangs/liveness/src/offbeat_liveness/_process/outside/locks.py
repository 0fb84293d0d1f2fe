"""Lock that a thread waits for, by the line that takes it, and the thread that holds it."""

import dis
import itertools
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Final

from offbeat_liveness._process.outside import peek
from offbeat_liveness._process.snapshot import OutsideKind, OutsideWait
from offbeat_liveness._process.stacks import current_frames

RLOCK: Final = type(threading.RLock())
MAX_CODE_BYTES: Final = 20_000
MAX_FRAMES: Final = 64
MAX_HANDLERS: Final = 16  # one within the other
METHODS: Final[dict[str, OutsideKind]] = {"acquire": "lock", "__enter__": "lock", "get": "queue"}
Region = tuple[int, int, int]
"""First offset, end and handler of one line of a code's exception table."""


def lock_wait(frame: FrameType) -> OutsideWait | None:
    """Find a lock, only where the instruction that runs takes one: a futex is also how threads wait for the GIL."""
    name, method = _callee(frame.f_code, frame.f_lasti)
    kind = METHODS.get(method)
    if kind is None:
        return None
    if kind == "queue":
        return OutsideWait(kind=kind, text=f"{name or 'queue'}.get: the queue is empty", on=name)
    lock = _named(frame, name)
    holder = holder_of(lock) or (_keeper(lock, name, frame) if name else "")
    return OutsideWait(kind=kind, text=f"the lock {name}{holder}" if name else "a lock", on=name)


def _callee(code: CodeType, at: int) -> tuple[str, str]:
    """Return which name's method runs: ("self.lock", "acquire"); of a `with`, "__enter__"."""
    if len(code.co_code) > MAX_CODE_BYTES:
        return "", ""
    before = [each for each in dis.get_instructions(code) if each.offset <= at]
    if not before or before[-1].opname not in ("BEFORE_WITH", "CALL", "CALL_FUNCTION_EX", "CALL_KW"):
        return "", ""
    method = "__enter__" if before[-1].opname == "BEFORE_WITH" else ""
    names: list[str] = []
    for each in reversed(before[:-1]):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if not method:
                method = str(each.argval)
            else:
                names.append(str(each.argval))
        elif each.opname.startswith(("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")):
            if method:
                names.append(str(each.argval))
                return ".".join(reversed(names)), method
        elif method and each.opname.startswith(("CALL", "BINARY")):
            break
    return "", method


def _named(frame: FrameType, name: str) -> object:
    """Return what a name such as "self.lock" is in a frame; None where that may not be read (`peek.own_local`)."""
    first, *rest = name.split(".")
    found: object = frame.f_globals.get(first) if first in frame.f_globals else peek.own_local(frame, first)
    for each in rest:
        found = peek.attribute(found, each) if found is not None else None
    return found


def holder_of(lock: object) -> str:
    """Return text such as ", held by the thread 'writer'"; "" where that is not known."""
    if type(lock) is not RLOCK:
        return ""
    owner = RLOCK.__repr__(lock).partition("owner=")[2].partition(" ")[0]
    threads = peek.thread_names()
    return f", held by the thread {threads[int(owner)]!r}" if int(owner or 0) in threads else ""


def _keeper(lock: object, name: str, waiter: FrameType) -> str:
    """Name the thread within a `with` of a lock that does not know its owner, as the rest of a sentence.

    Where the lock cannot be read in that frame, by the name that it has there. The thread that waits may be the one
    that holds it: it has taken the lock further out, and takes it again.
    """
    frames, threads = current_frames(), peek.thread_names()
    found: list[tuple[int, str]] = []
    try:
        for ident, innermost in frames.items():
            is_own = innermost is waiter
            for frame in _outward(innermost):
                context = next((each for each in _contexts_of(frame) if _last(each) == _last(name)), None)
                known = _named(frame, context) if context is not None else None
                if context is not None and (known is None or lock is None or known is lock):
                    is_sure = known is not None and known is lock
                    holder = "this thread itself" if is_own else f"the thread {threads.get(ident, '?')!r}"
                    place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
                    verb = "is held by" if is_sure else "seems to be held by"
                    if is_sure or not is_own or _owner(frame) == _owner(waiter):
                        found.append((0 if is_sure else 1 if is_own else 2, f"{verb} {holder} at {place}"))
                        break
    finally:
        frames.clear()
    return f", which {min(found)[1]}" if found else ""


def _owner(frame: FrameType) -> str:
    """Name of the class, or function, in which a function is defined; "" at module level."""
    return frame.f_code.co_qualname.rpartition(".")[0]


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _contexts_of(frame: FrameType) -> Iterator[str]:
    """Yield the names of what the `with` statements hold in which a frame stands."""
    code, at = frame.f_code, frame.f_lasti
    if len(code.co_code) > MAX_CODE_BYTES or not code.co_exceptiontable:
        return
    instructions = list(dis.get_instructions(code))
    table: list[Region] = [(each.start, each.end, each.target) for each in dis._parse_exception_table(code)]  # type: ignore[attr-defined]
    around = set(_handlers_around(table, at))
    for entering, body in itertools.pairwise(instructions):
        if entering.opname == "BEFORE_WITH" and entering.offset < at:
            handler = next(_handlers_around(table, body.offset), None)
            if handler is not None and handler in around:
                yield _callee(code, entering.offset)[0]


def _handlers_around(table: list[Region], at: int) -> Iterator[int]:
    """Yield where an exception at an instruction goes, then where one of that handler goes, outward."""
    for _ in range(MAX_HANDLERS):
        region = next((each for each in table if each[0] <= at < each[1]), None)
        if region is None:
            return
        at = region[2]
        yield at
