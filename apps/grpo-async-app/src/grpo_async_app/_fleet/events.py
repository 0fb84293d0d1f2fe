"""Events of the roles of a run, for the part that writes them down."""

import logging
from typing import Final, Protocol

from offbeat_core import WeightPart

_log: Final = logging.getLogger(__name__)


class RunEvents(Protocol):
    """Takes what happens to roles during the run. Times are those of `offbeat_run.clock_s`."""

    def message(self, text: str) -> None:
        """Take a line for the user of the run."""

    def worked(self, role: str, work: str, start_s: float, end_s: float) -> None:
        """Take a stretch in which a role was busy, and what it did: "score"."""

    def handed_over(self, role: str, step: str, start_s: float, end_s: float, resident_bytes: int) -> None:
        """Take a step in which memory changed hands between roles that share devices, and what the role then holds."""

    def took_weights(self, role: str, part: WeightPart, version: int, start_s: float) -> None:
        """Take a part of the weights that an engine has loaded and proved."""


class LoggedEvents:
    """Logs the messages, and drops the rest: for a fleet without a run around it, such as that of `evaluate`."""

    def message(self, text: str) -> None:
        """Log it as a warning."""
        _log.warning("%s", text)

    def worked(self, role: str, work: str, start_s: float, end_s: float) -> None:
        """Drop it."""

    def handed_over(self, role: str, step: str, start_s: float, end_s: float, resident_bytes: int) -> None:
        """Drop it."""

    def took_weights(self, role: str, part: WeightPart, version: int, start_s: float) -> None:
        """Drop it."""
