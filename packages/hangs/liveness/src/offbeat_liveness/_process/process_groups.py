"""State of torch.distributed in this process: its world, its groups, and the calls its threads are in."""

import functools
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Final

from offbeat_liveness._process import flight_recorder, ledger
from offbeat_liveness._process.flight_recorder import (
    PATIENCE_S,
    StillRecorder,
    backend_of,
    group_of,
    of_this_life,
    parse_entries,
    parse_transfers,
    seq_of,
)
from offbeat_liveness._process.nccl_recorder import NCCL, RawEntry
from offbeat_liveness._process.snapshot import Collective, GroupSnapshot, LeftGroup
from offbeat_liveness._process.stacks import OWN_FOLDER

RECENT: Final = 32
DEVICE_MESH: Final = "mesh_"
NO_DESCRIPTION: Final = ("", "undefined", "default_pg")
_AXES: Final[weakref.WeakKeyDictionary[Any, tuple[str, ...]]] = weakref.WeakKeyDictionary()

_INHERITED: Final[list[Callable[[], Any]]] = []
_ENDED_NS: Final[dict[str, int]] = {}
"""When a group of that name was last destroyed: what was recorded before is not of the one that bears the name now."""
MAX_REMEMBERED: Final = 256
PATCHED: Final = "_offbeat_liveness_destroy"
C10D_FILE: Final = "torch/distributed/distributed_c10d.py"
POINT_TO_POINT: Final = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
RENDEZVOUS: Final = frozenset(
    {
        "destroy_process_group", "init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration",
        "split_group", "_store_based_barrier", "_new_process_group_helper",
    }
)  # fmt: skip
COLLECTIVES: Final = frozenset(
    {
        "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
        "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast",
        "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "reduce_scatter_single",
        "reduce_scatter_tensor", "scatter", "scatter_object_list",
    }
)  # fmt: skip
BLOCKING: Final = POINT_TO_POINT | RENDEZVOUS | COLLECTIVES | {"monitored_barrier"}
STORE_RENDEZVOUS: Final = frozenset(
    {
        "rendezvous",
        "_create_c10d_store",
        "_env_rendezvous_handler",
        "_file_rendezvous_handler",
        "_tcp_rendezvous_handler",
    }
)
FUNCTIONAL: Final = frozenset({"wait_tensor"})
REMOTE_CALLS: Final = frozenset({"init_rpc", "rpc_sync", "shutdown", "_all_gather", "_barrier", "_wait_all_workers"})
STATELESS: Final = frozenset(
    {"all_gather_obj", "barrier", "broadcast", "broadcast_obj", "recv", "recv_obj", "send", "send_obj"}
)
CALLS: Final = {
    C10D_FILE: BLOCKING,
    "torch/distributed/rendezvous.py": STORE_RENDEZVOUS,
    "torch/distributed/_functional_collectives.py": FUNCTIONAL,
    "torch/distributed/rpc/__init__.py": REMOTE_CALLS,
    "torch/distributed/rpc/api.py": REMOTE_CALLS,
    "vllm/distributed/utils.py": STATELESS,
}
"""Calls that may stand for long, by the file that they are defined in."""
LIBRARIES: Final = ("torch/distributed", "vllm/distributed/utils.py", OWN_FOLDER)
"""Files whose frames may lie between two calls of torch: ours do where a function of torch is replaced."""


def name_group(group: Any, axes: Sequence[str]) -> None:
    """Pass the mesh axes that a process group spans to the monitor, so that a verdict can name them.

    Args:
        group: a torch ProcessGroup.
        axes: such as ("dp", "cp").
    """
    _AXES[group] = tuple(axes)


def recent_collectives() -> list[Collective]:
    """Return the collectives this process has entered, oldest first.

    Empty without torch.distributed or with the recorder off.

    Torch itself keeps 2000 unless TORCH_FR_BUFFER_SIZE says otherwise.

    For a thread that issues them, or while none does: torch allows no reads while another thread first uses a group.
    """
    return parse_entries(flight_recorder.read_entries()) if flight_recorder.is_loaded() else []


def settled_collectives(*, patience_s: float = PATIENCE_S) -> list[Collective] | None:
    """`recent_collectives` for any thread at any time, with the line of each call.

    Args:
        patience_s: how long to wait for a moment in which no thread makes or uses a group.

    Returns:
        None when there was no such moment: torch allows no reads while another thread writes.
    """
    if not flight_recorder.is_loaded():
        return []
    entries = StillRecorder(patience_s).entries()
    return None if entries is None else parse_entries(entries)


def default_group() -> Any:
    if not flight_recorder.is_loaded():
        return None
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    group = c10d.GroupMember.WORLD
    return None if any(group is each() for each in _INHERITED) else group


def disown_world() -> None:
    """Reset a forked child: the world that came with the fork is the parent's, whatever torch says."""
    _INHERITED.clear()
    group = default_group()
    if group is not None:
        _INHERITED.append(weakref.ref(group))


def note_end(names: Iterable[str]) -> None:
    """Groups of these names are destroyed; the next may bear them again."""
    _ENDED_NS.update(dict.fromkeys((name.partition(" (")[0] for name in names), time.time_ns()))


def has_groups() -> bool:
    if not flight_recorder.is_loaded():
        return False
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    if c10d.GroupMember.WORLD is not None:
        return default_group() is not None
    return not _INHERITED and bool(c10d._world.pg_names)


def group_members(group: Any) -> tuple[int, ...]:
    """Global ranks of a group's members in group order; () for a group that is gone, or of another world."""
    ranks = _world().pg_group_ranks.get(group, {})
    return () if _is_foreign(group, ranks) else tuple(sorted(ranks, key=ranks.__getitem__))


def group_snapshots(entries: Sequence[RawEntry] | None) -> tuple[GroupSnapshot, ...]:
    """Return how far this process has come in each of its groups.

    Without entries, while the recorder cannot be read, there are only the groups' own counters.
    """
    by_group: dict[tuple[str, str], list[RawEntry]] = defaultdict(list)
    knows_all = entries is not None and flight_recorder.holds_all(entries)
    for entry in entries or ():
        if int(entry["time_created_ns"]) <= _ENDED_NS.get(group_of(entry), 0):
            continue
        by_group[group_of(entry), backend_of(entry)].append(entry)
    return tuple(
        _group_snapshot(
            group, name if len(backends) == 1 else f"{name} ({backend})", backends[backend], held, knows_all
        )
        for group, name in list(_world().pg_names.items())
        for backends in [_backends(group)]
        for backend in backends
        for held in [by_group.get((name, backend), [])]
    )


def _group_snapshot(group: Any, name: str, backend: Any, entries: Sequence[RawEntry], knows_all: bool) -> GroupSnapshot:
    """Return one group, or the part of it that one of its backends does, which counts by itself."""
    backend_name = _backend_name(backend)
    is_silent = backend_name == "nccl" and NCCL.asked_at_s is not None
    members = group_members(group)
    counter = _sequence_number(backend)
    alive = of_this_life(entries)
    alive = alive if not alive or seq_of(alive[-1]) <= counter else []
    recent = parse_entries(alive)
    transfers = [each for each in parse_transfers(alive, members) if not each.done]
    is_foreign = not members
    return GroupSnapshot(
        name=name,
        ranks=members,
        axes=_AXES.get(group) or _described_axes(group),
        backend=backend_name,
        entered=_entered(group, backend_name, recent, counter, knows_all=knows_all and not is_silent),
        recent=tuple(_to_report(recent)),
        transfers=tuple(transfers[:RECENT]),
        timeout_s=timeout_of(backend),
        is_foreign=is_foreign,
        place=_place(group) if is_foreign else "",
        size=group.size(),
    )


def _entered(group: Any, backend: str, recent: Sequence[Collective], counter: int, *, knows_all: bool) -> int | None:
    """Number of the last collective; None where only a counter is left that counts p2p as well.

    nccl's counts collectives alone; gloo's counts everything. How others count is not known, but without p2p there is
    nothing else to count.
    """
    if recent:
        return recent[-1].seq
    if knows_all or counter == 0:
        return 0
    return counter if backend == "nccl" or not ledger.may_have_transferred(group) else None


def timeout_of(backend: Any) -> float | None:
    try:
        return seconds_of(backend.options._timeout)
    except (RuntimeError, AttributeError):  # a backend without options
        return None


def seconds_of(timeout: Any) -> float | None:
    """Return a timedelta or a number of seconds; None for none, which torch also writes as 0 or less."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    return float(seconds) if is_number and seconds > 0 else None


def store_place(store: Any) -> str:
    """Return where the store beneath all prefixes is: "host:port", or a path; "" for one of this process alone."""
    lowest = bottom(store)
    if hasattr(lowest, "port") and hasattr(lowest, "host"):
        return f"{lowest.host}:{lowest.port}"
    return str(getattr(lowest, "path", ""))


def bottom(store: Any) -> Any:
    while getattr(store, "underlying_store", None) is not None:
        store = store.underlying_store
    return store


def _store_of(group: Any) -> Any:
    found = _world().pg_map.get(group)
    return found[1] if found else None


def _place(group: Any) -> str:
    store = _store_of(group)
    return store_place(store) if store is not None else ""


def _is_foreign(group: Any, ranks: Mapping[int, int]) -> bool:
    """Return whether the numbers of a group's members are not ranks of this process's world.

    Frameworks join a trainer and its engines by a group over a store of its own, and write down its members as
    {0: 0, 1: 1, ...}, whatever world each of them comes from.
    """
    world = default_group()
    if group is world:
        return False
    if world is None:
        return True
    if group.size() > world.size() or ranks.get(world.rank()) != group.rank():
        return True
    own, other = _store_of(world), _store_of(group)
    if own is None or other is None:
        return False
    own, other = bottom(own), bottom(other)
    place = store_place(other)
    return store_place(own) != place if place else own is not other


def _backends(group: Any) -> dict[str, Any]:
    """Return the backends of a group by name; one may serve several devices."""
    found: dict[str, Any] = {}
    for device in group._device_types:
        try:
            backend = group._get_backend(device)
        except RuntimeError:  # made at the first call, or not there at all
            continue
        found.setdefault(_backend_name(backend), backend)
    return found or {"": group}


def _backend_name(backend: Any) -> str:
    """Return the name of a backend as its entries have it."""
    try:
        return str(backend.name())
    except (RuntimeError, AttributeError):
        return ""


def _to_report(collectives: Sequence[Collective]) -> list[Collective]:
    """Return the newest collectives, and all that are not over, however old."""
    cut = max(0, len(collectives) - RECENT)
    pending = [each for each in collectives[:cut] if not each.done]
    return pending[:RECENT] + list(collectives[cut:])


def _described_axes(group: Any) -> tuple[str, ...]:
    """Axes that a group's description holds: torch's DeviceMesh writes "mesh_tp", ours "dp×cp"."""
    text = str(getattr(group, "group_desc", "") or "")
    if text.startswith(DEVICE_MESH):
        return (text.removeprefix(DEVICE_MESH),)
    return tuple(text.split("×")) if text not in NO_DESCRIPTION else ()


def _sequence_number(backend: Any) -> int:
    """Return a backend's own counter; gloo's counts p2p as well."""
    try:
        return int(backend._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):  # a backend that does not count, or has not begun
        return 0


def _world() -> Any:
    return sys.modules["torch.distributed.distributed_c10d"]._world


class LeftGroups:
    """Record of each group as it was when destroy_process_group was called.

    A rank that still waits in one of them for this process waits for ever.

    Args:
        place_in_world: token of the world and rank of this process in it, None before they are known.
        before: called before a group is destroyed, for what cannot be done after it.
        complain: called with what has failed here; the call itself continues as without it.
    """

    def __init__(
        self,
        place_in_world: Callable[[], tuple[str, int] | None],
        before: Callable[[], None],
        complain: Callable[[str, Exception], None],
    ) -> None:
        self._place_in_world, self._before, self._complain = place_in_world, before, complain
        self._left: list[LeftGroup] = []
        self._is_closed = False

    def all(self) -> tuple[LeftGroup, ...]:
        return tuple(self._left)

    def close(self) -> None:
        """Remember nothing more, and do nothing in a call any more."""
        self._is_closed = True

    def watch(self) -> None:
        """Have destroy_process_group noted; a few µs for each group, no recorder is read."""
        c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
        public: Any = sys.modules["torch.distributed"]
        destroy = c10d.destroy_process_group
        if getattr(destroy, PATCHED, None) is self:
            return
        destroy = getattr(destroy, "__wrapped__", destroy) if hasattr(destroy, PATCHED) else destroy

        @functools.wraps(destroy)
        def destroy_process_group(*args: Any, **named: Any) -> Any:
            if self._is_closed:
                return destroy(*args, **named)
            before = self._groups_before()
            try:
                return destroy(*args, **named)
            finally:
                self._note(before)

        setattr(destroy_process_group, PATCHED, self)
        c10d.destroy_process_group = public.destroy_process_group = destroy_process_group

    def _groups_before(self) -> list[LeftGroup]:
        try:
            self._before()
            place = self._place_in_world()
            if place is not None and default_group() is not None:
                return [LeftGroup(world=place[0], rank=place[1], group=each) for each in group_snapshots(None)]
        except Exception as error:  # noqa: BLE001 - this is a call of the program's
            self._complain("a look before destroy_process_group", error)
        return []

    def _note(self, before: list[LeftGroup]) -> None:
        try:
            there = {each.key for each in group_snapshots(None)} if default_group() is not None else set()
            gone = [each for each in before if each.group.key not in there]
            note_end(each.group.name for each in gone)
            self._left += [each for each in gone if not each.group.is_foreign]
            del self._left[:-MAX_REMEMBERED]
        except Exception as error:  # noqa: BLE001 - likewise
            self._complain("a look after destroy_process_group", error)


@dataclass(frozen=True, kw_only=True)
class TorchCall:
    """A call of torch.distributed, or of a library of groups without it, on a thread's stack.

    Args:
        function: the outermost one, which the user called.
        file: the end of the path of the file that defines it, one of `CALLS`.
        group: its process group object; None means the default group.
        peer: global rank of the other side, root or source, if the call has one.
        arguments: its local names, as they are now.
        place: "host:port" or path of the store that it meets the others at, if the stack shows it.
        invited: the ranks that the innermost call of its kind was asked for: those of a new group.
    """

    function: str
    file: str = C10D_FILE
    group: Any
    peer: int | None
    arguments: dict[str, Any]
    place: str = ""
    invited: tuple[int, ...] = ()


def torch_call(frame: FrameType | None) -> TorchCall | None:
    found: list[tuple[str, FrameType]] = []
    while frame is not None:
        file = _defined_in(frame)
        if file:
            found.append((file, frame))
        elif found and not any(each in frame.f_code.co_filename for each in LIBRARIES):
            break
        frame = frame.f_back
    return _call_of(found) if found else None


def _defined_in(frame: FrameType) -> str:
    """Return the file, of those in `CALLS`, that has the function of a frame among its calls; "" for none."""
    code = frame.f_code
    return next(
        (file for file, names in CALLS.items() if code.co_name in names and code.co_filename.endswith(file)), ""
    )


def _call_of(found: list[tuple[str, FrameType]]) -> TorchCall:
    file, outermost = found[-1]
    named = dict(outermost.f_locals)
    group = named.get("group") or named.get("process_group")
    peers = (named.get(name) for name in ("src", "dst"))
    peer = next((peer for peer in peers if isinstance(peer, int)), None)
    if peer is None and file == C10D_FILE:
        peer = _global_rank(named, group)
    locals_of_all = [each.f_locals for _, each in found]
    invited = (each.get("ranks") for each in locals_of_all)
    return TorchCall(
        function=outermost.f_code.co_name,
        file=file,
        group=group,
        peer=peer,
        arguments=named,
        place=next((text for text in map(_place_in, locals_of_all) if text), ""),
        invited=next((tuple(each) for each in invited if isinstance(each, list | tuple | range) and each), ()),
    )


def _place_in(named: Mapping[str, Any]) -> str:
    """Return where the others are met, as the local names of a frame have it."""
    host = named.get("hostname") or named.get("master_addr")
    port = named.get("port") or named.get("master_port")
    if host and port:
        return f"{host}:{port}"
    return str(named.get("path") or "") if "url" in named else ""


def _global_rank(named: Mapping[str, Any], group: Any) -> int | None:
    """Return the global rank of the other side, where the call counts it within its group."""
    members = group_members(default_group() if group is None else group)
    places = (named.get(name) for name in ("group_src", "group_dst"))
    return next((members[place] for place in places if isinstance(place, int) and place < len(members)), None)
