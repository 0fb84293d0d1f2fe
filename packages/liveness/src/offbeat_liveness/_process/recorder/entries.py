"""What the entries of torch's flight recorder say; pure: dumps in, collectives and transfers out.

nccl writes down each call of a coalesced region (`batch_isend_irecv`, `_coalescing_manager`) without events, so such an
entry is "scheduled" for ever, and then one entry that closes the region ("nccl:coalesced", or
"nccl:ALLGATHER_coalesced"), which has the events and neither tensors nor an `op_id` of its own. It counts as a
collective even where it closes a batch of p2p, and then bears the number of the last collective. So a region is read
as a whole: its state is that of its closing entry, and its calls are what there is to tell.

Source: pytorch, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (collective, pointToPoint, startCoalescing,
endCoalescing, initWork; its main branch after 2.13), and FlightRecorderDetail.hpp, whose dumps are the same in 2.11
and 2.13.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from offbeat_liveness._process.head import CallSite, Collective
from offbeat_liveness._process.stacks import readable

RawEntry = dict[str, Any]
Region = list[RawEntry]
"""Entries that were launched together, the one that closes them last; or a single entry."""

SEND: Final = re.compile(r"(send|recv|isend|irecv) (\d+)(->|<-)(\d+)")
COALESCED: Final = "coalesced"


def group_of(entry: RawEntry) -> str:
    """Torch's name of the group of an entry."""
    return str(entry["process_group"][0])


def backend_of(entry: RawEntry) -> str:
    """Such as "nccl"."""
    return str(entry["profiling_name"]).partition(":")[0]


def seq_of(entry: RawEntry) -> int:
    """Number of an entry among the collectives of its group."""
    return int(entry["collective_seq_id"])


def is_over(entry: RawEntry) -> bool:
    """Whether a single operation has finished or failed."""
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
    """The collectives among the entries of one group or of several, oldest first; a coalesced region is one."""
    return [_parse_region(region) for region in _regions(entries) if not _is_transfer(region)]


def parse_transfers(entries: Iterable[RawEntry], members: Sequence[int] = ()) -> list[Collective]:
    """The point-to-point operations among the entries of one group, oldest first.

    Args:
        entries: oldest first.
        members: global ranks in group order; without them peers are numbers within the group.
    """
    return [
        _parse_transfer(entry, _state_of(region), members)
        for region in _regions(entries)
        if _is_transfer(region)
        for entry in region
        if not _closes(entry)
    ]


def _regions(entries: Iterable[RawEntry]) -> Iterator[Region]:
    """Entries as they were launched, oldest first within each group; a closing entry without its calls is left out.

    The ring has forgotten those calls then, and what the entry stands for cannot be told.
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
    """Whether nothing was ever learned of an entry of a device's backend."""
    return backend_of(entry) != "gloo" and entry["state"] == "scheduled" and not entry["retired"]


def _is_beside(one: RawEntry, other: RawEntry) -> bool:
    return all(one[name] == other[name] for name in ("collective_seq_id", "p2p_seq_id", "is_p2p"))


def _calls_of(closing: RawEntry, held: Region) -> Region:
    """The held entries, if they bear the numbers of a closing entry."""
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
    """The entry that knows the state of a region.

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
    """One operation; `state` is the entry that has its events."""
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
