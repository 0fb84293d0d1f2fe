"""The share of samples that came to nothing, and the bound at which a run ends for it."""

from collections import deque
from typing import Final

WINDOW: Final = 200
"""Samples that a share is counted over; the settings' texts say so."""


class ErrorShare:
    """Counts failures among the last samples.

    Args:
        setting: name of the setting that bounds their share.
        max_share: its value, in [0, 1].
    """

    def __init__(self, setting: str, max_share: float) -> None:
        self._setting, self._max_share = setting, max_share
        self._failed: deque[bool] = deque(maxlen=WINDOW)

    def add(self, *, failed: bool) -> None:
        """Count one sample."""
        self._failed.append(failed)

    def complaint(self, what: str) -> str:
        """Return a complaint if there are too many, else an empty string; `what` says which, such as "were lost"."""
        num_failed, num_seen = sum(self._failed), len(self._failed)
        if num_failed <= self._max_share * WINDOW:
            return ""
        return f"{num_failed} of the last {num_seen} {what}, more than {self._setting} = {self._max_share:g} allows"
