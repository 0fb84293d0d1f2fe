"""What a model acts in: an environment answers its turns, and says in the end what they were worth."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from offbeat_data._chat_template import Message
from offbeat_data._prompts import Prompt
from offbeat_data._reward import RewardScore
from offbeat_types import ConfigError, OffbeatError, setting


class Environment(Protocol):
    """One episode, from a prompt to a reward. Its methods are awaited one at a time: reset, step …, reward, close.

    One that raises, or does not return in time, ends its own episode. `close` is called in every case.
    """

    async def reset(self, prompt: Prompt) -> None:
        """Get ready: the model is about to read this prompt."""

    async def step(self, text: str) -> Sequence[Message] | None:
        """Take what the model said in its turn; also in its last one, which was cut off or had no more turns after it.

        Args:
            text: without control tokens.

        Returns:
            What it is told, as chat messages such as {"role": "tool", "content": "42"}; None when the episode is over.
        """

    async def reward(self) -> RewardScore | None:
        """What the episode was worth; None leaves its last turn to the `reward` section."""

    async def close(self) -> None:
        """Free what the episode holds."""


EnvironmentFactory = Callable[[], Environment]
"""Makes the environment of one episode."""


class EnvironmentFailedError(OffbeatError):
    """An environment broke: its episode has no reward and is not trained on.

    Args:
        reason: to be counted: `raised`, `timed_out`, `not_finite` (its reward), or `lost` with the process it ran in.
        detail: what went wrong.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"the environment of an episode failed ({self.reason}): {self.detail}"


JUDGES: Final = {"calculator": False, "reasoning_gym": True, "verifiers": True}
"""Built-in environments, and whether they have a reward of their own."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Section `environment`: what answers the model's turns. Without a name, a completion is scored as it stands."""

    name: str = setting(
        "", "calculator, reasoning_gym, verifiers, or a Python class or function as module:name; empty for none."
    )
    options: dict[str, Any] = setting({}, "Keyword arguments of the environment.")
    max_turns: int = setting(8, "Turns of the model in one episode at most.", "turns", ge=1)
    max_tokens: int = setting(
        1024,
        "Tokens after the prompt at most, said by the model (rollout.max_tokens a turn) and told to it.",
        "tokens",
        ge=1,
    )
    step_timeout_s: float = setting(
        30.0, "Time for one answer of the environment; after it the episode ends and is counted.", "s", gt=0
    )

    def check(self, *, has_reward: bool) -> None:
        """Find what is wrong with these settings before anything starts.

        Args:
            has_reward: the `reward` section names a reward.

        Raises:
            ConfigError: no such environment, a setting without effect, or a reward that is missing.
        """
        if not self.name:
            if self != EnvironmentConfig():
                raise ConfigError("environment: its settings have no effect without environment.name")
            return
        if self.name not in JUDGES and ":" not in self.name:
            near = difflib.get_close_matches(self.name, JUDGES, n=2, cutoff=0.4)
            advice = f"perhaps {' or '.join(near)}; " if near else ""
            raise ConfigError(
                f"environment: no environment {self.name!r}; {advice}there are {', '.join(JUDGES)} and module:name"
            )
        judges = JUDGES.get(self.name)
        if judges is True and has_reward:
            raise ConfigError(f"reward: no effect with environment.name = {self.name!r}, which judges by itself")
        if judges is False and not has_reward:
            raise ConfigError(
                f"reward: environment.name = {self.name!r} leaves the last turn to this section: "
                'give a name, such as "number_match"'
            )
