"""One tree of errors for all of offbeat.

`exit_code` is what a command line leaves with: 2 for something the user can put right before a run starts,
3 for a run that failed, 4 for a run that stood still.
"""

from typing import ClassVar


class OffbeatError(Exception):
    """Root of every error offbeat raises on purpose. Its text says what was required, what was got, what to do."""

    exit_code: ClassVar[int] = 3


class UserError(OffbeatError):
    """Something in the user's hands is wrong; found before anything starts."""

    exit_code: ClassVar[int] = 2


class ConfigError(UserError):
    """A setting is unknown, of the wrong type, out of range, or without effect."""


class DataError(UserError):
    """A data set is missing, empty, unreadable, or lacks a column."""


class ModelError(UserError):
    """A model folder is missing, corrupt, or of a family that is not supported."""


class BackendError(UserError):
    """A backend is unknown or not installed; the text holds the install line."""


class RunFolderError(UserError):
    """A run folder exists already, is missing, cannot be written, or has no room."""


class ShapeError(OffbeatError):
    """Two arrays that belong together differ in shape or dtype. Our own bug, or a caller's."""


class DeadlineError(OffbeatError):
    """A wait passed its deadline. The text names who waited, for whom, and how long.

    Args:
        waiting: name of the wait, such as "trainer.train".
        on: who should have come.
        deadline_s: seconds allowed.
        advice: what to change.
    """

    exit_code: ClassVar[int] = 4

    def __init__(self, waiting: str, on: str, deadline_s: float, advice: str = "") -> None:
        super().__init__(waiting, on, deadline_s, advice)
        self.waiting, self.on, self.deadline_s, self.advice = waiting, on, deadline_s, advice

    def __str__(self) -> str:
        text = f"{self.waiting}: waited {self.deadline_s:g} s for {self.on}, which did not come"
        return f"{text}; {self.advice}" if self.advice else text


class PeerFailedError(OffbeatError):
    """Another process of the run failed or died, so this one cannot go on.

    Args:
        peer: its role and index, such as "rollout-0".
        reason: its own error in one line, or how it died.
        log_tail: the last lines it logged, newest last.
    """

    def __init__(self, peer: str, reason: str, log_tail: str = "") -> None:
        super().__init__(peer, reason, log_tail)
        self.peer, self.reason, self.log_tail = peer, reason, log_tail

    def __str__(self) -> str:
        text = f"{self.peer} failed: {self.reason}"
        return f"{text}\nlast lines of {self.peer}:\n{self.log_tail}" if self.log_tail else text


class WeightSyncError(OffbeatError):
    """Weights did not arrive as sent: a bucket, name, shape, version or checksum differs, or a side died."""
