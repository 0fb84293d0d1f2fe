"""When a run ends before its data and its updates do: it is accurate enough, or its time is over."""

import time
from collections.abc import Callable

from grpo_async_app._config.sections import GrpoConfig
from offbeat_core import OffbeatError


class SamplesLostError(OffbeatError):
    """A run has trained nothing, or has ended early, because its samples failed."""


class UntrainedGroups:
    """Prompt groups since the last that could be trained.

    Attributes:
        num_lost: too many of their samples failed.
        num_equal: their samples teach nothing.
    """

    def __init__(self) -> None:
        self.num_lost = self.num_equal = 0

    def note(self, *, trained: bool, lost: bool) -> None:
        """Count one group."""
        self.num_lost = 0 if trained else self.num_lost + lost
        self.num_equal = 0 if trained else self.num_equal + (not lost)

    def reason(self, reason: str) -> str:
        """Return why a run has ended early, as its policy says it, but for samples that failed."""
        if not self.num_lost:
            return reason
        return (
            f"of the last {self.num_lost + self.num_equal} prompt groups {self.num_lost} were lost with samples that "
            f"failed, and {self.num_equal} had no learning signal"
        )


class EarlyEnd:
    """Says whether a run should end early, and why.

    Args:
        config: of the run.
        clock: seconds that never go back; the time limit counts from now.
    """

    def __init__(self, config: GrpoConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._stop_at, self._max_time_s = config.eval.stop_at_accuracy, config.engine.max_time_s
        self._clock, self._started_s = clock, clock()

    def reason(self, accuracy: float | None, version: int) -> str:
        """Return the reason in one line, or an empty string.

        Args:
            accuracy: of the last validation of `eval.score_set`, in [0, 1]; None before the first.
            version: policy version when that validation began.
        """
        time_s = self._clock() - self._started_s
        if self._stop_at and accuracy is not None and accuracy >= self._stop_at:
            return (
                f"accuracy {accuracy:.3f} at update {version} reaches eval.stop_at_accuracy = {self._stop_at:g}, "
                f"{time_s:.0f} s after training began"
            )
        if 0 < self._max_time_s <= time_s:
            return f"the time limit engine.max_time_s = {self._max_time_s:g} s is over"
        return ""
