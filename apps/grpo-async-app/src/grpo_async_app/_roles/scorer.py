"""The scorer role: a process that is ended when a completion takes too long; many wait in one for judges to answer."""

import asyncio
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from offbeat_core import BackendError, ConfigError, DataError, OffbeatError, drop_secrets
from offbeat_data import (
    CompletionText,
    FaultyFunctionError,
    NotANumberError,
    Prompt,
    RewardConfig,
    RewardError,
    RewardScore,
    build_reward,
)

_ERRORS: Final[dict[str, type[OffbeatError]]] = {
    error.__name__: error
    for error in (RewardError, FaultyFunctionError, NotANumberError, DataError, ConfigError, BackendError)
}

Judged = RewardScore | OffbeatError
"""Result of a completion: its score, or why there is none."""

AT_A_TIME_S: Final = 0.1
"""Completions of a prompt that take so long together are scored by one call: those of a quick reward all are."""


@dataclass(frozen=True, kw_only=True)
class ScorerTraits:
    """Ways in which the rewards of a run may be asked, by their names.

    Args:
        waiting: they hold no thread while they wait; many completions are under way at once.
        blocking: the others, one completion at a time in each process.
        grouping: of both, those that get all completions of a prompt in one call.
        comparing: of those, the ones that may not be asked about some of them alone.
    """

    waiting: list[str]
    blocking: list[str]
    grouping: list[str]
    comparing: list[str]


@dataclass(frozen=True, kw_only=True)
class ScorerAsk:
    """Completions of one prompt, as they travel to a scorer.

    Args:
        prompt: one of `Prompt.to_json`.
        texts: the completions.
        ids: their token ids; empty where no reward asks for them.
        names: of the rewards that shall score them.
    """

    prompt: str
    texts: list[str]
    ids: list[list[int]]
    names: list[str]

    @property
    def written(self) -> list[CompletionText]:
        ids = self.ids or [[]] * len(self.texts)
        return [CompletionText(text=text, ids=each) for text, each in zip(self.texts, ids, strict=True)]


@dataclass(frozen=True, kw_only=True)
class ScorerAnswer:
    """A score; or the error that there is none for, with its traceback, which the driver keeps.

    An error that a role raises comes without one, and is printed each time.
    """

    score: RewardScore | None = None
    error: str = ""
    text: str = ""
    trace: str = ""
    timed_out: bool = False

    def judged(self) -> Judged:
        """Return the score, or the error, with its traceback as a note."""
        if self.score is not None:
            return RewardScore(
                value=self.score.value,
                parts={**self.score.parts, "timed_out": float(self.timed_out)},
                costs=self.score.costs,
            )
        error = _ERRORS.get(self.error, RewardError)(self.text)
        error.add_note(self.trace)
        return error


class ScorerRole:
    """Builds the reward and scores with it, in the main thread, where a user's function may use signals."""

    def __init__(self, *, config: RewardConfig) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the terminal's does not get here
        self._timeout_s = config.timeout_s
        judges_key = str(config.judge.get("key_env", ""))
        drop_secrets([*config.forward_env, judges_key])
        with _ending_process():
            self._reward = build_reward(config)
        drop_secrets(config.forward_env)  # the judge has read its key

    def traits(self) -> ScorerTraits:
        reward = self._reward
        blocking = [name for name in reward.names if name not in reward.waiting]
        return ScorerTraits(
            waiting=list(reward.waiting),
            blocking=blocking,
            grouping=list(reward.grouping),
            comparing=list(reward.comparing),
        )

    def score(self, ask: ScorerAsk) -> list[ScorerAnswer]:
        """Score the first of these completions, and others in `AT_A_TIME_S`."""
        prompt, answers, end_s = Prompt.from_json(ask.prompt), list[ScorerAnswer](), time.monotonic() + AT_A_TIME_S
        for one in ask.written:
            answers += self._score(prompt, [one], ask.names)
            if time.monotonic() > end_s:
                break
        return answers

    def score_together(self, ask: ScorerAsk) -> list[ScorerAnswer]:
        """Score all by rewards that take a whole group."""
        return self._score(Prompt.from_json(ask.prompt), ask.written, ask.names)

    async def wait(self, ask: ScorerAsk) -> list[ScorerAnswer]:
        """Score by rewards that wait, all in one call; other calls continue meanwhile."""
        written = ask.written
        try:
            with _ending_process():
                prompt = Prompt.from_json(ask.prompt)
                scores = await self._reward.await_group(prompt, written, ask.names, self._timeout_s)
        except TimeoutError:
            late = ScorerAnswer(score=RewardScore(value=0.0, parts=dict.fromkeys(ask.names, 0.0)), timed_out=True)
            return [late] * len(written)
        except OffbeatError as error:
            return [_failed(error)] * len(written)
        return [ScorerAnswer(score=score) for score in scores]

    async def beat(self) -> None:
        """Answer, which shows that nothing blocks the thread in which coroutine functions wait."""

    def _score(self, prompt: Prompt, written: Sequence[CompletionText], names: Sequence[str]) -> list[ScorerAnswer]:
        try:
            with _ending_process():
                return [ScorerAnswer(score=score) for score in self._reward.score_group(prompt, written, names)]
        except OffbeatError as error:
            return [_failed(error)] * len(written)


def _failed(error: OffbeatError) -> ScorerAnswer:
    trace = "".join(traceback.format_exception(error))
    return ScorerAnswer(error=type(error).__name__, text=_as_unicode(str(error)), trace=_as_unicode(trace))


@contextlib.contextmanager
def _ending_process() -> Iterator[None]:
    """End the process by whatever error is not offbeat's own, such as SystemExit, as it would end a program."""
    try:
        yield
    except (OffbeatError, TimeoutError, asyncio.CancelledError):
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
