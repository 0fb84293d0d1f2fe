"""Tasks of reasoning-gym as an environment: a problem, some attempts at it, and the task's own judge.

Source: https://github.com/open-thought/reasoning-gym (`score_answer(answer, entry)`).
"""

from collections.abc import Sequence
from typing import Final

from offbeat_data._answers import last_in_tag
from offbeat_data._chat_template import Message
from offbeat_data._prompts import Prompt
from offbeat_data._reasoning_gym import score_entry
from offbeat_data._reward import RewardScore
from offbeat_types import ConfigError

_RIGHT: Final = 1.0
TRY_AGAIN: Final = "That is not right. Try again."


class ReasoningGymEnvironment:
    """The model answers; after a wrong answer it is told so, and may try again.

    The reward is the score of the last attempt, in [0, 1], with the parts that the reward `reasoning_gym` has.

    Args:
        attempts: answers in one episode at most; 1 asks once.
        tag: the answer is in the last <tag> of a turn; empty for the whole turn.

    Raises:
        ConfigError: attempts is less than 1.
    """

    def __init__(self, attempts: int = 1, tag: str = "") -> None:
        if attempts < 1:
            raise ConfigError(f"environment.options: attempts must be at least 1, got {attempts}")
        self._attempts_left, self._tag = attempts, tag
        self._prompt: Prompt | None = None
        self._score: float | None = 0.0

    async def reset(self, prompt: Prompt) -> None:
        """See `Environment`. The prompt must be one of `data.path = "reasoning-gym:TASK"`."""
        self._prompt = prompt

    async def step(self, text: str) -> Sequence[Message] | None:
        """See `Environment`."""
        assert self._prompt is not None
        answer = last_in_tag(text, self._tag) if self._tag else text.strip()
        self._score = 0.0 if answer is None else score_entry(answer, self._prompt.fields)
        self._attempts_left -= 1
        if self._attempts_left < 1 or (self._score or 0.0) >= _RIGHT:
            return None
        return [{"role": "user", "content": TRY_AGAIN}]

    async def reward(self) -> RewardScore | None:
        """See `Environment`."""
        value = self._score or 0.0
        return RewardScore(value=value, parts={"reasoning_gym": value, "unreadable": float(self._score is None)})

    async def close(self) -> None:
        """See `Environment`."""
