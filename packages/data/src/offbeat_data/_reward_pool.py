"""Rewards side by side: as many guarded children as a slow judge needs, and no more."""

import contextlib
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from offbeat_data._guard import GuardedReward
from offbeat_data._prompts import Prompt
from offbeat_data._reward import RewardError, RewardScore
from offbeat_data._reward_config import RewardConfig
from offbeat_data._reward_errors import RewardErrors
from offbeat_types import DataError

SLOW_S: Final = 0.5
"""A completion that waits as long for a child gets one of its own: a quick reward is served by one child."""


class RewardPool:
    """Scores completions in up to `config.num_processes` child processes. One is started now, the others when needed.

    Args:
        config: the `reward` section.
        start_timeout_s: longest wait for a child, which imports what the reward needs.
        log: takes the first tracebacks of completions that could not be scored; None: they are not kept.

    Attributes:
        num_scored: completions that were judged, whatever came of it; it tells slow from stuck.

    Raises:
        ConfigError, BackendError, RewardError, DeadlineError: as `GuardedReward`.
    """

    def __init__(self, config: RewardConfig, *, start_timeout_s: float = 60.0, log: Path | None = None) -> None:
        self._config, self._start_timeout_s = config, start_timeout_s
        self._errors = RewardErrors(config, log)
        self.num_scored = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._children = [GuardedReward(config, start_timeout_s=start_timeout_s)]
        self._idle: queue.SimpleQueue[GuardedReward] = queue.SimpleQueue()
        self._idle.put(self._children[0])
        self._num_starting = 0
        self._threads = ThreadPoolExecutor(config.num_processes, thread_name_prefix="reward")

    @property
    def last_error(self) -> str:
        """Why the latest completion that could not be scored was not; empty when all were."""
        return self._errors.last

    def submit(self, prompt: Prompt, completion: str) -> "Future[RewardScore | None]":
        """Have one completion scored: as `reward.on_error` says, None or a score of 0 for one that cannot be.

        The future's errors are those of `GuardedReward.score`, when such completions are too many or none is allowed.
        """
        return self._threads.submit(self._score, prompt, completion)

    def close(self) -> None:
        """End the children. What is being scored raises; what waits is not begun."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.close()
        self._threads.shutdown()

    def _score(self, prompt: Prompt, completion: str) -> RewardScore | None:
        child, score = self._take(), None
        try:
            score = child.score(prompt, completion)
        except (RewardError, DataError) as error:
            if self._is_closed:
                raise
            self._errors.failed(error)
            if self._config.on_error == "zero":
                parts = dict.fromkeys(self._config.all_weights, 0.0)
                score = RewardScore(value=0.0, parts={**parts, "failed": 1.0})
        else:
            self._errors.scored()
        finally:
            self._idle.put(child)
        with self._lock:
            self.num_scored += 1
        return score

    def _take(self) -> GuardedReward:
        """A child that is idle; after a while a new one, if there may be more. So many threads there are, too."""
        with contextlib.suppress(queue.Empty):
            return self._idle.get(timeout=SLOW_S)
        with self._lock:
            may_grow = len(self._children) + self._num_starting < self._config.num_processes
            self._num_starting += may_grow
        return self._start() if may_grow else self._idle.get()

    def _start(self) -> GuardedReward:
        try:
            child = GuardedReward(self._config, start_timeout_s=self._start_timeout_s)
        finally:
            with self._lock:
                self._num_starting -= 1
        with self._lock:
            self._children.append(child)
            is_closed = self._is_closed
        if is_closed:
            child.close()
            raise RewardError("scoring has ended: this reward is closed")
        return child
