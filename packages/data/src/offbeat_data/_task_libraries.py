"""Tasks of reasoning-gym and environments of verifiers: their rows, judges, and episodes.

A verifiers environment drives its own loop and calls a client for each turn of the model. Here that client waits: it
hands the messages out, and goes on when `step` brings what the model said. So everything the environment does around
its turns (set-up, stop conditions, tools, clean-up) is done by its own code.

Source: https://github.com/open-thought/reasoning-gym (`score_answer(answer, entry)`);
https://github.com/PrimeIntellect-ai/verifiers, verifiers/legacy: utils/env_utils.py (`load_environment`),
envs/environment.py (`get_dataset`, `tool_defs`, `requires_group_rollouts`), envs/multiturn_env.py (`rollout`),
clients/client.py (`Client`), rubrics/rubric.py (`score_rollout`).
"""

import asyncio
import difflib
import json
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from itertools import count
from typing import Any, Final

from offbeat_data._environments import interruptible
from offbeat_data._prompts import Prompt
from offbeat_data._rewards import RewardScore, last_in_tag
from offbeat_data._rows import pack, to_plain, unpack
from offbeat_data._tokenizer import Message
from offbeat_data._tools import read_tool_calls, without_tool_calls
from offbeat_types import BackendError, ConfigError, DataError

REASONING_GYM = "reasoning_gym"
"""Field of a prompt that holds its task, the task's options and the entry; `score_entry` reads it."""


def draw_entries(task: str, *, num_items: int, seed: int, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Draw problems of a task as rows with the columns `prompt`, `answer` and `reasoning_gym`."""
    options_json = json.dumps(dict(options), sort_keys=True)
    dataset = _make_dataset(task, num_items, seed, options_json)
    return [_reasoning_gym_row(task, options_json, dataset[index]) for index in range(len(dataset))]


def _reasoning_gym_row(task: str, options_json: str, entry: dict[str, Any]) -> dict[str, Any]:
    kept = {"task": task, "options": options_json, "entry": pack(entry)}
    return {"prompt": entry["question"], "answer": entry["answer"], REASONING_GYM: kept}


def score_entry(answer: str, fields: Mapping[str, Any]) -> float | None:
    """The task's own score, in [0, 1], of an answer to the entry in a prompt's fields; None when it cannot read it."""
    kept = fields.get(REASONING_GYM)
    if kept is None:
        raise DataError("the reward reasoning_gym judges its own tasks: set data.path to reasoning-gym:TASK")
    dataset, entry = _make_dataset(kept["task"], 1, 0, kept["options"]), unpack(kept["entry"])
    try:
        return float(dataset.score_answer(answer=answer, entry=entry))
    except Exception:  # noqa: BLE001
        # Some judges take for granted that an answer has the right form: prime_factorization calls int() on whatever
        # the model wrote. What they raise says something about the answer and nothing about the run.
        return None


def import_reasoning_gym() -> tuple[Any, Mapping[str, Any]]:
    """The package, which takes seconds to import, and its tasks by name."""
    try:
        with warnings.catch_warnings():  # a dependency of it has `is "text"` in its code
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
    except ImportError as error:
        line = 'pip install "offbeat-data[reasoning-gym]"'
        raise BackendError(f"tasks of reasoning-gym need that package; install it with: {line}") from error
    return reasoning_gym, DATASETS


@lru_cache(maxsize=8)
def _make_dataset(task: str, size: int, seed: int, options_json: str) -> Any:
    reasoning_gym, tasks = import_reasoning_gym()
    if task not in tasks:
        near = ", ".join(difflib.get_close_matches(task, tasks)) or "chain_sum, basic_arithmetic, countdown"
        raise ConfigError(f"data.path: reasoning-gym has no task {task!r}; nearest: {near}")
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **json.loads(options_json))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"data.task_options: reasoning-gym:{task} refuses {options_json}: {error}") from error


_RIGHT: Final = 1.0
TRY_AGAIN: Final = "That is not right. Try again."


class ReasoningGymEnvironment:
    """The model answers; after a wrong answer it is told so, and may try again, `attempts` times in all.

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


VERIFIERS: Final = "verifiers"
"""Field of a prompt that holds its environment, the environment's arguments and the row; `reset` reads it."""


def draw_rows(name: str, *, split: str, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of an environment's data, "train" or "eval", with the columns `prompt`, `answer`, `tools`, `verifiers`."""
    if split not in ("train", "eval"):
        raise ConfigError(f"data.split: verifiers:{name} has the splits train and eval, got {split!r}")
    options_json = json.dumps(dict(options), sort_keys=True)
    environment = load_environment(name, options_json)
    dataset = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
    tools = [_tool_schema(tool) for tool in environment.tool_defs or []]
    return [_verifiers_row(name, options_json, row, tools) for row in dataset]


def _verifiers_row(name: str, options_json: str, row: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    kept = {"environment": name, "options": options_json, "row": pack(to_plain(row))}
    return {"prompt": row["prompt"], "answer": row.get("answer"), "tools": tools, VERIFIERS: kept}


def _tool_schema(tool: Any) -> dict[str, Any]:
    """A tool as chat templates expect it."""
    described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": described}


def import_verifiers() -> Any:
    """The package, which takes seconds to import."""
    line = 'pip install "verifiers>=0.3,<0.3.2"'
    try:
        with _own_signals():
            verifiers = import_module("verifiers")
    except ImportError as error:
        raise BackendError(f"environments of verifiers need that package ({error}); install it with: {line}") from error
    if not hasattr(verifiers, "load_environment"):  # after 0.3.1 there is only its v1, whose agents are programs
        raise BackendError(
            f"verifiers {verifiers.__version__} has no environments with turns any more, 0.3.1 had: {line}; "
            "agents of its v1 roll out through a server of the rollout engine"
        )
    return verifiers


@lru_cache(maxsize=8)
def load_environment(name: str, options_json: str) -> Any:
    """An environment, once per process."""
    verifiers = import_verifiers()
    try:
        with _own_signals():
            environment = verifiers.load_environment(name, **json.loads(options_json))
    except Exception as error:
        raise ConfigError(
            f"data.path: verifiers cannot load the environment {name!r} with {options_json}: {error}; is its package "
            f"installed, and are data.task_options what it takes?"
        ) from error
    if not hasattr(environment, "rollout") or getattr(environment, "requires_group_rollouts", False):
        raise ConfigError(
            f"data.path: the environment {name!r} scores groups of rollouts; one rollout each is supported"
        )
    return environment


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's handlers: an environment takes SIGINT and SIGTERM when it is made."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


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
            raise DataError("the environment does not go on from the messages before: only growing ones are supported")
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
        """The messages that the model is to go on from; None when the rollout has ended."""
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
    """What the loop of verifiers asks the model, and what `step` answers."""

    def __init__(self) -> None:
        self.questions: asyncio.Queue[list[Any]] = asyncio.Queue()
        self.answers: asyncio.Queue[str] = asyncio.Queue()
        self.state: Any = None


def _plain_message(message: Any) -> dict[str, Any]:
    dumped = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
    plain: dict[str, Any] = to_plain(dumped)
    return plain


class _ClientMethods:
    """What a client of verifiers has to do: each turn is asked and answered by the queues of an episode."""

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
    """The class of clients that stand for the model; made late, for its base is in verifiers."""
    import_verifiers()
    return type("TurnsClient", (_ClientMethods, import_module("verifiers.clients").Client), {})
