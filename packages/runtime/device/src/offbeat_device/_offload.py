"""Memory of tensors put away while their device is lent to others, and brought back to the very same tensors."""

import ctypes
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Final

import torch
from torch import Tensor, UntypedStorage

from offbeat_core import ConfigError, OffbeatError
from offbeat_device._device import Device

_CHUNK_BYTES = 64 * 2**20


class MemoryOffloader:
    """Frees the memory of parts of a training engine, keeps their values, and brings them back.

    A tensor stays the object it is. Its storage is emptied and filled again, so parameters, views, optimizers and
    communication buffers that share it need not know. On an accelerator the values wait in main memory, which is
    pinned and kept for the next time; a CPU's own memory is main memory, so from there they go into a file without a
    name, which vanishes with the process.

    Source: emptied storages, as torch's FSDP does with what it has gathered (torch/distributed/fsdp/_common_utils.py,
    `_free_storage`).

    Args:
        device: that the tensors are on.

    Attributes:
        WEIGHTS, OPTIMIZER: the parts, which are the tags of `SleepingTrainEngine.wake`; the second is all that is not
            weights of the policy.
    """

    WEIGHTS: Final = "weights"
    OPTIMIZER: Final = "optimizer"

    def __init__(self, device: Device) -> None:
        self._device = device
        self._away: dict[str, _Offloaded] = {}
        self._pinned: dict[tuple[str, str], Tensor] = {}  # to pin memory takes longer than to copy to it

    @classmethod
    def tags_of(cls, level: int) -> tuple[str, ...]:
        """Return what a level of `SleepingTrainEngine.sleep` puts away.

        Raises:
            ConfigError: there is no such level.
        """
        levels = {1: (cls.OPTIMIZER,), 2: (cls.OPTIMIZER, cls.WEIGHTS)}
        if level not in levels:
            raise ConfigError(f"sleep level must be one of {tuple(levels)}, got {level!r}")
        return levels[level]

    @property
    def offloaded_bytes(self) -> int:
        """Bytes whose values are away now."""
        return sum(num_bytes for part in self._away.values() for _, num_bytes in part.kept)

    def offload(
        self, tag: str, own: Iterable[Tensor], shared: Iterable[Tensor] = (), *, drop: Sequence[Tensor] = ()
    ) -> None:
        """Free the memory of a part, each tensor with all of its storage; nothing where the part is away.

        Args:
            tag: of the part.
            own: tensors whose memory is not shared. Memory that cannot be emptied, because it is that of a file or
                has been shown to numpy, is exchanged for some that can.
            shared: tensors whose memory is also held by others, such as FSDP's shards.
            drop: tensors whose memory comes back with any values, such as cleared gradients.

        Raises:
            OffbeatError: shared memory that cannot be emptied, or no room for what is in it. Nothing has changed then.
        """
        if tag in self._away:
            return
        part = _Offloaded()
        self._put_away(part, _emptiable_storages(own), (tag, "own"))
        try:
            self._put_away(part, _storages(shared), (tag, "shared"))
        except OffbeatError:
            part.restore()
            raise
        part.dropped = [
            (storage, storage.nbytes()) for storage in distinct_storages(each.untyped_storage() for each in drop)
        ]
        for storage, _ in part.dropped:
            storage.resize_(0)
        self._away[tag] = part
        self._device.release_unused()

    def restore(self, tags: Iterable[str] = ()) -> bool:
        """Bring parts back, all where none is named; those that are here stay.

        Returns:
            Whether dropped memory is there again, with any values.

        Raises:
            ConfigError: there is no such part.
            OffbeatError: an accelerator has too little memory. Nothing has changed then.
        """
        wanted = set(tags) or {self.WEIGHTS, self.OPTIMIZER}
        if unknown := wanted - {self.WEIGHTS, self.OPTIMIZER}:
            raise ConfigError(f"wake knows the tags weights and optimizer, got {', '.join(sorted(unknown))}")
        has_dropped = False
        coming = sorted(wanted & self._away.keys())
        self._require_room(coming)
        for tag in coming:
            part = self._away[tag]
            part.restore()
            self._device.synchronize()  # copies from pinned memory are only queued
            for storage, num_bytes in part.dropped:
                storage.resize_(num_bytes)
            has_dropped |= bool(part.dropped)
            del self._away[tag]
        return has_dropped

    def require(self, what: str, *tags: str) -> None:
        """Raise unless these parts are here, which `what` needs.

        Raises:
            OffbeatError: one is away.
        """
        for tag in tags:
            if tag in self._away:
                raise OffbeatError(f"{what}: the training engine sleeps without its {tag}; call wake() first")

    def _require_room(self, tags: Sequence[str]) -> None:
        if not self._on_accelerator or not tags:  # main memory is made free by the system
            return
        parts = [self._away[tag] for tag in tags]
        needed = sum(num_bytes for part in parts for _, num_bytes in (*part.kept, *part.dropped))
        free = self._device.memory().free_bytes
        if needed > free:
            raise OffbeatError(
                f"its {' and '.join(tags)} take {needed / 2**30:.2f} GiB of the device, and {free / 2**30:.2f} GiB are "
                "free; other processes must hold less there"
            )

    @property
    def _on_accelerator(self) -> bool:
        return self._device.torch_device.index is not None  # the CPU is the one device without a number

    def _put_away(self, part: "_Offloaded", storages: list[UntypedStorage], place: tuple[str, str]) -> None:
        if not storages:
            return
        self._device.synchronize()
        if not self._on_accelerator:
            part.write(storages)
        else:
            sizes = [storage.nbytes() for storage in storages]
            values = self._pinned_memory(place, sum(sizes)).split(sizes)  # type: ignore[no-untyped-call]
            for value, storage in zip(values, storages, strict=True):
                value.copy_(bytes_of(storage), non_blocking=True)
            self._device.synchronize()
            part.values += values
        part.kept += [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        self._device.release_unused()

    def _pinned_memory(self, place: tuple[str, str], num_bytes: int) -> Tensor:
        held = self._pinned.get(place)
        if held is None or len(held) < num_bytes:
            held = self._pinned[place] = self._device.pinned_memory(num_bytes)
        return held[:num_bytes]


@dataclass
class _Offloaded:
    """A part that is away: storages and their sizes, with the values of those kept in main memory or in a file."""

    kept: list[tuple[UntypedStorage, int]] = field(default_factory=list)
    dropped: list[tuple[UntypedStorage, int]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    file: BinaryIO | None = None

    def write(self, storages: list[UntypedStorage]) -> None:
        try:
            if self.file is None:
                self.file = tempfile.TemporaryFile(prefix="offbeat-offload-", buffering=0)  # noqa: SIM115  read when the part comes back
            for storage in storages:
                for chunk in _chunks(storage):
                    _write_all(self.file, chunk)
        except OSError as error:
            num_bytes = sum(storage.nbytes() for storage in storages)
            raise OffbeatError(
                f"{num_bytes} bytes of tensors cannot be put away in {tempfile.gettempdir()}: {error.strerror}; make "
                "room there, or set TMPDIR to a folder that has it"
            ) from error

    def restore(self) -> None:
        if self.file is not None:
            self.file.seek(0)
        for place, (storage, num_bytes) in enumerate(self.kept):
            storage.resize_(num_bytes)
            if self.file is not None:
                _fill(storage, self.file)
            else:
                bytes_of(storage).copy_(self.values[place], non_blocking=True)
        if self.file is not None:
            self.file.close()


def distinct_storages(storages: Iterable[UntypedStorage]) -> list[UntypedStorage]:
    """Return those that hold something, each once."""
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    held = list(tensors)
    for tensor in held:
        if tensor.untyped_storage().nbytes() and not tensor.untyped_storage().resizable():
            raise OffbeatError(
                f"the memory of a tensor of shape {tuple(tensor.shape)} cannot be emptied: it belongs to a file or was "
                "shown to numpy; clone it first, or name it among the engine's own"
            )
    return distinct_storages(tensor.untyped_storage() for tensor in held)


def _emptiable_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return the storages of tensors; those that cannot be emptied are changed for some that can."""
    held = [tensor for tensor in tensors if tensor.untyped_storage().nbytes()]
    moved: dict[int, UntypedStorage] = {}
    for tensor in held:
        storage = tensor.untyped_storage()
        if storage.resizable():
            continue
        own = moved.get(storage.data_ptr())
        if own is None:
            own = UntypedStorage(storage.nbytes(), device=storage.device)  # type: ignore[no-untyped-call]
            moved[storage.data_ptr()] = own
            own.copy_(storage)
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = fresh.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())
    return distinct_storages(tensor.untyped_storage() for tensor in held)


def bytes_of(storage: UntypedStorage) -> Tensor:
    """Return all of a storage as [num_bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _chunks(storage: UntypedStorage) -> Iterable[memoryview]:
    """Return a storage in pieces. Not by `Tensor.numpy`: a storage that it has shown can be emptied no more."""
    whole = memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
    return (whole[start : start + _CHUNK_BYTES] for start in range(0, len(whole), _CHUNK_BYTES))


def _write_all(file: BinaryIO, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[file.write(chunk) :]


def _fill(storage: UntypedStorage, file: BinaryIO) -> None:
    for chunk in _chunks(storage):
        while chunk:
            num_read = file.readinto(chunk)  # type: ignore[attr-defined]
            assert num_read, "the file is as long as what was written"
            chunk = chunk[num_read:]
