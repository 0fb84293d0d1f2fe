"""A group over which buckets are broadcast: gloo between CPUs, nccl between CUDA devices; kept from sync to sync.

It is a backend of torch by itself and belongs to no world: trainer and engines may each be in one of their own, as
vLLM's processes are. What its members say to each other beside the bytes goes over their connections
(`_connection.py`), so that a failure or a death of a member is reported while others wait for it in the group.

vLLM's own `NCCLWeightTransferEngine` does not fit (vllm 0.32.0, vllm/distributed/weight_transfer/): the trainer needs
vLLM beside it for `PyNcclCommunicator`, the store passes pickles, a member that dies leaves the others waiting without
end, and no member reports what it holds. Source of what is called here: torch/_C/_distributed_c10d.pyi of torch 2.13.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, Store, TCPStore

from offbeat_core import ConfigError, WeightSyncError, new_future, settle
from offbeat_device import open_device
from offbeat_mesh import break_off
from offbeat_weightsync._connection import POLL_EVERY_S, Deadline, GroupAddress, GroupMember
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._tensors import Checksum

NUM_BUFFERS: Final = 2
"""One travels while the other is filled or loaded."""

_POLL_S: Final = 5e-4
"""Time between two polls for a bucket."""

_POLL_MAKING_S: Final = 0.01
"""Time between two polls for the others while the group is made."""

_LEAVE_S: Final = 2.0
"""Time that `leave` waits for a group that is being made to be given up, which takes a poll unless a host is lost."""

_REASON_S: Final = 4.0
"""Time that a member whose group broke waits for its connection to report the member that broke it."""

_FIRST_OPERATION: Final = threading.Lock()
"""Held while a group between CPUs is given its first operation.

Expected: threads may use groups of their own at once. Happens (torch 2.11, FlightRecorderDetail.hpp): a group's first
operation enters it into the table of all groups before it takes the recorder's lock, and two at once end the process
with SIGSEGV (4 threads: 7 runs of 8; with this lock none of 6; torch 2.13: none). Can go with torch 2.11. Not for
nccl, whose first operation waits for the other members.
"""

_NEVER: Final = timedelta(days=1)
"""Timeout of nccl, whose watchdog ends the process of a member that waits longer. Our deadlines end the wait."""

Check = Callable[[], object]
"""Raises when another member has failed."""


class WeightGroup:
    """Membership of one process in groups of its kind, one after the other. Kept from sync to sync by both sides.

    Args:
        device: of this process, by name: buckets come to it.

    Raises:
        ConfigError: it is not here, or its kind has no group that could be made here.
    """

    def __init__(self, device: str = "auto") -> None:
        self._device = open_device(device)
        if self._device.collective_backend not in _MAKERS:
            raise ConfigError(
                f"weights go over a group of {' or '.join(_MAKERS)}; {self._device.kind} has "
                f"{self._device.collective_backend}: send them over TCP"
            )
        self._on_host = self._buffer(0).is_cpu
        self._place: GroupAddress | None = None
        self._making: _Making | None = None
        self._backend: Any = None

    @property
    def checksum(self) -> Checksum:
        """Checksum that proves a bucket where the group delivers it."""
        return "xxh3" if self._on_host else "words"

    @property
    def place(self) -> GroupAddress | None:
        """Address of the group that it is in; None: in no group."""
        return self._place

    @property
    def member(self) -> GroupMember:
        """Return what to send to the sender when joining."""
        where = self._device.torch_device
        # By uuid, as an index may name another device in another process.
        device = "" if self._on_host else f"{torch.get_device_module(where).get_device_properties(where).uuid}"
        if self._place is None:
            return GroupMember(self._device.kind, device)
        return GroupMember(self._device.kind, device, self._place.group, self._place.rank)

    def join(self, place: GroupAddress, host: str, deadline: Deadline, store: Store | None = None) -> None:
        """Begin to meet the other members; without effect if it is in that group already.

        Args:
            place: where they meet.
            host: by which address of this machine the others reach it.
            deadline: of the sync.
            store: that is kept here; None: it is looked for at the place.
        """
        if self._place == place:
            return
        self.leave()
        self._place = place
        # Torch gets a second more: our own deadline comes first, and its error names what is missing.
        timeout_s = deadline.left_s() + 1.0
        self._making = _Making(self._device.collective_backend, place, host, timeout_s, store, self._buffer(1))

    def await_members(self, check: Check, deadline: Deadline) -> None:
        """Return when all have come."""
        if self._backend is not None:
            return
        assert self._making is not None, "join comes first"
        with deadline.declared("the members of the group"):
            while self._backend is None:
                try:
                    self._backend = self._making.result.result(POLL_EVERY_S)
                except TimeoutError:
                    check()
                    if not deadline.left_s():
                        raise deadline.missed("the members of the group") from None
                except RuntimeError as error:
                    raise self._broken("it was made", check, error) from error

    def buffers(self, plan: BucketPlan) -> list[Tensor]:
        """Memory for buckets of a plan, each [bytes] uint8 on the device."""
        return [self._buffer(plan.longest_bucket_bytes) for _ in range(min(NUM_BUFFERS, len(plan.buckets)))]

    def start(self, bucket: Tensor, deadline: Deadline) -> dist.Work:
        """Send a bucket from rank 0 to all others; all members call this for each bucket, in order."""
        # Torch gets a second more: our own deadline comes first, and its error names what is missing.
        return _broadcast(self._backend, bucket, timedelta(seconds=deadline.left_s() + 1.0))

    def finish(self, work: dist.Work, check: Check, deadline: Deadline, what: str) -> None:
        """Wait until a bucket has come, called `what` in errors."""
        # Polled: `wait()` would not see that a member has failed, which its connection says.
        while not work.is_completed():
            check()
            if not deadline.left_s():
                raise deadline.missed(f"{what} to come over the group")
            time.sleep(_POLL_S)
        try:
            work.wait()  # raises, where it has ended by a failure
        except RuntimeError as error:
            raise self._broken(f"{what} was awaited", check, error) from error

    def synchronize(self) -> None:
        """Return when what was copied to the device or on it is there."""
        self._device.synchronize()

    def leave(self) -> None:
        """Break the group off, here and for members that still wait in it."""
        if self._making is not None:
            self._making.give_up()
        if self._backend is not None:
            break_off(self._backend)  # gloo's own `abort` ends no wait
        self._place = self._making = self._backend = None

    def _buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device.torch_device)

    def _broken(self, when: str, check: Check, error: RuntimeError) -> WeightSyncError:
        """Return the error to raise when torch says that the group is broken, unless `check` raises the reason."""
        end = time.monotonic() + _REASON_S
        while time.monotonic() < end:
            check()
            time.sleep(0.01)
        size = self._place.size if self._place is not None else 0
        return WeightSyncError(f"the group of {size} processes broke while {when}: {str(error).splitlines()[0]}")


class _Making:
    """A group that is being made, in a thread of its own: torch waits for the other members without a way to end it.

    The thread enters torch's wait only when all members are there. One that was left behind in it would return to
    Python while the process ends, and abort it (seen with torch 2.11, Python 3.11).

    Args:
        backend: of torch, by name.
        place: where the members meet.
        host: by which address of this machine the others reach it.
        timeout_s: for the members to come.
        store: that is kept here; None: it is looked for at the place.
        first: [1] uint8 on the device: is sent to all, with which nccl connects them.
    """

    def __init__(
        self, backend: str, place: GroupAddress, host: str, timeout_s: float, store: Store | None, first: Tensor
    ) -> None:
        self.result = new_future()
        self._given_up = threading.Event()
        make = partial(self._make, backend, place, host, timeout_s, store, first)
        self._thread = threading.Thread(
            target=settle, args=(self.result, make), name="offbeat-weight-group", daemon=True
        )
        self._thread.start()

    def give_up(self) -> None:
        """End the waits for other members; without effect on a group that is made."""
        self._given_up.set()
        self._thread.join(_LEAVE_S)

    def _make(
        self, backend: str, place: GroupAddress, host: str, timeout_s: float, store: Store | None, first: Tensor
    ) -> dist.ProcessGroup:
        end, timeout = time.monotonic() + timeout_s, timedelta(seconds=timeout_s)
        if store is None:
            store = TCPStore(place.host, place.port, is_master=False, timeout=timeout)
        store = PrefixStore(place.group, store)
        store.set(f"here/{place.rank}", "1")
        everyone = [f"here/{rank}" for rank in range(place.size)]
        self._poll(lambda: store.check(everyone), end)
        group: dist.ProcessGroup = _MAKERS[backend](store, place.rank, place.size, host, timeout)
        try:
            with _FIRST_OPERATION if first.is_cpu else nullcontext():
                work = _broadcast(group, first, timeout)
            self._poll(work.is_completed, end)
            work.wait()  # raises, where it has ended by a failure
        except BaseException:
            break_off(group)
            raise
        return group

    def _poll(self, is_done: Callable[[], bool], end: float) -> None:
        while not is_done():
            if self._given_up.wait(_POLL_MAKING_S):
                raise RuntimeError("it was left before all members had come")
            if time.monotonic() > end:
                raise RuntimeError("not all of its members came")


def _make_gloo(store: Store, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    # By address: torch would look the machine's name up, which may be slow, or stand for loopback.
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _make_nccl(store: Store, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _NEVER
    return nccl(store, rank, size, options)


_MAKERS: Final[Mapping[str, Callable[[Store, int, int, str, timedelta], Any]]] = {
    "gloo": _make_gloo,
    "nccl": _make_nccl,
}


def _broadcast(group: Any, tensor: Tensor, timeout: timedelta) -> dist.Work:
    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    options.timeout = timeout
    work: dist.Work = group.broadcast([tensor], options)
    return work


def place_of(place: GroupAddress, rank: int) -> GroupAddress:
    """Return the same group, for another member."""
    return msgspec.structs.replace(place, rank=rank)
