"""The child process of `GuardedReward`: reads requests as JSON lines from a socket and answers them in order."""

import faulthandler
import json
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np

import offbeat_liveness as liveness
from offbeat_data._prompts import Prompt
from offbeat_data._reward_pool import SCORER
from offbeat_data._rewards import RewardConfig, build_reward
from offbeat_types import OffbeatError


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


def _score(reward: Any, request: dict[str, Any]) -> dict[str, Any]:
    fields = request["prompt"]
    prompt = Prompt(**{**fields, "ids": np.array(fields["ids"], dtype=np.int32)})
    try:
        return dict(vars(reward.score(prompt, request["completion"])))
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


if __name__ == "__main__":
    main()
