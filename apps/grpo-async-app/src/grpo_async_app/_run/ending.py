"""When a run ends before its data and its updates do: it is accurate enough, or its time is over."""

import time
from collections.abc import Callable

from grpo_async_app._config.sections import GrpoConfig


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
