"""Section `environment`: which environment answers the model's turns, and those that come with offbeat.

A verifiers environment drives its own loop and calls a client for each turn of the model. Here that client waits: it
hands the messages out, and continues when `step` brings what the model said. So everything the environment does around
its turns (set-up, stop conditions, tools, clean-up) is done by its own code.

Source: https://github.com/PrimeIntellect-ai/verifiers, verifiers/legacy: envs/multiturn_env.py (`rollout`),
clients/client.py (`Client`), rubrics/rubric.py (`score_rollout`).
"""

import asyncio
import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import count
from typing import Any, Final

from offbeat_core import ConfigError, DataError, as_written, find_function, setting
from offbeat_data._chat.template import Message
from offbeat_data._datasets.prompts import Prompt
from offbeat_data._environments.environment import Environment, EnvironmentFactory, interruptible
from offbeat_data._environments.mcp import McpEnvironment, describe_tools, import_mcp
from offbeat_data._environments.openenv import OpenEnvEnvironment
from offbeat_data._environments.tools import calculator, read_tool_calls, without_tool_calls
from offbeat_data._scoring.answers import last_in_tag
from offbeat_data._scoring.rewards import RewardScore
from offbeat_data._sources.openenv_server import import_websockets
from offbeat_data._sources.rows import to_plain, unpack
from offbeat_data._sources.task_libraries import (
    VERIFIERS,
    import_reasoning_gym,
    import_verifiers,
    load_environment,
    score_entry,
)

JUDGES: Final = {"calculator": False, "mcp": False, "openenv": True, "reasoning_gym": True, "verifiers": True}
"""Built-in environments, and whether they have a reward of their own."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Section `environment`: what answers the model's turns. Without a name, a completion is scored as it stands."""

    name: str = setting(
        "",
        "calculator, mcp, openenv, reasoning_gym, verifiers, or a Python class or function as module:name; empty for "
        "none.",
        path="function",
    )
    options: dict[str, Any] = setting({}, "Keyword arguments of the environment.", path={"command": "command"})
    max_turns: int = setting(8, "Turns of the model in one episode at most.", "turns", ge=1)
    max_tokens: int = setting(
        1024,
        "Tokens after the prompt at most: the model's (rollout.max_tokens a turn) and the environment's.",
        "tokens",
        ge=1,
    )
    step_timeout_s: float = setting(
        30.0, "Time for one answer of the environment; after it the episode ends and is counted.", "s", gt=0
    )
    forward_env: list[str] = setting(
        [],
        "Environment variables that it gets although they are named like secrets (key, token, secret, password).",
    )
    max_error_share: float = setting(
        0.5,
        "The run ends when more than this share of the last 200 episodes were lost to a fault of the environment.",
        "share of 200 episodes",
        ge=0,
        le=1,
    )

    @property
    def judges(self) -> bool:
        """Return whether it scores an episode itself; one of the user's own may, too."""
        return JUDGES.get(self.name) is True

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


def build_environment(config: EnvironmentConfig) -> EnvironmentFactory:
    """Find the environment of a configuration, and import what it needs now rather than in its first episode.

    Raises:
        ConfigError: no such module or name, or options that it does not take.
        BackendError: a package that it needs is not installed.
    """
    make = _find_built_in(config.name) if config.name in JUDGES else find_function("environment", config.name)

    def build() -> Environment:
        environment: Environment = make(**config.options)
        return environment

    try:
        build()
    except TypeError as error:
        name = as_written(config.name)
        raise ConfigError(f"environment.options: {name} refuses {config.options}: {error}") from error
    return build


def environment_tools(config: EnvironmentConfig) -> list[dict[str, Any]]:
    """Tools that are described to the model in its prompts, as chat templates know them: those of an MCP server.

    An OpenEnv server, which is not started here, is asked whether it is there.

    Raises:
        DataError: the server cannot be started, or is not there.
        ConfigError: its actions have no field of the name that the options give.
    """
    if config.name == "openenv":
        OpenEnvEnvironment(**config.options).check_server()
    if config.name != "mcp":
        return []
    return describe_tools(config.options["command"], config.options.get("variables"))


def _find_built_in(name: str) -> Callable[..., Any]:
    """Return what makes it; the libraries of tasks, which take seconds to import, are imported here."""
    if name == "calculator":
        return calculator
    if name == "mcp":
        import_mcp()
        return McpEnvironment
    if name == "openenv":
        import_websockets()
        return OpenEnvEnvironment
    if name == "reasoning_gym":
        import_reasoning_gym()
        return ReasoningGymEnvironment
    import_verifiers()
    return VerifiersEnvironment


_RIGHT: Final = 1.0
TRY_AGAIN: Final = "That is not right. Try again."


class ReasoningGymEnvironment:
    """The model answers; after a wrong answer it gets a message, and may try again, `attempts` times in all.

    The reward is the score of the last attempt, in [0, 1], with the parts that the reward `reasoning_gym` has. The
    answer is in the last <tag> of a turn, or without a tag the whole turn.
    """

    def __init__(self, attempts: int = 1, tag: str = "") -> None:
        if attempts < 1:
            raise ConfigError(f"environment.options: attempts must be at least 1, got {attempts}")
        self._attempts_left, self._tag = attempts, tag
        self._prompt: Prompt | None = None
        self._score: float | None = 0.0

    async def reset(self, prompt: Prompt) -> None:
        self._prompt = prompt

    async def step(self, text: str) -> Sequence[Message] | None:
        assert self._prompt is not None
        answer = last_in_tag(text, self._tag) if self._tag else text.strip()
        self._score = 0.0 if answer is None else score_entry(answer, self._prompt.fields)
        self._attempts_left -= 1
        if self._attempts_left < 1 or (self._score or 0.0) >= _RIGHT:
            return None
        return [{"role": "user", "content": TRY_AGAIN}]

    async def reward(self) -> RewardScore | None:
        value = self._score or 0.0
        return RewardScore(value=value, parts={"reasoning_gym": value, "unreadable": float(self._score is None)})

    async def close(self) -> None:
        pass


class VerifiersEnvironment:
    """One rollout of a verifiers environment, whose rubric gives the reward. The prompt names the environment."""

    def __init__(self) -> None:
        self._turns = _Turns()
        self._environment: Any = None
        self._rollout: asyncio.Task[Any] | None = None
        self._read: list[dict[str, Any]] = []

    async def reset(self, prompt: Prompt) -> None:
        kept = prompt.fields.get(VERIFIERS)
        if kept is None:
            raise DataError("the environment verifiers brings its own prompts: set data.path to verifiers:NAME")
        self._environment = load_environment(kept["environment"], kept["options"])
        row, client = unpack(kept["row"]), _client_type()(self._turns)
        self._rollout = asyncio.create_task(interruptible(self._environment.rollout(row, client, "policy", {})))
        self._read = await self._next_question() or []

    async def step(self, text: str) -> Sequence[Message] | None:
        self._turns.answers.put_nowait(text)
        messages = await self._next_question()
        if messages is None:
            return None
        num_read = len(self._read)
        if messages[:num_read] != self._read or len(messages) < num_read + 2:
            raise DataError("the environment does not continue the messages before: only growing ones are supported")
        self._read = messages
        return messages[num_read + 1 :]

    async def reward(self) -> RewardScore | None:
        await self.close()
        state, rubric = self._turns.state, self._environment.rubric
        await rubric.score_rollout(state)
        await rubric.cleanup(state)
        parts = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        return RewardScore(value=float(state["reward"]), parts=parts)

    async def close(self) -> None:
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.wait({self._rollout})

    async def _next_question(self) -> list[dict[str, Any]] | None:
        """Return the messages that the model is to continue; None when the rollout has ended."""
        assert self._rollout is not None
        question = asyncio.ensure_future(self._turns.questions.get())
        try:
            await asyncio.wait({question, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            if question.done():
                return [_plain_message(message) for message in question.result()]
        finally:
            question.cancel()
        self._turns.state = self._rollout.result()
        if error := self._turns.state.get("error"):
            raise error
        return None


class _Turns:
    """Questions of verifiers' loop to the model, and the answers of `step`."""

    def __init__(self) -> None:
        self.questions: asyncio.Queue[list[Any]] = asyncio.Queue()
        self.answers: asyncio.Queue[str] = asyncio.Queue()
        self.state: Any = None


def _plain_message(message: Any) -> dict[str, Any]:
    dumped = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
    plain: dict[str, Any] = to_plain(dumped)
    return plain


class _ClientMethods:
    """Methods of a client of verifiers: each turn is asked and answered by the queues of an episode."""

    def __init__(self, turns: _Turns) -> None:
        super().__init__(turns)  # type: ignore[call-arg]  # the base is added when verifiers is imported
        self._turns = turns
        self._types, self._numbers = import_module("verifiers.types"), count()

    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return messages, {}

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, *, state: Any = None, **others: Any
    ) -> str:
        self._turns.state = state
        self._turns.questions.put_nowait(prompt)
        return await self._turns.answers.get()

    async def raise_from_native_response(self, response: str) -> None:
        pass

    async def from_native_response(self, response: str) -> Any:
        calls = [
            self._types.ToolCall(id=f"call_{next(self._numbers)}", name=call.name, arguments=json.dumps(call.arguments))
            for call in read_tool_calls(response)
        ]
        message = self._types.ResponseMessage(
            role="assistant",
            content=without_tool_calls(response) if calls else response,
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return self._types.Response(id=f"turn_{next(self._numbers)}", created=0, model="policy", message=message)

    async def close(self) -> None:
        pass


@lru_cache(maxsize=1)
def _client_type() -> Any:
    """Return the class of clients that stand for the model; made late, for its base is in verifiers."""
    import_verifiers()
    return type("TurnsClient", (_ClientMethods, import_module("verifiers.clients").Client), {})
