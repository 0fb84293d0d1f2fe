"""A reward with a deadline: a child process scores, and is ended when it takes too long.

A completion may ask a verifier for 10**10**10, or send a user's regular expression into the woods. No thread can be
stopped and math-verify's own timeouts need the main thread, so scoring happens where it can be ended.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import Any

from offbeat_data._liveness import declare_scoring, scorer_environment
from offbeat_data._plain import to_plain
from offbeat_data._prompts import Prompt
from offbeat_data._reward import NotANumberError, RewardError, RewardScore
from offbeat_data._reward_config import RewardConfig
from offbeat_types import BackendError, ConfigError, DataError, DeadlineError, OffbeatError

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
                reply = self._ask(request) or self._ask(request, last_of=prompt)
            except TimeoutError:
                self._restart()
                parts = dict.fromkeys(self._config.all_weights, 0.0)
                return RewardScore(value=0.0, parts={**parts, "timed_out": 1.0})
        assert reply is not None
        return RewardScore(value=reply["value"], parts={**reply["parts"], "timed_out": 0.0})

    def _ask(self, request: dict[str, Any], last_of: Prompt | None = None) -> dict[str, Any] | None:
        """The child's reply; None when it died, unless that is the last attempt for a prompt."""
        self._wait_ready()
        try:
            return self._child.ask(request, self._config.timeout_s)
        except TimeoutError:
            raise
        except OSError as error:
            code = self._restart(_DIE_DEADLINE_S)
            if last_of is None and not self._is_closed:
                return None
            where = f" on prompt {last_of.index}" if last_of else ""
            raise RewardError(f"the process that scores ended with code {code}{where}; see its log above") from error

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
            # A session of its own: Ctrl-C in the terminal is for the one who started it, and what a reward leaves
            # behind is ended with it.
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=scorer_environment(),
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
        with declare_scoring(deadline_s):
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


def _prompt_to_plain(prompt: Prompt) -> dict[str, Any]:
    """All but the pictures: a reward reads what the model wrote of them."""
    plain = {**vars(prompt), "ids": prompt.ids.tolist(), "fields": to_plain(prompt.fields)}
    del plain["pictures"]
    return plain
