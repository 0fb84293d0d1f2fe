"""The scorer role: scores completions, one at a time, in a process that is ended when one takes too long."""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from offbeat_data import NotANumberError, Prompt, RewardConfig, RewardError, RewardScore, build_reward
from offbeat_types import BackendError, ConfigError, DataError, OffbeatError

_ERRORS: Final[dict[str, type[OffbeatError]]] = {
    error.__name__: error for error in (RewardError, NotANumberError, DataError, ConfigError, BackendError)
}

Judged = RewardScore | OffbeatError
"""What comes of a completion: its score, or why there is none."""

AT_A_TIME_S: Final = 0.1
"""Completions of a prompt that take so long together are scored by one call: those of a quick reward all are."""


@dataclass(frozen=True, kw_only=True)
class ScorerAnswer:
    """A score; or the error that there is none for, with its traceback, which the driver keeps.

    An error that a role raises comes without one, and is printed each time.
    """

    score: RewardScore | None = None
    error: str = ""
    text: str = ""
    trace: str = ""

    def judged(self) -> Judged:
        """The score, which came in time, or the error, with its traceback as a note."""
        if self.score is not None:
            return RewardScore(value=self.score.value, parts={**self.score.parts, "timed_out": 0.0})
        error = _ERRORS.get(self.error, RewardError)(self.text)
        error.add_note(self.trace)
        return error


def prompt_to_json(prompt: Prompt) -> str:
    """All but the pictures: a reward reads what the model wrote of them. Rows hold integers of any size."""
    plain = {**vars(prompt), "ids": prompt.ids.tolist()}
    del plain["pictures"]
    return json.dumps(plain)


class ScorerRole:
    """Builds the reward and scores with it, in the main thread, where a user's function may use signals."""

    def __init__(self, *, config: RewardConfig) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the terminal's does not get here
        with _ending_process():
            self._reward = build_reward(config)

    def score(self, prompt: str, completions: list[str]) -> list[ScorerAnswer]:
        """Score the first of these completions, and others in `AT_A_TIME_S`; the prompt is one of `prompt_to_json`."""
        fields = json.loads(prompt)
        fields["ids"] = np.array(fields["ids"], dtype=np.int32)
        asked, answers, end_s = Prompt(**fields), list[ScorerAnswer](), time.monotonic() + AT_A_TIME_S
        for completion in completions:
            answers.append(self._score(asked, completion))
            if time.monotonic() > end_s:
                break
        return answers

    def _score(self, prompt: Prompt, completion: str) -> ScorerAnswer:
        try:
            with _ending_process():
                return ScorerAnswer(score=self._reward.score(prompt, completion))
        except OffbeatError as error:
            trace = "".join(traceback.format_exception(error))
            return ScorerAnswer(error=type(error).__name__, text=_as_unicode(str(error)), trace=_as_unicode(trace))


@contextlib.contextmanager
def _ending_process() -> Iterator[None]:
    """End the process by whatever error is not offbeat's own, such as SystemExit, as it would end a program."""
    try:
        yield
    except OffbeatError:
        raise
    except BaseException as error:  # noqa: BLE001  as the docstring says
        code = 1
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else code
        else:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)


def _as_unicode(text: str) -> str:
    """Halves of surrogate pairs, which a user's exception may hold, as escapes: no wire takes them."""
    return text.encode(errors="backslashreplace").decode()
