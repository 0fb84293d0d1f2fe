"""Environments of OpenEnv, the standard of Meta and Hugging Face: one runs in a server, which is started by others.

Source: https://github.com/huggingface/OpenEnv (0.10.0), see `openenv_server.py`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat_core import ConfigError, DataError
from offbeat_data._chat.template import Message
from offbeat_data._datasets.prompts import Prompt
from offbeat_data._images import image_part
from offbeat_data._scoring.answers import last_in_tag
from offbeat_data._scoring.rewards import RewardScore
from offbeat_data._sources.openenv_server import (
    OPENENV,
    OpenEnvServer,
    OpenEnvSession,
    ServerRefusedError,
    StepResult,
)


class OpenEnvEnvironment:
    """One episode in a session of its own on an OpenEnv server, which gives the reward.

    OpenEnv's reward is that of the last action, as Gymnasium's is, so an episode's reward is the sum over its steps.
    Environments whose every step says how the episode stands so far want reward = "last".

    An action that cannot be read, or that the server finds of another form than its own, is the model's to mend: it is
    sent the error, and the server's episode stays where it was.

    Args:
        url: of the server, such as http://127.0.0.1:8000.
        action_field: field of the action that takes the model's words; empty: the words are the action, a JSON object.
        action: further fields, the same in every action.
        tag: the words are those in the last <tag> of a turn; empty: the whole turn.
        observation_field: the part of an observation that the model is sent, such as `message`, or `metadata.hint` for
            a part of a field; empty: all of it as JSON.
        image_field: field of an observation with an image that the model is shown after that: a file in base64, alone
            or in an address data:image/...;base64,...; nothing is shown where it is null or empty.
        role: of these messages.
        reward: "sum" or "last".
        token_env: environment variable with the token that the server asks for.

    Raises:
        ConfigError: no such reward, or url is no address.
    """

    def __init__(
        self,
        url: str,
        *,
        action_field: str = "",
        action: Mapping[str, Any] | None = None,
        tag: str = "",
        observation_field: str = "",
        image_field: str = "",
        role: str = "user",
        reward: str = "sum",
        token_env: str = "",
    ) -> None:
        if reward not in ("sum", "last"):
            raise ConfigError(f'environment.options: reward must be "sum" or "last", got {reward!r}')
        if image_field and not observation_field:
            raise ConfigError("environment.options: image_field needs observation_field, the words beside the image")
        self._server = OpenEnvServer(url=url, token_env=token_env)
        self._action_field, self._action, self._tag = action_field, dict(action or {}), tag
        self._observation_field, self._image_field = observation_field, image_field
        self._role, self._is_sum = role, reward == "sum"
        self._session = OpenEnvSession(self._server)
        self._rewards: list[float] = []
        self._num_refused = 0

    def check_server(self) -> None:
        """Find out before a run whether the server is there and its actions have the field. Blocks.

        Raises:
            DataError: it is not.
            ConfigError: they have others.
        """
        fields = self._server.describe()["action"].get("properties", {})
        if self._action_field and self._action_field not in fields:
            raise ConfigError(
                f"environment.options: action_field = {self._action_field!r} is no field of the actions of "
                f"{self._server.url}, which has {', '.join(fields) or 'none'}"
            )

    async def reset(self, prompt: Prompt) -> None:
        kept = prompt.fields.get(OPENENV)
        kept = {} if kept is None else kept
        if not isinstance(kept, Mapping) or not isinstance(kept.get("reset", {}), Mapping):
            raise DataError(f"the column {OPENENV} holds an object of reset, the arguments of it; got {kept!r:.80}")
        began = await self._session.begin(kept.get("reset", {}))
        if "begins" in kept and (first := began.text_of(kept["observation_field"])) != kept["begins"]:
            raise DataError(
                f"the server begins with {first!r:.80}, and the prompt that was drawn of it is {kept['begins']!r:.80}: "
                f"the same arguments {kept['reset']} must give the same task"
            )

    async def step(self, text: str) -> Sequence[Message] | None:
        try:
            result = await self._session.ask("step", self._read_action(text))
        except _UnreadableActionError as error:
            return self._refuse(str(error))
        except ServerRefusedError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return self._refuse(error.detail)
        if result.reward is not None:
            self._rewards.append(result.reward)
        return None if result.done else self._notify(result)

    async def reward(self) -> RewardScore | None:
        rewards = self._rewards if self._is_sum else self._rewards[-1:]
        value = sum(rewards, start=0.0)
        counts = {"rewarded_steps": float(len(self._rewards)), "refused_actions": float(self._num_refused)}
        return RewardScore(value=value, parts={"openenv": value, **counts})

    async def close(self) -> None:
        await self._session.close()

    def _read_action(self, text: str) -> dict[str, Any]:
        words = last_in_tag(text, self._tag) if self._tag else text.strip()
        if words is None:
            raise _UnreadableActionError(f"an action must stand in <{self._tag}>...</{self._tag}>")
        if self._action_field:
            return {**self._action, self._action_field: words}
        try:
            found = json.loads(words)
        except (ValueError, RecursionError) as error:
            raise _UnreadableActionError(f"an action must be a JSON object: {error}") from error
        if not isinstance(found, dict):
            raise _UnreadableActionError("an action must be a JSON object")
        return {**self._action, **found}

    def _notify(self, result: StepResult) -> list[Message]:
        words = result.text_of(self._observation_field)
        image = result.text_of(self._image_field) if self._image_field else ""
        if not image:
            return [{"role": self._role, "content": words}]
        kind, _, data = image.removeprefix("data:").rpartition(";base64,")
        parts = [{"type": "text", "text": words}, image_part(kind or "image/png", data)]
        return [{"role": self._role, "content": parts}]

    def _refuse(self, complaint: str) -> list[Message]:
        self._num_refused += 1
        return [{"role": self._role, "content": f"error: {complaint}"}]


class _UnreadableActionError(DataError):
    """The model's words are no action."""
