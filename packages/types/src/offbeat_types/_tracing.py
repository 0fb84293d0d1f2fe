"""Which of its steps a role traces, as it is told by whoever starts it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TracePlan:
    """What one role traces of itself.

    Args:
        role: such as "trainer-0".
        folder: takes a file `ROLE-STEP.json` for each step, in Chrome's format.
        first, last: the steps, from `first` up to, not including, `last`.
        max_bytes: of all its files.
    """

    role: str
    folder: str
    first: int
    last: int
    max_bytes: int
