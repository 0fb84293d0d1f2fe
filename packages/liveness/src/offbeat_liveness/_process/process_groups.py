"""What torch.distributed of this process knows: its world, its groups, and the collectives in them."""

import sys
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from offbeat_liveness._process import flight_recorder
from offbeat_liveness._process.flight_recorder import RawEntry
from offbeat_liveness._process.head import Collective, GroupHead

RECENT: Final = 32
DEVICE_MESH: Final = "mesh_"
NO_DESCRIPTION: Final = ("", "undefined", "default_pg")
_AXES: Final[weakref.WeakKeyDictionary[Any, tuple[str, ...]]] = weakref.WeakKeyDictionary()

_INHERITED: Final[list[Any]] = []


def name_group(group: Any, axes: Sequence[str]) -> None:
    """Tell the monitor which mesh axes a process group spans, so that a verdict can name them.

    Args:
        group: a torch ProcessGroup.
        axes: such as ("dp", "cp").
    """
    _AXES[group] = tuple(axes)


def recent_collectives(num_last: int | None = None, *, call_sites: bool = False) -> list[Collective]:
    """The collectives this process has entered, oldest first; empty without torch.distributed or with the recorder off.

    For a thread that issues them, or while nobody does: torch lets nobody read while another thread first uses a group.

    Args:
        num_last: at most so many, the newest; torch itself keeps 2000 unless TORCH_FR_BUFFER_SIZE says otherwise.
        call_sites: with the line of each call.
    """
    if not flight_recorder.is_loaded():
        return []
    entries = flight_recorder.read_entries(call_sites=call_sites)
    first = 0 if num_last is None else max(0, len(entries) - num_last)
    return flight_recorder.parse_entries(entries[first:])


def default_group() -> Any:
    """The default process group object, None before it is made."""
    if not flight_recorder.is_loaded():
        return None
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    group = c10d.GroupMember.WORLD
    return None if any(group is each for each in _INHERITED) else group


def disown_world() -> None:
    """In a forked child: the world that came with the fork is the parent's, whatever torch says."""
    _INHERITED.clear()
    group = default_group()
    if group is not None:
        _INHERITED.append(group)


def group_members(group: Any) -> tuple[int, ...]:
    """Global ranks of a group's members in group order; () for a group that is gone."""
    ranks = sys.modules["torch.distributed.distributed_c10d"]._world.pg_group_ranks.get(group, {})
    return tuple(sorted(ranks, key=ranks.__getitem__))


def group_heads(entries: Sequence[RawEntry] | None) -> tuple[GroupHead, ...]:
    """How far this process has come in each of its groups.

    Args:
        entries: of the recorder; None while it cannot be read, then there are only the groups' own counters.
    """
    by_group: dict[str, list[RawEntry]] = defaultdict(list)
    knows_all = entries is not None and flight_recorder.holds_all(entries)
    for entry in entries or ():
        by_group[flight_recorder.group_of(entry)].append(entry)
    world = sys.modules["torch.distributed.distributed_c10d"]._world
    return tuple(
        _group_head(group, name, by_group.get(name, []), knows_all=knows_all)
        for group, name in list(world.pg_names.items())
    )


def _group_head(group: Any, name: str, entries: Sequence[RawEntry], *, knows_all: bool) -> GroupHead:
    counter = 0 if knows_all and not entries else _sequence_number(group)
    recent = flight_recorder.parse_entries(_worth_telling(_of_this_life(entries, counter)))
    return GroupHead(
        name=name,
        ranks=group_members(group),
        axes=_AXES.get(group) or _described_axes(group),
        backend=recent[-1].backend if recent else "",
        entered=recent[-1].seq if recent else counter,
        recent=tuple(recent),
    )


def _of_this_life(entries: Sequence[RawEntry], counter: int) -> list[RawEntry]:
    """Entries of this group object: after destroy_process_group and a new start, names and numbers begin anew."""
    kept: list[RawEntry] = []
    for entry in entries:
        if kept and flight_recorder.seq_of(entry) <= flight_recorder.seq_of(kept[-1]):
            kept.clear()
        kept.append(entry)
    return kept if not kept or flight_recorder.seq_of(kept[-1]) <= counter else []


def _worth_telling(entries: Sequence[RawEntry]) -> list[RawEntry]:
    """The newest, and whatever is not over, however old."""
    cut = max(0, len(entries) - RECENT)
    pending = [entry for entry in entries[:cut] if not flight_recorder.is_over(entry)]
    return pending[:RECENT] + list(entries[cut:])


def _described_axes(group: Any) -> tuple[str, ...]:
    """Axes that a group's description holds: torch's DeviceMesh writes "mesh_tp", ours "dp×cp"."""
    text = str(getattr(group, "group_desc", "") or "")
    if text.startswith(DEVICE_MESH):
        return (text.removeprefix(DEVICE_MESH),)
    return tuple(text.split("×")) if text not in NO_DESCRIPTION else ()


def _sequence_number(group: Any) -> int:
    """The group's own counter, for when the recorder remembers nothing: it counts p2p as well."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend that does not count, or has not begun
        return 0
