"""What of a training engine is away while its device is lent to others: weights, and all else that takes memory."""

from collections.abc import Iterable, Sequence
from typing import Final

from torch import Tensor, UntypedStorage

from offbeat_mesh._device import Device
from offbeat_mesh._parking import Parking
from offbeat_types import ConfigError, OffbeatError


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
