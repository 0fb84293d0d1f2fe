"""Memory of tensors that are on the device only while they are used, one after the other.

in        1     2     3           two lanes, beside each other
used   0     1     2     3
out          0     1     2     3
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, UntypedStorage

from offbeat_device._device import Device
from offbeat_device._offload import bytes_of, distinct_storages


class StreamedMemory:
    """Tensors by name whose values wait in main memory, pinned where the platform can, between two uses.

    A tensor stays the object it is; while it is away its storage is empty, as with `MemoryOffloader`. Of one pass over
    many names, the device holds the one that is used and the next.

    Args:
        device: that the tensors are used on.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._inward, self._outward = device.copy_lane(), device.copy_lane()
        self._parts: dict[str, _Part] = {}

    def through(self, names: Iterable[str], memory_of: Callable[[str], Iterable[Tensor]]) -> Iterator[str]:
        """Iterate over names, each while its tensors are on the device; the body of the loop queues their use.

        Args:
            names: in the order of use.
            memory_of: returns the tensors of a name, asked after the body, which may have made them; none where there
                are none. Their memory is not shared.
        """
        order = list(names)
        here: list[str] = order[:1]
        try:
            for name in here:
                self._bring(name)
            for place, name in enumerate(order):
                self._arrive(name)
                for before in here[: here.index(name)]:  # at most one, on its way out
                    self._leave(before)
                    here.remove(before)
                for following in order[place + 1 : place + 2]:
                    self._bring(following)
                    here.append(following)
                yield name
                self._send(name, memory_of(name))
        finally:
            for name in here:
                if name in self._parts and not self._parts[name].leaves:  # the loop has ended early
                    self._arrive(name)
                    self._send(name, memory_of(name))
                self._leave(name)

    def forget(self) -> None:
        """Let go of all values; tensors that are used again are new ones."""
        self._parts.clear()

    def _bring(self, name: str) -> None:
        """Begin to copy values in; the caller's next work does not wait for it."""
        if part := self._parts.get(name):
            for storage, values in part.held:
                storage.resize_(len(values))
                part.waits.append(self._inward.copy(bytes_of(storage), values))

    def _arrive(self, name: str) -> None:
        if part := self._parts.get(name):
            part.finish()

    def _send(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Begin to copy values out; the tensors stay until they leave."""
        storages = distinct_storages(each.untyped_storage() for each in tensors)
        if not storages:
            return
        part = self._parts.get(name)
        if part is None or [storage.data_ptr() for storage, _ in part.held] != [each.data_ptr() for each in storages]:
            sizes = [storage.nbytes() for storage in storages]
            values = self._device.pinned_memory(sum(sizes)).split(sizes)  # type: ignore[no-untyped-call]
            part = self._parts[name] = _Part(list(zip(storages, values, strict=True)))
        part.waits += [self._outward.copy(values, bytes_of(storage)) for storage, values in part.held]
        part.leaves = True

    def _leave(self, name: str) -> None:
        if part := self._parts.get(name):
            part.finish()
            part.leaves = False
            for storage, _ in part.held:
                storage.resize_(0)


@dataclass
class _Part:
    """Storages of one name, each with its values in main memory, and copies between the two that are under way."""

    held: list[tuple[UntypedStorage, Tensor]]
    waits: list[Callable[[], None]] = field(default_factory=list)
    leaves: bool = False

    def finish(self) -> None:
        """Let what is queued next wait for the copies."""
        for wait in self.waits:
            wait()
        self.waits.clear()
