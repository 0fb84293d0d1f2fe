"""The calls of one group, in order: which may make them, how they wait, and what they raise when a member fails."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from offbeat_core import DeadlineError, GroupError, MismatchError, OffbeatError, PeerFailedError
from offbeat_mesh._control import ControlClient
from offbeat_mesh._control_messages import CallPosition, Record, one_line
from offbeat_mesh._guard import check_guards
from offbeat_mesh._layout import Layout, describe_group
from offbeat_mesh._world import World, backends


@dataclass(frozen=True, kw_only=True)
class Membership:
    """One process's place in one group, its ranks all global.

    Args:
        key: names the group alike on all members, and no other.
        channel: name of a second group over the same ranks; "" is the first.
        label: a global rank for people.
    """

    key: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    rank: int
    channel: str = ""
    label: Callable[[int], str] = "rank {}".format

    @property
    def text(self) -> str:
        """The group for people: "dp×cp of ranks 0, 1"."""
        return describe_group(self.axes, self.ranks, self.channel)


SLICE: Final = timedelta(seconds=0.25)
"""A wait is cut into pieces of this length, so that it ends soon after a member fails or Ctrl-C is pressed."""

RECORD_S: Final = 4.0
"""Time that a rank whose call broke waits for the record of the rank that broke it: ms unless rank 0 is stopped."""

GONE_S: Final = 0.5
"""A call that still waits so long after a member has died, failed or left will not end; a shorter one may, with what
that member sent before, and its error may be more exact."""

LATER_S: Final = 10.0
"""Time by which torch's own timeout of an operation is later than ours."""

ABORT_TAG: Final = 0x0FFBEA7
ABORT_WAIT: Final = timedelta(milliseconds=1)
"""Timeout of the receive that is never answered; see `break_off`."""


class Calls:
    """Bookkeeping of one group on one rank.

    Args:
        client: None for a group of one.
        process_groups: what its calls run on; broken off when a member fails.
        deadline_s: of a call that does not bring its own.
    """

    def __init__(
        self,
        membership: Membership,
        client: ControlClient | None,
        process_groups: Sequence[dist.ProcessGroup],
        deadline_s: float,
    ) -> None:
        self.key, self.text = membership.key, membership.text
        self.ranks, self.rank, self.label = membership.ranks, membership.rank, membership.label
        self.client, self.deadline_s = client, deadline_s
        self._process_groups = tuple(process_groups)
        self._owner: threading.Thread | None = None
        self._owner_id = 0
        self._begun = 0  # calls of any kind
        self._entered = 0  # collectives: the same number on all members that are in step
        self._call = ""
        self._inside = False
        self._deadline_s = deadline_s
        self._failure: Record | None = None
        self._gone: Record | None = None
        self._has_record = threading.Event()
        self._failure_lock = threading.Lock()
        if client is not None:
            client.listen(self)

    @contextmanager
    def call(self, name: str, deadline_s: float | None = None, *, collective: bool = True) -> Iterator[None]:
        """One call of the group. An error inside it is posted, so that the other members raise too.

        A collective is a call that all members come to: the axis rule holds, and it counts towards the group's order.
        """
        if collective:
            check_guards(name, self.text, self.ranks)  # raised on every rank that comes, so no rank waits for this one
        try:
            self._begin(name, deadline_s, collective)
            try:
                yield
            finally:
                self._inside = False
        except MismatchError as error:  # all members see it, so there is no one to notify; but they are out of step
            self._end(Record.of(error, self.rank, self.key), abort=False)
            raise
        except BaseException as error:
            self.fail(error, name)
            raise

    def _begin(self, name: str, deadline_s: float | None, collective: bool) -> None:
        if threading.get_ident() != self._owner_id:
            self._take_over(name)
        self.check()
        if self._inside:
            raise GroupError(
                f"{name} over {self.text} was called inside {self._call} of the same group, where the other members "
                "do not come to it; call it before or after"
            )
        self._inside = True
        self._begun += 1
        self._entered += collective
        self._call = name
        self._deadline_s = self.deadline_s if deadline_s is None else deadline_s
        if self._gone is not None:
            self._end_later(self._gone)

    def _take_over(self, name: str) -> None:
        """The first thread that calls owns the group; another may have it when that one has ended."""
        if self._owner is not None and self._owner.is_alive():
            raise GroupError(
                f"{name} over {self.text} was called from the thread {threading.current_thread().name!r}, but the "
                f"group belongs to {self._owner.name!r}, and two threads have no common order on different ranks; "
                'give the second thread a channel of its own: mesh.group(..., channel="name")'
            )
        self._owner, self._owner_id = threading.current_thread(), threading.get_ident()

    def check(self) -> None:
        """Raise if the group has failed."""
        if self._failure is None and self._gone is not None and self._gone.kind != "left":
            self._end(self._gone)
        if self._failure is not None:
            raise self._error(self._failure)

    def fail(self, error: BaseException, where: str) -> None:
        """Make an error of this rank known to the other members, and end the group here too."""
        if self._failure is None and self.client is not None:
            self.client.post(
                Record.of(error, self.rank, self.key, f"{self.label(self.rank)} in {where} of {self.text}")
            )

    def wait(self, work: dist.Work | None, peer: int | None = None) -> None:
        """Wait for an operation on CPU tensors.

        Args:
            work: the operation; None if torch had nothing to do.
            peer: the other rank of a send or receive. Such a wait is not sliced: gloo takes an expired one for the
                group's end; `_abort` ends it when a failure is reported.
        """
        end = time.monotonic() + self._deadline_s
        piece = SLICE if peer is None else timedelta(seconds=self._deadline_s)
        while work is not None:
            over = work.is_completed()  # before the wait: an error after it is then the operation's own
            try:
                work.wait(min(piece, timedelta(seconds=max(0.001, end - time.monotonic()))))
            except RuntimeError as error:
                if self._failure is not None:
                    raise self._error(self._failure) from error
                if time.monotonic() >= end:
                    raise self._late(peer) from error
                if over or peer is not None:
                    raise self._broken(error) from error
            else:
                return

    def backend_timeout(self) -> timedelta:
        """Return torch's own timeout for an operation of the present call: after ours, so that our error is raised."""
        return timedelta(seconds=self._deadline_s + LATER_S)

    def _late(self, peer: int | None) -> OffbeatError:
        """Return the error for a deadline that has passed, with the ranks that did not come."""
        waiting = f"{self._call} over {self.text}" if peer is None else f"{self._call} in {self.text}"
        members = [rank for rank in self.ranks if rank != self.rank] if peer is None else [peer]
        standings = self.client.ask(self.key, members) if self.client is not None else {}
        if self._failure is not None:
            return self._error(self._failure)
        absent = [rank for rank in members if rank not in standings or standings[rank].entered < self._entered]
        if absent or peer is not None:
            on = "; ".join(self._whereabouts(rank, standings.get(rank)) for rank in absent or members)
            return DeadlineError(waiting, on, self._deadline_s, "all members must make the same calls in one order")
        calls = "; ".join(f"{self.label(rank)} is in {each.call}" for rank, each in standings.items())
        return DeadlineError(waiting, f"its own end, with all members there ({calls})", self._deadline_s)

    def _whereabouts(self, rank: int, standing: CallPosition | None) -> str:
        if standing is None:
            return f"{self.label(rank)} (does not answer: stopped, or its host is gone)"
        if not standing.call:
            return f"{self.label(rank)} (has not used the group yet)"
        return f"{self.label(rank)} ({'in' if standing.inside else 'last seen in'} {standing.call})"

    def _broken(self, error: RuntimeError) -> OffbeatError:
        """Return the error of an operation that failed: that of the rank at fault, if there is a record."""
        self._has_record.wait(RECORD_S)
        record = self._failure or self._gone
        return self._error(record) if record else PeerFailedError(f"a member of {self.text}", one_line(error))

    def _error(self, record: Record) -> OffbeatError:
        return record.error(self.label(record.rank))

    def standing(self) -> tuple[int, str, bool]:
        """Collectives entered, the newest call, and whether it still runs (the client's thread asks)."""
        return self._entered, self._call, self._inside

    def receive(self, record: Record) -> None:
        """Take note of a record that concerns this group (the client's thread calls this)."""
        if record.rank not in self.ranks or record.group not in ("", self.key):
            return
        if record.group:
            self._end(record)
            return
        self._gone = self._gone or record
        self._has_record.set()
        if self._inside:
            self._end_later(record)

    def _end_later(self, record: Record) -> None:
        """A member is gone: what it sent before may still arrive, but a call that lasts will not end."""
        timer = threading.Timer(GONE_S, self._end_if_in, (record, self._begun))
        timer.daemon = True
        timer.start()

    def _end_if_in(self, record: Record, begun: int) -> None:
        if self._inside and self._begun == begun:
            self._end(record)

    def _end(self, record: Record, *, abort: bool = True) -> None:
        """No more calls: note why, and break off the one that waits."""
        with self._failure_lock:
            if self._failure is not None:
                return
            self._failure = record
        self._has_record.set()
        for group in self._process_groups if abort else ():
            _abort(group)


def _abort(group: dist.ProcessGroup) -> None:
    """Break off whatever a process group waits for, here and on the members that wait for this rank."""
    for backend in {group._get_backend(device) for device in group._device_types}:
        break_off(backend)


def break_off(backend: Any) -> None:
    """Break off whatever a backend's operations wait for, here and on the members that wait for this rank.

    Expected: Backend.abort() does it. Happens (torch 2.13): gloo's waits continue, and the group cannot be destroyed
    before they end. A receive whose wait expires makes gloo close all connections of the group, which ends every wait
    at once; one from a rank that has died fails and closes no other, so every rank is asked. Can go when abort() works
    for gloo.

    Args:
        backend: such as torch's ProcessGroupGloo; it can only be let go of afterwards.
    """
    if backend.name() != "gloo":
        with contextlib.suppress(RuntimeError):
            backend.abort()
        return
    for rank in set(range(backend.size())) - {backend.rank()}:
        with contextlib.suppress(RuntimeError):
            backend.recv([torch.from_numpy(np.zeros(1))], rank, ABORT_TAG).wait(ABORT_WAIT)


def interrupt_calls() -> None:
    """Break off every operation of this process in a process group of torch, now and from now on, after a rank died.

    From any thread: the one that waits gets an error at once, also where it waits for a rank that lives and waits
    itself. The groups are of no use afterwards; see `World.abandon`.
    """
    for group in list(distributed_c10d._world.pg_map):
        _abort(group)


POLL_S: Final = (0.002, 0.1)
"""Interval at which a rank that waits for the other members polls for them, at first and at last."""


def make_process_group(
    world: World, name: str, ranks: Sequence[int], axes: Sequence[str], deadline_s: float, *, backend: str = ""
) -> dist.ProcessGroup:
    """Return a new process group of `ranks`; all of them call this with the same name, and no other rank needs to.

    Args:
        world: joined.
        name: unique in the run.
        ranks: global, ascending, this process among them.
        axes: what the group spans, for torch's own records and offbeat's liveness.
        deadline_s: for the members to come, and the timeout that torch applies to the group's operations.
        backend: torch's name for it; by default what the world's device needs, and gloo for the CPU.
    """
    _wait_for_members(world, f"{name}/asked", name, ranks, deadline_s)
    # Expected: torch.distributed.new_group(ranks, use_local_synchronization=True), which only the members call.
    # Happens (torch 2.13): it names the group by the number of groups its process has made so far, so members with
    # different histories wait for each other under different names, for ever. Hence the layer below, with our name.
    # Can go when new_group takes a name.
    store = distributed_c10d._get_default_store()
    with _default_group.while_making():
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
    # A member that fails in its first call closes its connections, and gloo then reports an error on the members that
    # are still connecting: so no member proceeds before all are here.
    _wait_for_members(world, f"{name}/made", name, ranks, deadline_s)
    made: dist.ProcessGroup = group
    return made


class _UnboundDefault:
    """Hides the device that the default group is bound to while groups are made, by any number of threads at once.

    Expected: nccl connects the members of a new group. Happens (torch 2.11 to 2.13, distributed_c10d.py,
    `_new_process_group_helper`): where the default group is bound to a device, the new one gets the default group as
    `split_from`, and its first collective calls ncclCommSplit, in which every rank of the world must take part. Ranks
    outside the group never do, so its members wait for ever. Can go when the helper takes options without split_from.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never held while members are waited for: they may make groups in another order
        self._num_making = 0
        self._device: torch.device | None = None

    @contextmanager
    def while_making(self) -> Iterator[None]:
        default: Any = distributed_c10d._get_default_group()
        with self._lock:
            if not self._num_making:
                self._device, default.bound_device_id = default.bound_device_id, None
            self._num_making += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_making -= 1
                if not self._num_making:
                    default.bound_device_id = self._device


_default_group: Final = _UnboundDefault()


def _wait_for_members(world: World, place: str, name: str, ranks: Sequence[int], deadline_s: float) -> None:
    """Announce that this rank has reached a place in making a group; wait for the others, and name the missing."""
    if len(ranks) == 1 or world.client is None:
        return
    keys = {rank: f"{place}/{rank}" for rank in ranks}
    world.store.set(keys[world.rank], "1")
    end = time.monotonic() + deadline_s
    pause_s = POLL_S[0]

    def missing() -> list[int]:
        return [rank for rank, key in keys.items() if not world.store.check([key])]

    while away := missing():
        failed = [each for each in world.client.records if each.rank in ranks and each.group in ("", name)]
        if failed and missing():  # still: a rank may have come, proceeded and left since the line above
            record = min(failed, key=lambda each: each.group == "")  # of this group first: it knows more
            raise record.error(f"rank {record.rank}")
        if time.monotonic() >= end:
            on = f"rank {', '.join(map(str, away))}"
            advice = "all members must ask for it, in one order"
            error = DeadlineError(f"making the group {name}", on, deadline_s, advice)
            world.client.post(Record.of(error, world.rank, name))
            raise error
        time.sleep(pause_s)  # not store.wait: each wait of it that expires prints two lines
        pause_s = min(2 * pause_s, POLL_S[1])


def open_calls(
    process_group: dist.ProcessGroup | None, world: World | None, membership: Membership, deadline_s: float
) -> tuple[Calls, dist.ProcessGroup | None]:
    """Return the bookkeeping of a group, and the process group its plain data goes over.

    That is the group's own where it serves the CPU; for one that only serves a device its members make a second one.
    """
    control = process_group
    if process_group is not None and world is not None and not _serves_data(process_group):
        name = f"{membership.key}/data"
        control = make_process_group(world, name, membership.ranks, membership.axes, deadline_s, backend="gloo")
    if world is None or len(membership.ranks) == 1:
        return Calls(membership, None, [], deadline_s), control
    used = [group for group in dict.fromkeys((process_group, control)) if group is not None]
    return Calls(membership, world.client, used, deadline_s), control


def _serves_data(group: dist.ProcessGroup) -> bool:
    """Return whether a process group also moves plain data, which lies on the CPU."""
    return any(group._get_backend(device).name() == "gloo" for device in group._device_types)


def name_for_liveness(group: dist.ProcessGroup, axes: Sequence[str]) -> None:
    """Let a verdict speak of axes instead of torch's group names."""
    from offbeat_liveness import name_group

    name_group(group, axes)


def group_name(layout: Layout, mesh_number: int, axes: Sequence[str], ranks: Sequence[int], channel: str) -> str:
    """Return a name that all members derive alike and that no other group has."""
    shape = ",".join(f"{axis}{layout.axes[axis]}" for axis in layout.axes if layout.axes[axis] > 1)
    suffix = f"#{channel}" if channel else ""
    return f"offbeat/mesh{mesh_number}({shape})/{'×'.join(axes) or 'self'}@{ranks[0]}{suffix}"
