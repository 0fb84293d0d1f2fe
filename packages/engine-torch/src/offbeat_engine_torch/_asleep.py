"""What of an engine is away while its device is lent to others."""

from collections.abc import Iterable, Sequence
from typing import Final

from torch import Tensor
from torch.distributed.tensor import DTensor

from offbeat_dist import Device, Parking
from offbeat_engine_torch._pieces import Piece
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
        self._parking = {tag: Parking(device) for tag in (WEIGHTS, OPTIMIZER)}
        self._away: set[str] = set()

    def put_away(self, tag: str, own: Iterable[Tensor], shared: Iterable[Tensor] = ()) -> None:
        """Free the memory of a part, and keep its values; nothing where it is away. See `Parking.park`.

        Args:
            tag: of the part.
            own: nobody else shares their memory, so it may be exchanged.
            shared: others hold on to their memory too, such as FSDP to its shards.
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
        self._away.add(tag)

    def bring_back(self, tags: Iterable[str]) -> None:
        """Bring parts back; those that are here stay.

        Raises:
            ConfigError: there is no such part.
        """
        wanted = set(tags) or {WEIGHTS, OPTIMIZER}
        if unknown := wanted - self._parking.keys():
            raise ConfigError(f"wake knows the tags weights and optimizer, got {', '.join(sorted(unknown))}")
        for tag in sorted(wanted & self._away):
            self._parking[tag].bring_back()
        self._away -= wanted

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


def memory_of(pieces: Sequence[Piece]) -> list[Tensor]:
    """Memory of a model's parameters on this rank, and, where the model is not cut, everybody who shares it."""
    parameters = [piece.parameter for piece in pieces]
    return [*(piece.local for piece in pieces), *(each for each in parameters if not isinstance(each, DTensor))]
