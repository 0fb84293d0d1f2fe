"""Waits that torch's flight recorder does not write down: declared waits, point-to-point, store waits.

Of collectives only their `wait()` passes through here. Blocking calls of torch.distributed that are recorded nowhere
(`monitored_barrier`, `new_group`, `init_process_group`) are read from the stack when the monitor looks
(`process_groups.torch_call`), so they cost nothing either.
"""

import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Final

from offbeat_liveness._process.snapshot import WaitKind

MAX_POSTED: Final = 256
MAX_KEYS: Final = 4  # of one store wait that are reported
P2P_CALLS: Final = ("send", "recv", "recv_anysource")
STORE_CALLS: Final = ("get", "wait", "multi_get", "queue_pop", "queue_push")
PATCHED: Final = "_offbeat_liveness"
STORE_TIMEOUT_S: Final = 300.0  # torch's own for a store that is given none
_TRANSFERRING: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
"""Groups that have used p2p, or had been used before anybody looked."""
_BEFORE_WAIT: Final[list[Callable[[], None]]] = []


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """One open wait.

    Args:
        kind, what, on, deadline_s: as in `Wait`.
        since_s: monotonic seconds when it began.
        thread: ident of its thread.
        group: gives the process group object, for p2p; weak, so that a destroyed group closes its connections.
        peer: rank within that group; -1 means any.
        work: torch's handle, for p2p; weak, so that nothing lives longer than the caller lets it.
        source: the store of a store wait.
        timeout: the call's own, as it was given; None where it was given none.
    """

    kind: WaitKind
    what: str
    on: str = ""
    deadline_s: float | None = None
    since_s: float = field(default_factory=time.monotonic)
    thread: int = field(default_factory=threading.get_ident)
    group: Callable[[], Any] = field(default=lambda: None)
    peer: int = -1
    work: Callable[[], Any] = field(default=lambda: None)
    source: Any = None
    timeout: Any = None

    def is_over(self) -> bool:
        work = self.work()
        return work is None or bool(work.is_completed())


class Ledger:
    """The open waits of this process. Adding and closing is one dict operation, safe under the GIL.

    Attributes:
        posted: point-to-point operations by the id of their handle; one counts as a wait while a thread stands in the
            handle's `wait()`. gloo's are not complete before that, however long ago the message went.
        met_s: when each thread last came out of a rendezvous, or gave one up; monotonic.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, Entry] = {}
        self.met_s: dict[int, float] = {}
        self.posted: dict[int, Entry] = {}
        self._prune_from = MAX_POSTED

    def enter(self, entry: Entry) -> int:
        number = next(self._numbers)
        self._open[number] = entry
        return number

    def leave(self, number: int) -> None:
        entry = self._open.pop(number, None)
        if entry is not None and entry.kind == "rendezvous":
            self.met_s[entry.thread] = time.monotonic()

    def during(self, entry: Entry, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Make a call that may wait, with its entry open."""
        number = self.enter(entry)
        try:
            return call(*args, **named)
        finally:
            self.leave(number)

    def post(self, entry: Entry) -> None:
        """Write down a point-to-point operation, which is over when its handle says so."""
        self.posted[id(entry.work())] = entry
        if len(self.posted) > self._prune_from:
            self._prune()
            self._prune_from = max(MAX_POSTED, 2 * len(self.posted))

    def open_waits(self) -> list[Entry]:
        return sorted(self._open.copy().values(), key=lambda entry: entry.since_s)

    def clear(self) -> None:
        """Forget everything: in a forked child the threads that waited do not exist."""
        self.posted.clear()  # the same object: the patched methods look into it
        self._open.clear()
        self.met_s.clear()
        self._prune_from = MAX_POSTED

    def _prune(self) -> None:
        for number, entry in self.posted.copy().items():
            if entry.is_over():
                self.posted.pop(number, None)  # another thread prunes too


LEDGER: Final = Ledger()


def before_wait(call: Callable[[], None] | None) -> None:
    """Have something called before each declared wait, until None takes that back."""
    _BEFORE_WAIT[:] = [call] if call else []


class waiting:  # noqa: N801 - a context manager that reads as a verb, like contextlib's
    """Declare a wait that the monitor could not see: a queue, a future, a request, a rendezvous.

    Costs about a microsecond. It does not interrupt anything: past `stall_after_s` (or `deadline_s`, while the producer
    is seen to move) the monitor's verdict names it.

    Args:
        name: of the wait, such as "sample_queue.get".
        on: what has to act: a process's name ("rollouter", "rank 3") or a role that several names begin with.
        deadline_s: how long it may last while its producer moves; 10 × stall_after_s without it.

    Example:
        with liveness.waiting("sample_queue.get", on="rollouter", deadline_s=600):
            sample = queue.get()
    """

    __slots__ = ("_deadline_s", "_name", "_number", "_on")

    def __init__(self, name: str, *, on: str = "", deadline_s: float | None = None) -> None:
        self._name, self._on, self._deadline_s, self._number = name, on, deadline_s, 0

    def __enter__(self) -> None:
        for call in _BEFORE_WAIT.copy():
            call()
        entry = Entry(kind="declared", what=self._name, on=self._on, deadline_s=self._deadline_s)
        self._number = LEDGER.enter(entry)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        LEDGER.leave(self._number)


def may_have_transferred(group: Any) -> bool:
    return group in _TRANSFERRING


def watch_torch_calls() -> None:
    """Have torch's point-to-point operations, store waits and new stores written down; once per process.

    The methods are replaced on torch's own classes, so `from torch.distributed import send` is seen as well. About 2
    µs for each such call, and 0.1 µs for the `wait()` of a collective.
    """
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    if getattr(c10d.ProcessGroup, PATCHED, False):
        return
    c10d.ProcessGroup._offbeat_liveness = True
    _TRANSFERRING.update(group for group in list(c10d._world.pg_map) if _has_counted(group))
    for name in P2P_CALLS:
        setattr(c10d.ProcessGroup, name, _posting(name, getattr(c10d.ProcessGroup, name)))
    for name in STORE_CALLS:
        if hasattr(c10d.Store, name):
            setattr(c10d.Store, name, _entering(name, getattr(c10d.Store, name)))
    binding = sys.modules["torch._C._distributed_c10d"]
    binding.Work.wait = _awaiting(binding.Work.wait)
    binding.TCPStore.__init__ = _connecting(binding.TCPStore.__init__)


def _has_counted(group: Any) -> bool:
    try:
        return bool(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend that does not count
        return True


def _posting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def post(group: Any, *args: Any, **named: Any) -> Any:
        work = call(group, *args, **named)
        _TRANSFERRING.add(group)
        peer = args[1] if name != "recv_anysource" and len(args) > 1 else -1
        # A coalescing manager hands out no handle: the recorder has what it does.
        if work is not None:
            LEDGER.post(Entry(kind="p2p", what=name, group=weakref.ref(group), peer=peer, work=weakref.ref(work)))
        return work

    return post


def _awaiting(call: Callable[..., Any]) -> Callable[..., Any]:
    posted = LEDGER.posted

    def wait(work: Any, timeout: Any = None) -> Any:
        entry = posted.get(id(work))
        if entry is None or entry.work() is not work:
            return call(work) if timeout is None else call(work, timeout)
        number = LEDGER.enter(Entry(kind="p2p", what=entry.what, group=entry.group, peer=entry.peer, timeout=timeout))
        try:
            return call(work) if timeout is None else call(work, timeout)
        finally:
            LEDGER.leave(number)

    return wait


def timeout_of_wait(frame: FrameType | None) -> Any:
    """Return what the program has given to the `Work.wait` in which a thread stands.

    None where it stands in no such call.
    """
    is_wait = frame is not None and frame.f_code.co_filename == __file__ and frame.f_code.co_name == "wait"
    return frame.f_locals.get("timeout") if is_wait and frame is not None else None


def _entering(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def enter(store: Any, *args: Any, **named: Any) -> Any:
        timeout = args[1] if name == "wait" and len(args) > 1 else None
        entry = Entry(kind="store", what=f"store.{name}", on=_keys(args), source=store, timeout=timeout)
        return LEDGER.during(entry, call, store, *args, **named)

    return enter


def _connecting(call: Callable[..., Any]) -> Callable[..., Any]:
    """Note that a new store waits for its host, or as the host for its guests."""

    def connect(store: Any, *args: Any, **named: Any) -> None:
        values = {**dict(zip(("host_name", "port", "world_size", "is_master", "timeout"), args, strict=False)), **named}
        place = f"{values.get('host_name')}:{values.get('port')}"
        entry = Entry(kind="rendezvous", what="TCPStore", on=place, timeout=values.get("timeout", STORE_TIMEOUT_S))
        LEDGER.during(entry, call, store, *args, **named)

    return connect


def _keys(args: tuple[Any, ...]) -> str:
    keys = args[0] if args else ""
    found = keys[:MAX_KEYS] if isinstance(keys, list | tuple) else [keys]
    return ", ".join(text for text in map(_as_text, found) if text)


def _as_text(key: Any) -> str:
    """Return a key, which torch takes as str or bytes; "" for anything else, such as a set of keys."""
    return key.decode(errors="replace") if isinstance(key, bytes) else key if isinstance(key, str) else ""
