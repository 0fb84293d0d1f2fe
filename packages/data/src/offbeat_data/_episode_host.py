"""Holds the environments of many episodes, and lets none of them take the others, or the process, with it."""

import logging
import math
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from offbeat_data._chat_template import Message
from offbeat_data._deadline import within
from offbeat_data._environment import Environment, EnvironmentFactory, EnvironmentFailedError
from offbeat_data._plain import to_plain
from offbeat_data._prompts import Prompt
from offbeat_data._reward import RewardScore

_log = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSE_TIMEOUT_S: Final = 5.0
_LONGEST_DETAIL: Final = 500


class EpisodeHost:
    """Environments by the number of their episode. Methods other than `close` raise EnvironmentFailedError only.

    Args:
        make: makes the environment of one episode.
        step_timeout_s: for each call of an environment.
    """

    def __init__(self, make: EnvironmentFactory, step_timeout_s: float) -> None:
        self._make, self._step_timeout_s = make, step_timeout_s
        self._episodes: dict[int, Environment] = {}

    async def reset(self, episode: int, prompt: Prompt) -> None:
        """Begin an episode.

        Raises:
            EnvironmentFailedError: its environment raised, or took too long; it is closed.
        """

        async def begin() -> None:
            environment = self._episodes[episode] = self._make()
            await environment.reset(prompt)

        await self._call(episode, begin())

    async def step(self, episode: int, text: str) -> list[dict[str, Any]] | None:
        """Give an episode what the model said, as `Environment.step`. Raises as `reset`."""

        async def answer() -> list[dict[str, Any]] | None:
            messages = await self._find(episode).step(text)
            return None if messages is None else [_plain(message) for message in messages]

        return await self._call(episode, answer())

    async def reward(self, episode: int) -> RewardScore | None:
        """What an episode was worth, as `Environment.reward`. Raises as `reset`."""

        async def judge() -> RewardScore | None:
            score = await self._find(episode).reward()
            if score is not None and not math.isfinite(score.value):
                raise EnvironmentFailedError("not_finite", f"a reward must be a finite number, got {score.value}")
            return score

        return await self._call(episode, judge())

    async def close(self, episode: int) -> None:
        """End an episode. Nothing is raised: it is over, and what it was worth is known."""
        environment = self._episodes.pop(episode, None)
        if environment is not None:
            try:
                await within(environment.close(), _CLOSE_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001  whatever it is, the episode is over
                _log.warning("the environment of episode %d did not close well: %r", episode, error)

    def _find(self, episode: int) -> Environment:
        environment = self._episodes.get(episode)
        if environment is None:
            raise EnvironmentFailedError("lost", f"there is no episode {episode}; it began in another process")
        return environment

    async def _call(self, episode: int, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await within(work, self._step_timeout_s)
        except Exception as error:
            await self.close(episode)
            raise _failure(error, self._step_timeout_s) from error


def _failure(error: Exception, step_timeout_s: float) -> EnvironmentFailedError:
    if isinstance(error, EnvironmentFailedError):
        return error
    if isinstance(error, TimeoutError):
        advice = f"no answer within environment.step_timeout_s = {step_timeout_s:g}"
        return EnvironmentFailedError("timed_out", str(error) or advice)
    return EnvironmentFailedError("raised", f"{type(error).__name__}: {error}"[:_LONGEST_DETAIL])


def _plain(message: Message) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise TypeError(f"an answer must be chat messages with role and content, got {message!r:.80}")
    plain: dict[str, Any] = to_plain(dict(message))
    return plain
