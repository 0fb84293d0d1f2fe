"""A process that scores, and the wire to it: both ends of a socket on which JSON lines go to and fro.

The first line configures and is answered when the reward is built, each other one is a completion to score.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

import numpy as np

import offbeat_liveness as liveness
from offbeat_data._prompts import Prompt
from offbeat_data._rewards import NotANumberError, Reward, RewardConfig, RewardError, RewardScore, build_reward
from offbeat_data._rows import to_plain
from offbeat_types import BackendError, ConfigError, DataError, DeadlineError, OffbeatError

SCORER: Final = "scorer"
"""Name of the process for the liveness monitor: it is watched where the process that asks it is."""
LEAVE_DEADLINE_S: Final = 0.2
"""A child whose socket is closed leaves by itself unless it is busy."""
DIE_DEADLINE_S: Final = 5.0
"""One that died may still be writing its traceback."""
_ERRORS: Final[dict[str, type[OffbeatError]]] = {
    error.__name__: error for error in (RewardError, NotANumberError, DataError, ConfigError, BackendError)
}


class ScoringChild:
    """The asking end: starts the process, asks, and ends it.

    Its methods raise OSError, of which TimeoutError is one, where the process is unusable after it.
    """

    def __init__(self, config: RewardConfig, start_timeout_s: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            code = "from offbeat_data._scoring_child import main; main()"
            monitor = liveness.current_monitor()
            # A session of its own: Ctrl-C in the terminal is for the one who started it, and what a reward leaves
            # behind is ended with it.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno())],
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
            code = self.end(DIE_DEADLINE_S)
            raise RewardError(
                f"the process that scores ended with code {code} before it was ready; see its log above"
            ) from error
        except BaseException:
            self.end()
            raise
        self._is_ready = True

    def ask(self, prompt: Prompt, completion: str, deadline_s: float) -> RewardScore:
        request = {"prompt": _prompt_to_plain(prompt), "completion": completion}
        with liveness.waiting("reward.score", on=SCORER, deadline_s=deadline_s):
            self._send(request, deadline_s)
            return RewardScore(**self._receive())

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

    def end(self, leave_deadline_s: float = LEAVE_DEADLINE_S) -> int:
        """Kill the child if it still runs after so long, and what it has started; returns its exit code."""
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


def serve(requests: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Answer the first request, which configures, and then every completion to score.

    An error that offbeat raises on purpose is an answer; any other ends the process, with its traceback in the log.
    """
    try:
        start = json.loads(next(requests))
        sys.path += [folder for folder in start["path"] if folder not in sys.path]
        reward = build_reward(RewardConfig(**start["config"]))
        yield {}
        # Whoever asks kills this process after its deadline; should it be gone, a busy child ends itself.
        give_up_s = 2 * float(start["config"]["timeout_s"]) + 5
        for line in requests:
            faulthandler.dump_traceback_later(give_up_s, exit=True)
            reply = _score(reward, json.loads(line))
            faulthandler.cancel_dump_traceback_later()
            yield reply
    except OffbeatError as error:
        yield _as_reply(error)


def _score(reward: Reward, request: dict[str, Any]) -> dict[str, Any]:
    fields = request["prompt"]
    prompt = Prompt(**{**fields, "ids": np.array(fields["ids"], dtype=np.int32)})
    try:
        return asdict(reward.score(prompt, request["completion"]))
    except OffbeatError as error:
        return _as_reply(error)


def _as_reply(error: OffbeatError) -> dict[str, Any]:
    trace = "".join(traceback.format_exception(error))
    return {"error": type(error).__name__, "text": str(error), "trace": trace}


def main() -> None:
    """Serve the socket whose number is the first argument until the other side closes it."""
    liveness.watch_if_invited(SCORER)
    with socket.socket(fileno=int(sys.argv[1])) as channel, channel.makefile("rb") as requests:
        # What a reward forks must not hold it open: its end tells whoever asks that this process has ended.
        channel.set_inheritable(False)
        os.register_at_fork(after_in_child=lambda: os.close(channel.detach()))
        for reply in serve(iter(requests)):
            channel.sendall(json.dumps(reply).encode() + b"\n")
