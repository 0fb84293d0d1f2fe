"""Rewards with a deadline, side by side: child processes score, and are ended when they take too long.

A completion may ask a verifier for 10**10**10, or send a user's regular expression into the woods. No thread can be
stopped and math-verify's own timeouts need the main thread, so scoring happens where it can be ended.
"""

import contextlib
import queue
import threading
import traceback
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from offbeat_data._prompts import Prompt
from offbeat_data._rewards import NotANumberError, RewardConfig, RewardError, RewardScore
from offbeat_data._scoring_child import DIE_DEADLINE_S, LEAVE_DEADLINE_S, ScoringChild
from offbeat_types import ConfigError, DataError, OffbeatError

_WINDOW: Final = 200
"""Completions over which `reward.max_error_share` is counted."""
_MOST_KEPT: Final = 20
"""Tracebacks in the log."""
_SLOW_S: Final = 0.5
"""A completion that waits as long for a child gets one of its own: a quick reward is served by one child."""
_MADE_UP: Final = "a completion made up to try the reward: 42"


class RewardWorker:
    """Scores completions in one child process, each within `config.timeout_s`. Safe to call from several threads.

    Use it as a context manager, or call `close`.

    Args:
        config: the `reward` section; the child builds the reward from it.
        start_timeout_s: longest wait for the child, which imports what the reward needs.

    Raises:
        ConfigError, BackendError: as `build_reward`.
        RewardError: the child died while it started.
        DeadlineError: the child did not start in time.
    """

    def __init__(self, config: RewardConfig, *, start_timeout_s: float = 60.0) -> None:
        config.check()
        self._config, self._start_timeout_s = config, start_timeout_s
        self._lock = threading.Lock()
        self._is_closed = False
        self._child = ScoringChild(config, start_timeout_s)
        self._child.wait_ready()

    def score(self, prompt: Prompt, completion: str) -> RewardScore:
        """Score one completion; one that takes too long is worth 0 and has the part `timed_out` 1.

        A child that dies is replaced and asked once more: it may have been killed from outside.

        Raises:
            RewardError: a user's function raised or returned no finite number (with the traceback as a note), the child
                died twice over it, or this is closed.
            DataError: the prompt lacks what a reward compares with.
        """
        with self._lock:
            if self._is_closed:
                raise RewardError("scoring has ended: this reward is closed")
            try:
                score = self._ask(prompt, completion) or self._ask(prompt, completion, is_last=True)
            except TimeoutError:
                self._restart()
                return RewardScore(value=0.0, parts={**_no_parts(self._config), "timed_out": 1.0})
        assert score is not None
        return RewardScore(value=score.value, parts={**score.parts, "timed_out": 0.0})

    def _ask(self, prompt: Prompt, completion: str, *, is_last: bool = False) -> RewardScore | None:
        """The child's score; None when it died, unless this attempt is the last."""
        self._wait_ready()
        try:
            return self._child.ask(prompt, completion, self._config.timeout_s)
        except TimeoutError:
            raise
        except OSError as error:
            code = self._restart(DIE_DEADLINE_S)
            if not is_last and not self._is_closed:
                return None
            where = f" on prompt {prompt.index}" if is_last else ""
            raise RewardError(f"the process that scores ended with code {code}{where}; see its log above") from error

    def close(self) -> None:
        """End the child. A completion that is being scored raises in its thread: nobody waits for a slow verifier."""
        self._is_closed = True
        self._child.kill()
        with self._lock:
            self._child.end()

    def __enter__(self) -> "RewardWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_ready(self) -> None:
        try:
            self._child.wait_ready()
        except OffbeatError:
            self._restart()
            raise

    def _restart(self, leave_deadline_s: float = LEAVE_DEADLINE_S) -> int:
        """Replace the child, unless this is closed; the new one starts while the caller goes on."""
        code = self._child.end(leave_deadline_s)
        if not self._is_closed:
            self._child = ScoringChild(self._config, self._start_timeout_s)
        return code


def _no_parts(config: RewardConfig) -> dict[str, float]:
    return dict.fromkeys(config.all_weights, 0.0)


class _Failures:
    """What became of the latest completions. Safe to use from several threads."""

    def __init__(self, config: RewardConfig, log: Path | None) -> None:
        self._config, self._log = config, log
        self._lock = threading.Lock()
        self._failed: deque[bool] = deque(maxlen=_WINDOW)
        self._num_kept = 0
        self.last = ""

    def count_scored(self) -> None:
        with self._lock:
            self._failed.append(False)

    def count_failed(self, error: OffbeatError) -> None:
        """Raises RewardError when too many could not be scored, or `reward.on_error` allows none."""
        with self._lock:
            self._failed.append(True)
            self.last = str(error)
            self._keep(error)
            num_failed, num_seen = sum(self._failed), len(self._failed)
        if self._config.on_error == "fail":
            raise error
        if num_failed > self._config.max_error_share * _WINDOW:
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


class RewardPool:
    """Scores completions in up to `config.num_processes` child processes. One is started now, the others when needed.

    Args:
        config: the `reward` section.
        start_timeout_s: longest wait for a child, which imports what the reward needs.
        log: takes the first tracebacks of completions that could not be scored; None: they are not kept.

    Attributes:
        num_scored: completions that were judged, whatever came of it; it tells slow from stuck.

    Raises:
        ConfigError, BackendError, RewardError, DeadlineError: as `RewardWorker`.
    """

    def __init__(self, config: RewardConfig, *, start_timeout_s: float = 60.0, log: Path | None = None) -> None:
        self._config, self._start_timeout_s = config, start_timeout_s
        self._failures = _Failures(config, log)
        self.num_scored = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._children = [RewardWorker(config, start_timeout_s=start_timeout_s)]
        self._idle: queue.SimpleQueue[RewardWorker] = queue.SimpleQueue()
        self._idle.put(self._children[0])
        self._num_starting = 0
        self._threads = ThreadPoolExecutor(config.num_processes, thread_name_prefix="reward")

    @property
    def last_error(self) -> str:
        """Why the latest completion that could not be scored was not; empty when all were."""
        return self._failures.last

    def submit(self, prompt: Prompt, completion: str) -> "Future[RewardScore | None]":
        """Have one completion scored: as `reward.on_error` says, None or a score of 0 for one that cannot be.

        The future's errors are those of `RewardWorker.score`, when such completions are too many or none is allowed.
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
            self._failures.count_failed(error)
            if self._config.on_error == "zero":
                score = RewardScore(value=0.0, parts={**_no_parts(self._config), "failed": 1.0})
        else:
            self._failures.count_scored()
        finally:
            self._idle.put(child)
        with self._lock:
            self.num_scored += 1
        return score

    def _take(self) -> RewardWorker:
        """A child that is idle; after a while a new one, if there may be more. So many threads there are, too."""
        with contextlib.suppress(queue.Empty):
            return self._idle.get(timeout=_SLOW_S)
        with self._lock:
            may_grow = len(self._children) + self._num_starting < self._config.num_processes
            self._num_starting += may_grow
        return self._start() if may_grow else self._idle.get()

    def _start(self) -> RewardWorker:
        try:
            child = RewardWorker(self._config, start_timeout_s=self._start_timeout_s)
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


def try_reward(config: RewardConfig, prompt: Prompt, *, start_timeout_s: float = 60.0) -> str:
    """Score one made-up completion, where a function of the user's own takes part, in a process that is then ended.

    Args:
        config: the `reward` section.
        prompt: that it would be a completion of.
        start_timeout_s: longest wait for that process, which imports what the reward needs.

    Returns:
        What came of it, in words; empty where there is no such function.

    Raises:
        ConfigError: a function returns what is no number, or fails while `on_error` allows no failure.
        BackendError, DeadlineError: as `RewardWorker`.
    """
    if not any(":" in name for name in config.all_weights):
        return ""
    try:
        with RewardWorker(config, start_timeout_s=start_timeout_s) as worker:
            score = worker.score(prompt, _MADE_UP)
    except (RewardError, DataError) as error:
        if isinstance(error, NotANumberError) or config.on_error == "fail":
            raise ConfigError(f"reward: tried once on {_MADE_UP!r}, before anything starts: {error}") from error
        return f"could not score {_MADE_UP!r}: {error}; as reward.on_error = {config.on_error} it is no error yet"
    late = f", after more than reward.timeout_s = {config.timeout_s:g}" if score.parts["timed_out"] else ""
    return f"tried once on {_MADE_UP!r}: {score.value:g}{late}"
