"""Making torch process groups that only their members have to ask for."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from offbeat_mesh._calls import Calls
from offbeat_mesh._join import backends
from offbeat_mesh._layout import Layout
from offbeat_mesh._membership import Membership
from offbeat_mesh._news import Record
from offbeat_mesh._world import World
from offbeat_types import DeadlineError

POLL_S: Final = (0.002, 0.1)
"""How often a rank that waits for the other members looks for them, at first and at last."""


def make_process_group(
    world: World, name: str, ranks: Sequence[int], axes: Sequence[str], deadline_s: float, *, backend: str = ""
) -> dist.ProcessGroup:
    """A new process group of `ranks`; all of them call this with the same name, and nobody else needs to.

    Args:
        world: joined.
        name: unique in the run.
        ranks: global, ascending, this process among them.
        axes: what the group spans, for torch's own records and offbeat's liveness.
        deadline_s: for the members to come, and the timeout that torch applies to the group's operations.
        backend: torch's name for it; by default what the world's device needs, and gloo for the CPU.

    Raises:
        DeadlineError: members that did not come.
        PeerFailedError: a member failed meanwhile.
    """
    _wait_for_members(world, f"{name}/asked", name, ranks, deadline_s)
    # Expected: torch.distributed.new_group(ranks, use_local_synchronization=True), which only the members call.
    # Happens (torch 2.13): it names the group by the number of groups its process has made so far, so members with
    # different histories wait for each other under different names, for ever. Hence the layer below, with our name.
    # Can go when new_group takes a name.
    store = distributed_c10d._get_default_store()
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(world.rank),
        list(ranks),
        dist.Backend(backend or backends(world.device)),
        store,
        distributed_c10d.GroupName(name),
        timeout=timedelta(seconds=deadline_s),
        group_desc="×".join(axes) or "self",
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    name_for_liveness(group, axes)
    # A member that fails in its first call closes its connections, and gloo takes that for an error of whoever is still
    # connecting: so nobody goes on before everybody is here.
    _wait_for_members(world, f"{name}/made", name, ranks, deadline_s)
    made: dist.ProcessGroup = group
    return made


def _wait_for_members(world: World, place: str, name: str, ranks: Sequence[int], deadline_s: float) -> None:
    """Say that this rank has come to a place in the making of a group; wait for the others, and name who stays away.

    Raises:
        DeadlineError: members that did not come.
        PeerFailedError: a member failed meanwhile.
    """
    if len(ranks) == 1 or world.board is None:
        return
    keys = {rank: f"{place}/{rank}" for rank in ranks}
    world.store.set(keys[world.rank], "1")
    end = time.monotonic() + deadline_s
    pause_s = POLL_S[0]

    def missing() -> list[int]:
        return [rank for rank, key in keys.items() if not world.store.check([key])]

    while away := missing():
        failed = [each for each in world.board.records if each.rank in ranks and each.group in ("", name)]
        if failed and missing():  # still: who was here may have gone on, and left, since the line above
            record = min(failed, key=lambda each: each.group == "")  # of this group first: it knows more
            raise record.error(f"rank {record.rank}")
        if time.monotonic() >= end:
            on = f"rank {', '.join(map(str, away))}"
            advice = "all members must ask for it, in one order"
            error = DeadlineError(f"making the group {name}", on, deadline_s, advice)
            world.board.post(Record.of(error, world.rank, name))
            raise error
        time.sleep(pause_s)  # not store.wait: each wait of it that expires prints two lines
        pause_s = min(2 * pause_s, POLL_S[1])


def open_calls(
    process_group: dist.ProcessGroup | None, world: World | None, membership: Membership, deadline_s: float
) -> tuple[Calls, dist.ProcessGroup | None]:
    """The bookkeeping of a group, and the process group its plain data goes over.

    That is the group's own where it serves the CPU; for one that only serves a device its members make a second one.
    """
    control = process_group
    if process_group is not None and world is not None and not _serves_data(process_group):
        name = f"{membership.key}/data"
        control = make_process_group(world, name, membership.ranks, membership.axes, deadline_s, backend="gloo")
    if world is None or len(membership.ranks) == 1:
        return Calls(membership, None, [], deadline_s), control
    used = [group for group in dict.fromkeys((process_group, control)) if group is not None]
    return Calls(membership, world.board, used, deadline_s), control


def _serves_data(group: dist.ProcessGroup) -> bool:
    """Whether a process group also moves plain data, which lies on the CPU."""
    return any(group._get_backend(device).name() == "gloo" for device in group._device_types)


def name_for_liveness(group: dist.ProcessGroup, axes: Sequence[str]) -> None:
    """Let a verdict speak of axes instead of torch's group names."""
    from offbeat_liveness import name_group

    name_group(group, axes)


def group_name(layout: Layout, mesh_number: int, axes: Sequence[str], ranks: Sequence[int], channel: str) -> str:
    """A name that all members derive alike and that no other group has."""
    shape = ",".join(f"{axis}{layout.axes[axis]}" for axis in layout.axes if layout.axes[axis] > 1)
    suffix = f"#{channel}" if channel else ""
    return f"offbeat/mesh{mesh_number}({shape})/{'×'.join(axes) or 'self'}@{ranks[0]}{suffix}"
