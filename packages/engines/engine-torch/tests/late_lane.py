"""A device whose copies are done as late as they may be, as far as a processor can show it."""

import weakref
from collections import deque

import torch

from offbeat_device import open_device


class LateLane:
    """Copies that are done when they are waited for, and those before them; until then their target is garbage.

    Attributes:
        num_copies: that were queued.
    """

    def __init__(self):
        self.num_copies, self.queued = 0, deque()

    def copy(self, to, source):
        self.num_copies += 1
        to.view(-1).view(torch.uint8).fill_(0x7F)  # a huge number, or NaN, in every format
        job = (_place(to), _place(source), source.detach().clone())
        self.queued.append(job)
        return lambda: self._run_until(job)

    def _run_until(self, job):
        while job in self.queued:
            to, source, wanted = self.queued.popleft()
            assert torch.equal(_at(source), wanted), "the source was written to before its copy was waited for"
            _at(to).copy_(wanted)

    def finish(self):
        while self.queued:
            self._run_until(self.queued[-1])


def _place(tensor):
    return (weakref.ref(tensor.untyped_storage()), tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())


def _at(place):
    storage, dtype, *where = place
    held = storage()
    assert held is not None, "the memory was let go before its copy was waited for"
    return torch.empty(0, dtype=dtype).set_(held, *where)


class LateDevice(type(open_device("cpu"))):
    """The CPU with such copies.

    Attributes:
        lanes: those that were made.
    """

    def __init__(self):
        super().__init__()
        self.lanes, self._pinned = [], []

    def pinned_memory(self, num_bytes):
        memory = super().pinned_memory(num_bytes)
        self._pinned.append(weakref.ref(memory.untyped_storage()))
        return memory

    @property
    def pinned_bytes(self):
        """Bytes of main memory that are held for values from here."""
        return sum(held.nbytes() for each in self._pinned if (held := each()) is not None)

    def copy_lane(self):
        self.lanes.append(LateLane())
        return self.lanes[-1]
