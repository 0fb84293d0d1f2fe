"""Rewards with a deadline, side by side: child processes score, and are ended when they take too long.

A completion may ask a verifier for 10**10**10, or send a user's regular expression into the woods. No thread can be
stopped and math-verify's own timeouts need the main thread, so scoring happens where it can be ended.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import offbeat_liveness as liveness
from offbeat_data._prompts import Prompt
from offbeat_data._rewards import NotANumberError, RewardConfig, RewardError, RewardScore
from offbeat_data._rows import to_plain
from offbeat_types import BackendError, ConfigError, DataError, DeadlineError, OffbeatError

SCORER: Final = "scorer"
"""Name of a scoring process for the liveness monitor: it is watched where the process that asks it is."""

# A child whose socket is closed leaves by itself unless it is busy. One that died may still be writing its traceback.
_LEAVE_DEADLINE_S, _DIE_DEADLINE_S = 0.2, 5.0


_ERRORS: dict[str, type[OffbeatError]] = {
    error.__name__: error for error in (RewardError, NotANumberError, DataError, ConfigError, BackendError)
}


class GuardedReward:
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
        self._child = _ScoringChild(config, start_timeout_s)
        self._child.wait_ready()

    def score(self, prompt: Prompt, completion: str) -> RewardScore:
        """Score one completion; one that takes too long is worth 0 and has the part `timed_out` 1.

        A child that dies is replaced and asked once more: it may have been killed from outside.

        Raises:
            RewardError: a user's function raised or returned no finite number (with the traceback as a note), the child
                died twice over it, or this is closed.
            DataError: the prompt lacks what a reward compares with.
        """
        request = {"prompt": _prompt_to_plain(prompt), "completion": completion}
        with self._lock:
            if self._is_closed:
                raise RewardError("scoring has ended: this reward is closed")
            try:
                reply = self._ask(request) or self._ask(request, f" on prompt {prompt.index}")
            except TimeoutError:
                self._restart()
                return RewardScore(value=0.0, parts={**_no_parts(self._config), "timed_out": 1.0})
        assert reply is not None
        return RewardScore(value=reply["value"], parts={**reply["parts"], "timed_out": 0.0})

    def _ask(self, request: dict[str, Any], gives_up: str = "") -> dict[str, Any] | None:
        """The child's reply; None when it died, unless `gives_up` says over what it is the last attempt."""
        self._wait_ready()
        try:
            return self._child.ask(request, self._config.timeout_s)
        except TimeoutError:
            raise
        except OSError as error:
            code = self._restart(_DIE_DEADLINE_S)
            if not gives_up and not self._is_closed:
                return None
            raise RewardError(f"the process that scores ended with code {code}{gives_up}; see its log above") from error

    def close(self) -> None:
        """End the child. A completion that is being scored raises in its thread: nobody waits for a slow verifier."""
        self._is_closed = True
        self._child.kill()
        with self._lock:
            self._child.end()

    def __enter__(self) -> "GuardedReward":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_ready(self) -> None:
        try:
            self._child.wait_ready()
        except OffbeatError:
            self._restart()
            raise

    def _restart(self, leave_deadline_s: float = _LEAVE_DEADLINE_S) -> int:
        """Replace the child, unless this is closed; the new one starts while the caller goes on."""
        code = self._child.end(leave_deadline_s)
        if not self._is_closed:
            self._child = _ScoringChild(self._config, self._start_timeout_s)
        return code


class _ScoringChild:
    """`python -m offbeat_data._scoring_child`, and a socket on which JSON lines go to and fro."""

    def __init__(self, config: RewardConfig, start_timeout_s: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "offbeat_data._scoring_child", str(theirs.fileno())]
            monitor = liveness.current_monitor()
            # A session of its own: Ctrl-C in the terminal is for the one who started it, and what a reward leaves
            # behind is ended with it.
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | (monitor.invite(policy="report") if monitor else {}),
            )
        self._socket, self._lines, self._is_ready = ours, ours.makefile("rb"), False
        self._start_timeout_s = start_timeout_s
        self._send({"config": asdict(config), "path": sys.path}, start_timeout_s)

    def wait_ready(self) -> None:
        """Wait until the child has built its reward; at once when it has."""
        if self._is_ready:
            return
        try:
            self._receive()
        except TimeoutError as error:
            self.end()
            advice = "see its log above, or raise start_timeout_s"
            raise DeadlineError("reward.start", "the process that scores", self._start_timeout_s, advice) from error
        except OSError as error:
            code = self.end(_DIE_DEADLINE_S)
            raise RewardError(
                f"the process that scores ended with code {code} before it was ready; see its log above"
            ) from error
        except BaseException:
            self.end()
            raise
        self._is_ready = True

    def ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Send one request and wait for its reply. TimeoutError and other OSErrors leave the child unusable."""
        with liveness.waiting("reward.score", on=SCORER, deadline_s=deadline_s):
            self._send(request, deadline_s)
            return self._receive()

    def _send(self, request: dict[str, Any], deadline_s: float) -> None:
        self._socket.settimeout(deadline_s)
        self._socket.sendall(json.dumps(request).encode() + b"\n")

    def _receive(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise ConnectionResetError("the child closed its socket")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            error = _ERRORS.get(reply["error"], RewardError)(reply["text"])
            error.add_note(reply["trace"])
            raise error
        return reply

    def kill(self) -> None:
        """End the child now, from any thread; whoever waits for its reply sees a closed socket."""
        self._process.kill()

    def end(self, leave_deadline_s: float = _LEAVE_DEADLINE_S) -> int:
        """Kill the child if it still runs after so long, and what it has started.

        Returns:
            Its exit code, which shows how one died.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            code = self._process.wait(timeout=leave_deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # there is nobody left of its group
            os.killpg(self._process.pid, signal.SIGKILL)
        self._lines.close()
        self._socket.close()
        return code


def _no_parts(config: RewardConfig) -> dict[str, float]:
    return dict.fromkeys(config.all_weights, 0.0)


def _prompt_to_plain(prompt: Prompt) -> dict[str, Any]:
    """All but the pictures: a reward reads what the model wrote of them."""
    plain = {**vars(prompt), "ids": prompt.ids.tolist(), "fields": to_plain(prompt.fields)}
    del plain["pictures"]
    return plain


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
                score = RewardScore(value=0.0, parts={**_no_parts(self._config), "failed": 1.0})
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


_MADE_UP = "a completion made up to try the reward: 42"


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
        BackendError, DeadlineError: as `GuardedReward`.
    """
    if not any(":" in name for name in config.all_weights):
        return ""
    try:
        with GuardedReward(config, start_timeout_s=start_timeout_s) as guarded:
            score = guarded.score(prompt, _MADE_UP)
    except (RewardError, DataError) as error:
        if isinstance(error, NotANumberError) or config.on_error == "fail":
            raise ConfigError(f"reward: tried once on {_MADE_UP!r}, before anything starts: {error}") from error
        return f"could not score {_MADE_UP!r}: {error}; as reward.on_error = {config.on_error} it is no error yet"
    late = f", after more than reward.timeout_s = {config.timeout_s:g}" if score.parts["timed_out"] else ""
    return f"tried once on {_MADE_UP!r}: {score.value:g}{late}"
