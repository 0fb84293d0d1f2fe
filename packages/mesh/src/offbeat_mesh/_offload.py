"""Memory of tensors put away while their device is lent to others, and brought back to the very same tensors."""

import ctypes
import os
import tempfile
from collections.abc import Iterable, Sequence
from typing import BinaryIO, Final

import torch
from torch import Tensor, UntypedStorage

from offbeat_mesh._device import Device
from offbeat_types import ConfigError, OffbeatError

_CHUNK_BYTES = 64 * 2**20


class Parking:
    """Where tensors are while they are not on their device: their memory is freed, their values are kept.

    A tensor stays the object it is. Its storage is emptied and filled again, so parameters, views, optimizers and
    communication buffers that share it need not know. On an accelerator the values wait in main memory; a CPU's own
    memory is main memory, so from there they go into a file without a name, which vanishes with the process.

    Source: emptied storages, as torch's FSDP does with what it has gathered (torch/distributed/fsdp/_common_utils.py,
    `_free_storage`).

    Args:
        device: that the tensors are on.
        folder: of that file; "" for the system's folder for temporary files.
    """

    def __init__(self, device: Device, folder: str = "") -> None:
        self._device, self._folder = device, folder
        self._parked: list[tuple[UntypedStorage, int]] = []
        self._host: list[Tensor] = []
        self._file: BinaryIO | None = None

    @property
    def parked_bytes(self) -> int:
        """Bytes that are away now."""
        return sum(num_bytes for _, num_bytes in self._parked)

    def park(self, tensors: Iterable[Tensor], *, movable: bool = False) -> int:
        """Put away the memory of tensors, each with all of its storage. Once more does nothing to those that are away.

        Args:
            tensors: of the device.
            movable: nobody else shares their memory. Memory that cannot be emptied, because it is that of a file or has
                been shown to numpy, is then exchanged for some that can.

        Returns:
            Bytes given back.

        Raises:
            OffbeatError: memory that cannot be emptied; or there is no room for what is in it. Nothing has changed
                then.
        """
        held = [tensor for tensor in tensors if tensor.untyped_storage().nbytes()]
        if not movable:
            _refuse_fixed(held)
        storages = _own_storages(held)
        if not storages:
            return 0
        self._device.synchronize()
        if self._is_host:
            self._write(storages)
        else:
            self._host += [_bytes_of(storage).cpu() for storage in storages]
        given = [(storage, storage.nbytes()) for storage in storages]
        for storage, _ in given:
            storage.resize_(0)
        self._parked += given
        self._device.release_unused()
        return sum(num_bytes for _, num_bytes in given)

    def bring_back(self) -> None:
        """Bring everything back to where it was."""
        if self._file is not None:
            self._file.seek(0)
        for place, (storage, num_bytes) in enumerate(self._parked):
            storage.resize_(num_bytes)
            if self._file is not None:
                _fill(storage, self._file)
            else:
                _bytes_of(storage).copy_(self._host[place])
        self.forget()

    def forget(self) -> None:
        """Let go of what is away: its tensors are not needed any more."""
        self._parked, self._host = [], []
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _is_host(self) -> bool:
        return self._device.torch_device.index is None  # the CPU, the one device without a number

    def _open(self) -> BinaryIO:
        folder = self._folder or None
        return tempfile.TemporaryFile(dir=folder, prefix="offbeat-parking-", buffering=0)

    def _write(self, storages: list[UntypedStorage]) -> None:
        end = 0
        try:
            if self._file is None:
                self._file = self._open()
            end = self._file.seek(0, os.SEEK_END)
            for storage in storages:
                for chunk in _chunks(storage):
                    _write_all(self._file, chunk)
        except OSError as error:
            if self._file is not None:
                self._file.truncate(end)
            num_bytes = sum(storage.nbytes() for storage in storages)
            where = self._folder or tempfile.gettempdir()
            raise OffbeatError(
                f"{num_bytes} bytes of tensors cannot be put away in {where}: {error.strerror}; make room there, or "
                "set TMPDIR to a folder that has it"
            ) from error


def _refuse_fixed(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if not tensor.untyped_storage().resizable():
            raise OffbeatError(
                f"the memory of a tensor of shape {tuple(tensor.shape)} cannot be emptied: it belongs to a file or was "
                "shown to numpy; clone it first, or say that it is movable"
            )


def _own_storages(tensors: list[Tensor]) -> list[UntypedStorage]:
    """The storages of tensors, each once; those that cannot be emptied are changed for some that can."""
    found: dict[int, UntypedStorage] = {}
    moved: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if not storage.resizable():
            own = moved.get(place)
            if own is None:
                own = moved[place] = UntypedStorage(  # type: ignore[no-untyped-call]
                    storage.nbytes(), device=storage.device
                )
                own.copy_(storage)
            fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.data = fresh.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())
            storage, place = own, own.data_ptr()
        found.setdefault(place, storage)
    return list(found.values())


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _chunks(storage: UntypedStorage) -> Iterable[memoryview]:
    """A storage in pieces. Not by `Tensor.numpy`: a storage that it has shown can be emptied no more."""
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


class Asleep:
    """Knows which parts are away, and brings them back.

    Args:
        device: of the engine.

    Attributes:
        WEIGHTS, OPTIMIZER: the parts, which are the tags of `SleepingTrainEngine.wake`; the second is all that is not
            weights of the policy.
    """

    WEIGHTS: Final = "weights"
    OPTIMIZER: Final = "optimizer"

    def __init__(self, device: Device) -> None:
        self._device = device
        self._parking = {tag: Parking(device) for tag in (self.WEIGHTS, self.OPTIMIZER)}
        self._away: set[str] = set()
        self._dropped: dict[str, list[tuple[UntypedStorage, int]]] = {}

    @classmethod
    def tags_of(cls, level: int) -> tuple[str, ...]:
        """What a level of `SleepingTrainEngine.sleep` puts away.

        Raises:
            ConfigError: there is no such level.
        """
        levels = {1: (cls.OPTIMIZER,), 2: (cls.OPTIMIZER, cls.WEIGHTS)}
        if level not in levels:
            raise ConfigError(f"sleep level must be one of {tuple(levels)}, got {level!r}")
        return levels[level]

    def put_away(
        self, tag: str, own: Iterable[Tensor], shared: Iterable[Tensor] = (), *, drop: Sequence[Tensor] = ()
    ) -> None:
        """Free the memory of a part; nothing where it is away.

        Args:
            tag: of the part.
            own: tensors whose values come back, and whose memory nobody else shares: see `movable` of `Parking.park`.
            shared: the same, where others hold on to the memory too, such as FSDP to its shards.
            drop: tensors whose memory comes back with any values, such as cleared gradients.

        Raises:
            OffbeatError: memory that cannot be emptied, or no room for what is in it. Nothing has changed then.
        """
        if tag in self._away:
            return
        parking = self._parking[tag]
        parking.park(own, movable=True)
        try:
            parking.park(shared)
        except OffbeatError:
            parking.bring_back()
            raise
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in drop}.values()
        self._dropped[tag] = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        self._away.add(tag)
        self._device.release_unused()

    def bring_back(self, tags: Iterable[str]) -> bool:
        """Bring parts back, all where none is named; those that are here stay.

        Returns:
            Whether dropped memory is there again, with any values.

        Raises:
            ConfigError: there is no such part.
        """
        wanted = set(tags) or {self.WEIGHTS, self.OPTIMIZER}
        if unknown := wanted - self._parking.keys():
            raise ConfigError(f"wake knows the tags weights and optimizer, got {', '.join(sorted(unknown))}")
        dropped = [pair for tag in wanted for pair in self._dropped.pop(tag, ())]
        for tag in sorted(wanted & self._away):
            self._parking[tag].bring_back()
        for storage, num_bytes in dropped:
            storage.resize_(num_bytes)
        self._away -= wanted
        return bool(dropped)

    def refuse(self, what: str, *tags: str) -> None:
        """Raise unless these parts are here.

        Raises:
            OffbeatError: one is away.
        """
        for tag in tags:
            if tag in self._away:
                raise OffbeatError(f"{what}: the training engine sleeps without its {tag}; call wake() first")
