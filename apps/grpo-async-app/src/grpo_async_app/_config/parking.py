"""Memory that colocated roles put away between their turns."""

from dataclasses import dataclass
from typing import Final

PARKS_NOTHING: Final = 0
PARKS_SOME: Final = 1
"""An engine parks its KV cache, the trainer all but its weights."""
PARKS_ALL: Final = 2


@dataclass(frozen=True, kw_only=True)
class Parking:
    """Sleep levels of the roles that share devices in turns.

    Args:
        engines: of rollout engines in the trainer's turn.
        trainer: of the trainer in the engines' turn.
        why: reason, where the levels were chosen for the machine; "" where they were asked for.
    """

    engines: int = PARKS_ALL
    trainer: int = PARKS_ALL
    why: str = ""
