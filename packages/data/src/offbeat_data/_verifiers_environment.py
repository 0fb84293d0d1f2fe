"""An environment of verifiers as an `Environment`: its rollout, with the model's place taken by `step`.

A verifiers environment drives its own loop and calls a client for each turn of the model. Here that client waits: it
hands the messages out, and goes on when `step` brings what the model said. So everything the environment does around
its turns (set-up, stop conditions, tools, clean-up) is done by its own code.

Source: https://github.com/PrimeIntellect-ai/verifiers, verifiers/legacy/envs/multiturn_env.py (`rollout`),
verifiers/legacy/clients/client.py (`Client`), verifiers/legacy/rubrics/rubric.py (`score_rollout`).
"""

import asyncio
import json
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from itertools import count
from typing import Any

from offbeat_data._chat_template import Message
from offbeat_data._deadline import interruptible
from offbeat_data._plain import to_plain, unpack
from offbeat_data._prompts import Prompt
from offbeat_data._reward import RewardScore
from offbeat_data._tools import read_tool_calls, without_tool_calls
from offbeat_data._verifiers import ENTRY_FIELD, import_verifiers, load_environment
from offbeat_types import DataError


class VerifiersEnvironment:
    """One rollout of a verifiers environment, whose rubric gives the reward. The prompt names the environment."""

    def __init__(self) -> None:
        self._seat = _ModelSeat()
        self._environment: Any = None
        self._rollout: asyncio.Task[Any] | None = None
        self._read: list[dict[str, Any]] = []

    async def reset(self, prompt: Prompt) -> None:
        """See `Environment`.

        Raises:
            DataError: the prompt is not one of `data.path = "verifiers:NAME"`.
        """
        kept = prompt.fields.get(ENTRY_FIELD)
        if kept is None:
            raise DataError("the environment verifiers brings its own prompts: set data.path to verifiers:NAME")
        self._environment = load_environment(kept["environment"], kept["options"])
        row, client = unpack(kept["row"]), _client_type()(self._seat)
        self._rollout = asyncio.create_task(interruptible(self._environment.rollout(row, client, "policy", {})))
        self._read = await self._next_question() or []

    async def step(self, text: str) -> Sequence[Message] | None:
        """See `Environment`.

        Raises:
            DataError: the environment changed what was said before, which tokens already sampled cannot follow.
        """
        self._seat.answers.put_nowait(text)
        messages = await self._next_question()
        if messages is None:
            return None
        num_read = len(self._read)
        if messages[:num_read] != self._read or len(messages) < num_read + 2:
            raise DataError("the environment does not go on from the messages before: only growing ones are supported")
        self._read = messages
        return messages[num_read + 1 :]

    async def reward(self) -> RewardScore | None:
        """See `Environment`."""
        await self.close()
        state, rubric = self._seat.state, self._environment.rubric
        await rubric.score_rollout(state)
        await rubric.cleanup(state)
        parts = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        return RewardScore(value=float(state["reward"]), parts=parts)

    async def close(self) -> None:
        """See `Environment`. A rollout that has not ended is ended; its own clean-up runs."""
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.wait({self._rollout})

    async def _next_question(self) -> list[dict[str, Any]] | None:
        """The messages that the model is to go on from; None when the rollout has ended."""
        assert self._rollout is not None
        question = asyncio.ensure_future(self._seat.questions.get())
        try:
            await asyncio.wait({question, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            if question.done():
                return [_plain(message) for message in question.result()]
        finally:
            question.cancel()
        self._seat.state = self._rollout.result()
        if error := self._seat.state.get("error"):
            raise error
        return None


class _ModelSeat:
    """Where the loop of verifiers waits for the model, and `step` speaks for it."""

    def __init__(self) -> None:
        self.questions: asyncio.Queue[list[Any]] = asyncio.Queue()
        self.answers: asyncio.Queue[str] = asyncio.Queue()
        self.state: Any = None


def _plain(message: Any) -> dict[str, Any]:
    dumped = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
    plain: dict[str, Any] = to_plain(dumped)
    return plain


class _SeatMethods:
    """What a client of verifiers has to do, done by whoever sits in the seat."""

    def __init__(self, seat: _ModelSeat) -> None:
        super().__init__(seat)  # type: ignore[call-arg]  # the base is added when verifiers is imported
        self._seat = seat
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
        self._seat.state = state
        self._seat.questions.put_nowait(prompt)
        return await self._seat.answers.get()

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
    """The class of clients that sit in the model's place; made late, for its base is in verifiers."""
    import_verifiers()
    return type("SeatClient", (_SeatMethods, import_module("verifiers.clients").Client), {})
