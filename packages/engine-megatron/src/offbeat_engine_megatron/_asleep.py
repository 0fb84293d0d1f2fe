"""What of an engine is away while its device is lent to others: weights, and all else that takes memory."""

from collections.abc import Iterable, Sequence
from typing import Final

from torch import Tensor, UntypedStorage

from offbeat_dist import Device, Parking
from offbeat_types import ConfigError, OffbeatError

WEIGHTS: Final = "weights"
OPTIMIZER: Final = "optimizer"
"""Tags of `wake`: the second is all that is not weights of the policy."""

LEVELS: Final = {1: (OPTIMIZER,), 2: (OPTIMIZER, WEIGHTS)}


class Asleep:
    """Knows which parts are away, and brings them back.

    Args:
        device: of the engine.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._parking = {tag: Parking(device) for tag in (WEIGHTS, OPTIMIZER)}
        self._away: set[str] = set()
        self._dropped: list[tuple[UntypedStorage, int]] = []

    def put_away(self, tag: str, keep: Iterable[Tensor], drop: Sequence[Tensor] = ()) -> None:
        """Free the memory of a part; nothing where it is away.

        Args:
            tag: `WEIGHTS` or `OPTIMIZER`.
            keep: tensors whose values come back; see `Parking.park`.
            drop: tensors whose memory comes back with any values, such as cleared gradients.
        """
        if tag in self._away:
            return
        self._parking[tag].park(keep)
        for storage in {each.untyped_storage().data_ptr(): each.untyped_storage() for each in drop}.values():
            self._dropped.append((storage, storage.nbytes()))
            storage.resize_(0)
        self._away.add(tag)
        self._device.release_unused()

    def bring_back(self, tags: Iterable[str]) -> bool:
        """Bring parts back; those that are here stay. Whether dropped memory is there again, with any values.

        Raises:
            ConfigError: there is no such part.
        """
        wanted = set(tags) or {WEIGHTS, OPTIMIZER}
        if unknown := wanted - self._parking.keys():
            raise ConfigError(f"wake knows the tags weights and optimizer, got {', '.join(sorted(unknown))}")
        for tag in sorted(wanted & self._away):
            self._parking[tag].bring_back()
        self._away -= wanted
        dropped = self._dropped if OPTIMIZER in wanted else []
        for storage, num_bytes in dropped:
            storage.resize_(num_bytes)
        if OPTIMIZER in wanted:
            self._dropped = []
        return bool(dropped)

    def refuse(self, what: str, *tags: str) -> None:
        """Raise unless these parts are here.

        Raises:
            OffbeatError: one is away.
        """
        for tag in tags:
            if tag in self._away:
                raise OffbeatError(f"{what}: the training engine sleeps without its {tag}; call wake() first")


def tags_of(level: int) -> tuple[str, ...]:
    """What a level of sleep puts away.

    Raises:
        ConfigError: there is no such level.
    """
    if level not in LEVELS:
        raise ConfigError(f"sleep level must be one of {tuple(LEVELS)}, got {level!r}")
    return LEVELS[level]
