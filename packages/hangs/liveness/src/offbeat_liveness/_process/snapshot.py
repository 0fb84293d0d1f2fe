"""The state of one process (`ProcessSnapshot`): plain data, the same in a message and in a dump."""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, cast

T = TypeVar("T")

WaitKind = Literal["collective", "p2p", "barrier", "rendezvous", "store", "declared", "outside"]
State = Literal["running", "finished", "failed"]
OutsideKind = Literal[
    "http", "socket", "ray", "queue", "future", "lock", "asyncio", "subprocess", "process", "file", "terminal",
    "debugger", "import", "sleep", "thread", "signal",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CallSite:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective that this process has entered.

    Args:
        group: torch's name of the process group.
        seq: its number among the collectives of that group, from 1; equal on all members when they are in step.
        op: such as "all_reduce".
        inputs, outputs: each tensor as "Float[3, 5]".
        done: it has finished, or failed.
        created_ns: when it was issued, nanoseconds since the epoch.
        thread: ident of the thread that issued it.
        backend: "gloo", "nccl".
        call_site: where it was called, if that was asked for.
        peer: global rank of the other side, for point-to-point operations that a recorder has.
    """

    group: str
    seq: int
    op: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    done: bool = False
    created_ns: int = 0
    thread: int = 0
    backend: str = ""
    call_site: CallSite | None = None
    peer: int | None = None

    def __str__(self) -> str:
        tensors = ", ".join(self.inputs or self.outputs)
        return f"{self.op} {tensors}".rstrip()


@dataclass(frozen=True, kw_only=True)
class GroupSnapshot:
    """Progress of this process in one group.

    Args:
        name: torch's name of the group.
        ranks: global ranks of the members.
        axes: mesh axes, if `name_group` was given them.
        backend: such as "gloo".
        entered: number of the last collective entered, 0 before the first; None where it is unknown.
        recent: the last collectives, oldest first.
        transfers: point-to-point operations that the recorder has and that are not over, oldest first.
        timeout_s: torch's own, after which it ends a call of this group.
        worker: name of the thread that issued its newest collective, if it still runs; "" where that is not known.
        is_foreign: made over another store than the world's own, so `ranks` is empty: its members are not ranks of
            this world.
        place: of a foreign group, the address of its store; with the name it is the same for all members.
        size: its number of members, known of a foreign group too.
    """

    name: str
    ranks: tuple[int, ...]
    axes: tuple[str, ...] = ()
    backend: str = ""
    entered: int | None = 0
    recent: tuple[Collective, ...] = ()
    transfers: tuple[Collective, ...] = ()
    timeout_s: float | None = None
    worker: str = ""
    is_foreign: bool = False
    place: str = ""
    size: int = 0

    @property
    def key(self) -> tuple[str, tuple[int, ...] | str]:
        """Return what distinguishes two groups of a world, on any rank.

        A group of another world by where its members meet.
        """
        return self.name, self.place if self.is_foreign else self.ranks

    def at(self, seq: int) -> Collective | None:
        return next((each for each in reversed(self.recent) if each.seq == seq), None)


@dataclass(frozen=True, kw_only=True)
class LeftGroup:
    """A group that this process has destroyed: a rank that still waits in it for this process waits for ever.

    Args:
        world: token of the world it belonged to.
        rank: of this process in that world.
        group: how far it had come.
    """

    world: str
    rank: int
    group: GroupSnapshot


@dataclass(frozen=True, kw_only=True)
class Wait:
    """One thing this process waits in.

    Args:
        kind: what sort of call.
        what: its name: "all_reduce", "recv", "sample_queue.get".
        age_s: how long nothing has moved in it.
        thread: name of the thread that stands in it.
        group: torch's name of the group, for collectives, barriers and p2p.
        seq: number in the group; collectives only.
        peers: global ranks it needs, where the call itself says so (p2p).
        root: global rank of the root or source of a collective, if the stack shows it.
        on: name of the producer of a declared wait, or the key of a store wait.
        deadline_s: of a declared wait.
        timeout_s: torch's own for this call, counted from its start; None where it has none or it is unknown.
        stack: where the thread stands, innermost first; without torch's own frames.
        outside: of a wait outside torch, read off the frames.
        is_posted: the operation is pending, and its thread may only ask now and then whether it is over.
        has_own_deadline: `timeout_s` was given to this very call, so the program may continue when it is over.
    """

    kind: WaitKind
    what: str
    age_s: float
    thread: str = "MainThread"
    group: str = ""
    seq: int = 0
    peers: tuple[int, ...] = ()
    root: int | None = None
    on: str = ""
    deadline_s: float | None = None
    timeout_s: float | None = None
    stack: tuple[CallSite, ...] = ()
    outside: "OutsideWait | None" = None
    is_posted: bool = False
    has_own_deadline: bool = False


@dataclass(frozen=True, kw_only=True)
class OutsideWait:
    """Wait of a thread outside torch.distributed, read off its frames.

    Args:
        kind: what sort of call.
        text: for people: "an HTTP answer of 10.0.0.7:8000 (requests)", "queue.get of a queue that is empty".
        address: "host:port" of the other side, where it is a connection.
        pid: of the process that is waited for, where it is one of this host.
        on: name of the other side where the program has given it one: an actor, a task, a thread, a path.
        timeout_s: the call's own, None where it has none: it may wait for ever.
    """

    kind: OutsideKind
    text: str
    address: str = ""
    pid: int = 0
    on: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ThreadSnapshot:
    """State of one thread.

    Args:
        name: of the thread.
        still_s: how long it has shown no new line.
        stack: innermost first.
        outside: what it waits for outside torch, if that is known.
        in_flight: the exception that it handles or cleans up after, one line; "" if there is none.
    """

    name: str
    still_s: float = 0.0
    stack: tuple[CallSite, ...] = ()
    outside: OutsideWait | None = None
    in_flight: str = ""


MAIN_THREAD: Final = "MainThread"


def leading(threads: Sequence[ThreadSnapshot]) -> list[ThreadSnapshot]:
    """Return the worker of a process, which is reported first, and its main thread."""
    return [each for number, each in enumerate(threads) if number == 0 or each.name == MAIN_THREAD]


@dataclass(frozen=True, kw_only=True)
class ProcessSnapshot:
    """State of one process now.

    Args:
        key: host and pid; unique in a run.
        name: "rank 3", or what `watch(name=)` said.
        rank: global rank, None outside of torch.distributed.
        world: token of the world the rank counts in.
        world_size: processes in that world.
        pid, host: where it runs.
        born: when it started, in the kernel's clock ticks; differs for a later process with its pid. 0 if unknown.
        time_s: when this was read, seconds since the epoch.
        state: running, finished (left without an error), failed (an exception ended its main thread).
        error: the exception of a failed process, one line.
        error_stack: where it was raised, innermost first.
        still_s: how long its ledger has not moved and no new line was seen in its main thread or its worker (the thread
            that issued its newest collective).
        busy: share of that time in which one of these had work, on a core or for a disk.
        tree_busy: how many cores the whole process and its descendants have used since they were last looked at; at
            least 1 if they moved data.
        held_up_s: how long one callback has computed in the event loop of its main thread, at lines seen before; 0
            where the loop turns, or its callback waits for something that is known.
        waits: what it stands in, oldest first.
        groups: its process groups.
        threads: its worker, its main thread, and the threads that wait.
        free_threads: names of the threads that stand in no wait and could release another one.
        left_groups: those that it has destroyed.
        listens: ports at which this process accepts connections.
        notes: what the monitor could not see, reported once.
        left: last snapshots of processes that have notified this one of their end.
        has_answered: False for one that has not answered this time. This is its last answer: it came so far, but may
            have continued since.
        is_stand_in: True where others have written this for a process that does not answer: they know whether it uses
            time, and nothing of its waits.
    """

    key: str
    name: str
    rank: int | None = None
    world: str = ""
    world_size: int = 0
    pid: int = 0
    born: int = 0
    host: str = ""
    time_s: float = 0.0
    state: State = "running"
    error: str = ""
    error_stack: tuple[CallSite, ...] = ()
    still_s: float = 0.0
    busy: float = 0.0
    tree_busy: float = 0.0
    held_up_s: float = 0.0
    waits: tuple[Wait, ...] = ()
    groups: tuple[GroupSnapshot, ...] = ()
    threads: tuple[ThreadSnapshot, ...] = ()
    free_threads: tuple[str, ...] = ()
    left_groups: tuple[LeftGroup, ...] = ()
    listens: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    left: tuple["ProcessSnapshot", ...] = field(default=(), repr=False)
    has_answered: bool = True
    is_stand_in: bool = False

    def group(self, key: tuple[str, tuple[int, ...] | str]) -> GroupSnapshot | None:
        return next((each for each in self.groups if each.key == key), None)

    def left_group(self, world: str, key: tuple[str, tuple[int, ...] | str]) -> GroupSnapshot | None:
        """Return a group of a world as it was when this process destroyed it."""
        return next((each.group for each in self.left_groups if (each.world, each.group.key) == (world, key)), None)


def to_data(value: Any) -> dict[str, Any]:
    """Return a dataclass of this module as dicts, lists and scalars."""
    return dataclasses.asdict(value)


def from_data(kind: type[T], data: dict[str, Any]) -> T:
    """Return a dataclass from its data; unknown keys are left out, so that versions may differ a little."""
    readers = _readers(cast("Hashable", kind))
    return kind(**{name: readers[name](value) for name, value in data.items() if name in readers})


@functools.cache
def _readers(kind: Any) -> dict[str, Callable[[Any], Any]]:
    """Return how each field of a dataclass is read; found out once, since a leader reads thousands of heads."""
    hints = typing.get_type_hints(kind)
    return {each.name: _reader(hints[each.name]) for each in dataclasses.fields(kind)}


def _reader(hint: Any) -> Callable[[Any], Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = _reader(next(each for each in arguments if each is not type(None)))
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        item = _reader(arguments[0])
        return tuple if item is _as_it_is else lambda value: tuple([item(each) for each in value])
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return lambda value: from_data(hint, value)
    return _as_it_is


def _as_it_is(value: Any) -> Any:
    return value
