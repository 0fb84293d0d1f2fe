"""Completions that cannot be scored: counted, kept in a log, and an error when they are too many."""

import threading
import traceback
from collections import deque
from pathlib import Path
from typing import Final

from offbeat_data._reward import RewardError
from offbeat_data._reward_config import RewardConfig
from offbeat_types import OffbeatError

WINDOW: Final = 200
"""Completions over which `reward.max_error_share` is counted."""
_MOST_KEPT: Final = 20


class RewardErrors:
    """What became of the latest completions. Safe to use from several threads.

    Args:
        config: the `reward` section.
        log: takes the first tracebacks; None: they are not kept.

    Attributes:
        last: the latest error, in words.
    """

    def __init__(self, config: RewardConfig, log: Path | None) -> None:
        self._config, self._log = config, log
        self._lock = threading.Lock()
        self._failed: deque[bool] = deque(maxlen=WINDOW)
        self._num_kept = 0
        self.last = ""

    def scored(self) -> None:
        """Count a completion that was scored."""
        with self._lock:
            self._failed.append(False)

    def failed(self, error: OffbeatError) -> None:
        """Count a completion that was not.

        Raises:
            RewardError: too many were not, or `reward.on_error` allows none.
        """
        with self._lock:
            self._failed.append(True)
            self.last = str(error)
            self._keep(error)
            num_failed, num_seen = sum(self._failed), len(self._failed)
        if self._config.on_error == "fail":
            raise error
        if num_failed > self._config.max_error_share * WINDOW:
            where = f"; tracebacks in {self._log}" if self._log else ""
            raise RewardError(
                f"{num_failed} of the last {num_seen} completions could not be scored, more than "
                f"reward.max_error_share = {self._config.max_error_share:g} allows; the latest: {self.last}{where}"
            ) from error

    def _keep(self, error: OffbeatError) -> None:
        if self._log is None or self._num_kept >= _MOST_KEPT:
            return
        self._num_kept += 1
        with self._log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(traceback.format_exception_only(error)) + "\n")
