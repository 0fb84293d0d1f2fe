"""Reader of torch's flight recorder, which has recorded each collective of this process already.

What it gives in torch 2.13 (measured on gloo; for nccl as torch documents it):

- It is on by default (2000 entries for all groups together; `TORCH_FR_BUFFER_SIZE=0` turns it off) for gloo and nccl,
  and it sees collectives of any caller, Python or C++ (DDP, FSDP, Megatron): group, operation, tensor sizes and
  dtypes, the number of the collective within its group (`collective_seq_id`), the time, the thread, and whether it is
  over (`retired`).
- gloo: `state` is always "scheduled" and no start or completion times are given, so `retired` is all there is to go
  by. Point-to-point operations are not recorded, but they count in `op_id` and in `pg_status`; `collective_seq_id`
  leaves them out and is what ranks can be compared by. A coalesced call is one entry with all of its tensors.
- nccl: `state` is scheduled, started or completed, as the watchdog thread finds it; p2p operations are entries with
  `is_p2p` and `p2p_seq_id`. What is scheduled may still stand behind other work in its stream.
- nccl writes down each call of a coalesced region (`batch_isend_irecv`, `_coalescing_manager`) without events, so such
  an entry is "scheduled" for ever, and then one entry that closes the region ("nccl:coalesced", or
  "nccl:ALLGATHER_coalesced"), which has the events and neither tensors nor an `op_id` of its own. It counts as a
  collective even where it closes a batch of p2p, and then bears the number of the last collective. So a region is read
  as a whole: its state is that of its closing entry, its calls are the ones to report.
- nccl: a dump of entries asks the device about each that is not over, which can take for ever: `nccl_recorder` asks
  without hanging with it. A dump without entries asks nothing and takes no lock.
- `pg_config` does not distinguish gloo groups, so members of a group are taken from torch.distributed's own tables.
- Not recorded: root ranks and reduce operations, store waits, `monitored_barrier`, `new_group`,
  `init_process_group`, and anything outside torch.distributed.
- There are two recorders: nccl's groups write into one of their own, which `_dump_nccl_trace*` reads and only builds
  with nccl have; all others into the one of `_dump_fr_trace*`. Both are read, and what is in both counts once. In
  builds with another library of NVIDIA's interface the first holds that one's entries.

It may be read only while the groups of this process are idle (`StillRecorder`). torch 2.13 writes its tables of
groups under a lock and reads them without it: `dump` and `dump_json` walk `pg_config`, which each new group enters and
one of the same name overwrites, and `pg_status`, which a group enters with its first collective, as a null pointer for
a moment. A reader that meets such a write dies of SIGSEGV. Counters are words, and entries are copied under the lock.

A dump holds the GIL throughout, and a thread that records a collective takes it (for the stack) after its group has
counted the collective and before it writes. So while no count has changed for a moment, no thread is about to write.
A group enters `pg_config` without the GIL, at the end of its making: that is to have stood much longer.

torch before 2.13 takes the GIL for the stack while it holds the recorder's lock. A reader with the GIL that waits for
the lock would then deadlock with the whole process, for ever; so there a thread that has counted is given longer to
get the GIL.

Source: pytorch, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (collective, pointToPoint, startCoalescing,
endCoalescing, initWork; its main branch after 2.13); 2.13.0, FlightRecorderDetail.hpp (recordWithResetEnabled,
record_pg_ranks, getPgConfigJson, getPgStatusJson), whose dumps are the same in 2.11, and ProcessGroupGloo.cpp (the
constructor, enqueue).
"""

import json
import os
import pickle
import re
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final

from offbeat_liveness._process.nccl_recorder import NCCL, RawEntry
from offbeat_liveness._process.snapshot import CallSite, Collective
from offbeat_liveness._process.stacks import readable, thread_frames

Region = list[RawEntry]
"""Entries that were launched together, the one that closes them last; or a single entry."""

SEND: Final = re.compile(r"(send|recv|isend|irecv) (\d+)(->|<-)(\d+)")
COALESCED: Final = "coalesced"
INDUCTOR: Final = "_inductor"
RECORDERS: Final = ("fr", "nccl")
SETTLED_S: Final = 0.01
CONTENDED_S: Final = 0.1  # a thread has the GIL within this, however many want it
MAKING_S: Final = 0.5  # a group is made in milliseconds, unless a member does not come
PATIENCE_S: Final = 0.2
POLL_S: Final = 0.002
MAKERS: Final = frozenset({"_new_process_group_helper", "split_group", "_create_shrunk_process_group"})
GroupActivity = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]
"""The threads that make a group, and each group with what it has counted."""


def group_of(entry: RawEntry) -> str:
    return str(entry["process_group"][0])


def backend_of(entry: RawEntry) -> str:
    return str(entry["profiling_name"]).partition(":")[0]


def seq_of(entry: RawEntry) -> int:
    return int(entry["collective_seq_id"])


def is_over(entry: RawEntry) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"


def of_this_life(entries: Iterable[RawEntry]) -> list[RawEntry]:
    """Entries of the newest group of this name: after destroy_process_group and a new start, numbers begin anew."""
    kept: list[RawEntry] = []
    for entry in entries:
        if kept and _begins_anew(kept[-1], entry):
            kept.clear()
        kept.append(entry)
    return kept


def _begins_anew(last: RawEntry, entry: RawEntry) -> bool:
    """`pg_id` counts the groups that a process has made; `op_id` the calls of a group."""
    if last["pg_id"] != entry["pg_id"]:
        return True
    numbers = ("collective_seq_id", "p2p_seq_id", "op_id")
    return any(int(entry[name]) < int(last[name]) for name in numbers)


def parse_entries(entries: Iterable[RawEntry]) -> list[Collective]:
    """Return the collectives among the entries of one group or of several, oldest first; a coalesced region is one."""
    return [_parse_region(region) for region in _regions(entries) if not _is_transfer(region)]


def parse_transfers(entries: Iterable[RawEntry], members: Sequence[int] = ()) -> list[Collective]:
    """Return the point-to-point operations among the entries of one group, oldest first.

    Without `members`, global ranks in group order, peers are numbers within the group.
    """
    return [
        _parse_transfer(entry, _state_of(region), members)
        for region in _regions(entries)
        if _is_transfer(region)
        for entry in region
        if not _closes(entry)
    ]


def _regions(entries: Iterable[RawEntry]) -> Iterator[Region]:
    """Yield entries as they were launched, oldest first in each group; a closing entry without its calls is left out.

    The ring has forgotten those calls then, so what the entry stands for is unknown.
    """
    waiting: dict[tuple[str, str], Region] = {}
    for entry in entries:
        key = (group_of(entry), backend_of(entry))
        held = waiting.get(key, [])
        if _closes(entry):
            waiting.pop(key, None)
            region = _calls_of(entry, held)
            if region:
                yield [*region, entry]
            elif held:
                yield held
        elif _may_be_coalesced(entry) and (not held or _is_beside(held[-1], entry)):
            waiting[key] = [*held, entry]
        else:
            if held:
                yield held
            waiting.pop(key, None)
            if _may_be_coalesced(entry):
                waiting[key] = [entry]
            else:
                yield [entry]
    yield from waiting.values()


def _closes(entry: RawEntry) -> bool:
    return str(entry["profiling_name"]).endswith(COALESCED) and not entry["input_sizes"] and not entry["output_sizes"]


def _may_be_coalesced(entry: RawEntry) -> bool:
    """Return whether a device's backend has reported nothing about an entry yet."""
    return backend_of(entry) != "gloo" and entry["state"] == "scheduled" and not entry["retired"]


def _is_beside(one: RawEntry, other: RawEntry) -> bool:
    return all(one[name] == other[name] for name in ("collective_seq_id", "p2p_seq_id", "is_p2p"))


def _calls_of(closing: RawEntry, held: Region) -> Region:
    names = ("collective_seq_id", "p2p_seq_id")
    return held if held and all(held[-1][name] == closing[name] for name in names) else []


def _is_transfer(region: Region) -> bool:
    return bool(region[0].get("is_p2p"))


def _parse_region(region: Region) -> Collective:
    calls = [each for each in region if not _closes(each)] or region
    ops = list(dict.fromkeys(_op(each) for each in calls))
    return _parse(
        calls[0],
        _state_of(region),
        op=ops[0] if len(ops) == 1 else COALESCED,
        inputs=tuple(text for each in calls for text in _tensors(each["input_dtypes"], each["input_sizes"])),
        outputs=tuple(text for each in calls for text in _tensors(each["output_dtypes"], each["output_sizes"])),
        seq=seq_of(calls[0]),
    )


def _state_of(region: Region) -> RawEntry:
    """Return the entry that knows the state of a region.

    A region that nothing closes was captured into a CUDA graph, or is still open: nothing of it was launched, so
    nothing of it is pending.
    """
    last = region[-1]
    return last if len(region) == 1 or _closes(last) else {**last, "retired": True}


def _parse_transfer(entry: RawEntry, state: RawEntry, members: Sequence[int]) -> Collective:
    text = str(entry["profiling_name"]).partition(":")[2]
    found = SEND.fullmatch(text)
    place = int(found[4]) if found else None
    known = place is not None and place < len(members)
    return _parse(
        entry,
        state,
        op=found[1] if found else text.partition(" ")[0],
        inputs=tuple(_tensors(entry["input_dtypes"], entry["input_sizes"])),
        outputs=tuple(_tensors(entry["output_dtypes"], entry["output_sizes"])),
        seq=int(entry["p2p_seq_id"]),
        peer=members[place] if known and place is not None else (None if members else place),
    )


def _parse(entry: RawEntry, state: RawEntry, **more: Any) -> Collective:
    frames = [CallSite(file=f["filename"], line=f["line"], function=f["name"]) for f in entry.get("frames", ())]
    sites = readable(frames) if frames else ()
    return Collective(
        group=group_of(entry),
        done=is_over(state),
        created_ns=int(entry["time_created_ns"]),
        thread=int(entry.get("thread_id") or 0),
        backend=backend_of(entry),
        call_site=sites[0] if sites else None,
        **more,
    )


def _op(entry: RawEntry) -> str:
    return str(entry["profiling_name"]).partition(":")[2].lstrip("_")


def _tensors(dtypes: Sequence[str], sizes: Sequence[Sequence[int]]) -> list[str]:
    return [f"{dtype}{list(size)}" for dtype, size in zip(dtypes, sizes, strict=False)]


def is_loaded() -> bool:
    """Return whether this process has torch.distributed, and all of torch; nothing here imports it."""
    needed = ("torch", "torch.distributed.distributed_c10d", "torch._C._distributed_c10d")
    return all(_is_whole(sys.modules.get(name)) for name in needed)


def _is_whole(module: types.ModuleType | None) -> bool:
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def status_text() -> str:
    """Return a text that changes whenever a collective is issued or ends, a line a recorder: in about 20 µs."""
    return "\n".join(_status(recorder) for recorder in RECORDERS if _dump(recorder, "_trace_json"))


def _status(recorder: str) -> str:
    dump = _dump(recorder, "_trace_json")
    return dump(includeCollectives=False).decode() if dump else "{}"


def has_pending(status: str) -> bool:
    """Return whether a status text shows a group with an operation that was issued and is not over.

    May err towards yes.
    """
    lines = enumerate(status.splitlines())
    return any(_line_has_pending(json.loads(line), is_nccl=number > 0) for number, line in lines)


def _line_has_pending(recorder: dict[str, dict[str, dict[str, str]]], *, is_nccl: bool) -> bool:
    """Look at one recorder: nccl numbers its collectives and its p2p apart, and shows the number of the last."""
    pairs = [
        (int(each["last_enqueued_collective"]), int(each["last_completed_collective"]))
        for each in recorder.get("pg_status", {}).values()
    ]
    return any(issued > over or (is_nccl and issued != over) for issued, over in pairs)


def read_entries(*, call_sites: bool = False) -> list[RawEntry]:
    """Return what the recorders hold, oldest first, point-to-point included; about 20 ms when one is full.

    Where nccl's does not answer, its entries are left out and `NCCL.asked_at_s` says since when.
    """
    if call_sites:
        _keep_inductor_out()
    dump, nccl_dump = _dump("fr", "_trace"), _dump("nccl", "_trace")
    # All of torch's tables first, while they are known to be still: to unpickle takes far longer.
    raw = _call(dump, call_sites) if dump else None
    status = _status("nccl")
    nccl = None
    if nccl_dump is not None and json.loads(status).get("pg_status"):  # else no nccl, or it was never used
        nccl = NCCL.entries(status, lambda: _call(nccl_dump, call_sites), with_frames=call_sites)
    # Pickled by this very process, in its own memory, a moment ago: nothing comes from outside.
    # JSON takes twice the time, and holds no frames.
    common = list(pickle.loads(raw)["entries"]) if raw is not None else []
    return _merge([*common, *nccl]) if nccl else common


def _call(dump: Callable[..., bytes], with_frames: bool) -> bytes:
    return dump(includeCollectives=True, includeStackTraces=with_frames, onlyActive=False)


def _merge(entries: list[RawEntry]) -> list[RawEntry]:
    found = {(entry["time_created_ns"], entry["record_id"], group_of(entry)): entry for entry in entries}
    return sorted(found.values(), key=lambda entry: int(entry["time_created_ns"]))


def is_off() -> bool:
    return os.environ.get("TORCH_FR_BUFFER_SIZE") == "0"


def holds_all(entries: Sequence[RawEntry]) -> bool:
    """Return whether the recorder has forgotten nothing yet: a group without entries then has had no collective."""
    firsts: dict[bool, int] = {}  # nccl's recorder counts by itself
    for entry in entries:
        firsts.setdefault(backend_of(entry) == "nccl", int(entry["record_id"]))
    return not any(firsts.values()) if firsts else not is_off()


def _keep_inductor_out() -> None:
    """Keep torch from importing inductor to name the frames of compiled code while a run is stuck.

    Expected: a dump with stacks reads what was recorded. What happens in torch 2.13: its symboliser asks for
    `torch._inductor`, which `torch.__getattr__` then imports (800 modules in 3 to 7 s). Unless it has been imported
    before, there is no compiled code. So from the first dump on the symboliser gets an AttributeError for it; all other
    callers get what torch gives. Can go when the symboliser looks into sys.modules itself.

    Source: pytorch, torch/csrc/profiler/python/combined_traceback.cpp (appendSymbolized).
    """
    torch = sys.modules["torch"]
    given = getattr(torch, "__getattr__", None)
    if given is None or getattr(given, "__module__", "") == __name__:
        return

    def __getattr__(name: str) -> Any:  # noqa: N807 - in place of torch's
        if name == INDUCTOR and _is_symboliser():
            raise AttributeError(name)
        return given(name)

    vars(torch)["__getattr__"] = __getattr__


def _is_symboliser() -> bool:
    """Return whether `torch.__getattr__` is called by a dump: of this module's, or in a C++ thread of torch."""
    caller = sys._getframe(1).f_back
    return caller is None or caller.f_code is _call.__code__


def _dump(recorder: str, what: str) -> Callable[..., bytes] | None:
    found: Callable[..., bytes] | None = getattr(
        sys.modules["torch._C._distributed_c10d"], f"_dump_{recorder}{what}", None
    )
    return found


class StillRecorder:
    """Reads the recorder, and leaves it alone while groups are made or used.

    `entries` waits up to `patience_s` for a moment without collectives.

    Attributes:
        moved_s: when a group was last seen to be made, used or gone, monotonic seconds.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._seen: GroupActivity = ((), ())
        self.moved_s = time.monotonic()

    def status_text(self, frames: Mapping[int, FrameType] | None = None) -> str | None:
        """Return the status of all groups, "" without torch.distributed; None while they move.

        Args:
            frames: of all threads, where the caller has them.
        """
        if not is_loaded():
            return ""
        return status_text() if self._is_still(frames) else None

    def entries(self) -> list[RawEntry] | None:
        """Return what the recorder holds, with call sites; None if the groups were never idle for a moment."""
        give_up_s = time.monotonic() + self._patience_s
        while not self._is_still():
            if time.monotonic() >= give_up_s:
                return None
            time.sleep(POLL_S)
        return read_entries(call_sites=True)

    def _is_still(self, frames: Mapping[int, FrameType] | None = None) -> bool:
        """Return whether no thread makes a group, and no group has counted, for a moment; takes about 1 µs a group."""
        graph, now_s = _group_activity(frames), time.monotonic()
        if graph != self._seen:
            self.moved_s = now_s  # first: another thread may compare at any moment
            self._seen = graph
        is_making, _ = graph
        return now_s - self.moved_s >= (MAKING_S if is_making else settled_s())


def settled_s() -> float:
    """Return for how long no group may have counted before a recorder of this torch may be read."""
    version = str(getattr(sys.modules.get("torch"), "__version__", "")).split(".")[:2]
    return CONTENDED_S if version in (["2", "11"], ["2", "12"]) else SETTLED_S


def _group_activity(frames: Mapping[int, FrameType] | None = None) -> GroupActivity:
    module = sys.modules["torch.distributed.distributed_c10d"]
    found = thread_frames() if frames is None else frames
    makers = tuple(ident for ident, frame in found.items() if _is_making(frame))
    return makers, tuple((id(group), _count(group)) for group in list(module._world.pg_map))


def _is_making(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in MAKERS:
            return True
        frame = frame.f_back
    return False


def _count(group: Any) -> int:
    """Return the sum over all backends of a group; those that do not count stay at 0."""
    count = 0
    for device in group._device_types:
        try:
            count += group._get_backend(device)._get_sequence_number_for_group()
        except RuntimeError:
            continue
    return count
