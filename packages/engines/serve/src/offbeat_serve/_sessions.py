"""Sessions: the calls of one agent, identified by a key, recorded token for token and made into trajectories.

An agent sends text back. What the model has said it finds by the conversation up to there, and puts the tokens that
were sampled in its place, so that the next prompt begins with the last one and what was said to it. Where that cannot
be (the agent has changed a turn, the chat template rewrites earlier ones), the conversation is rendered anew and begins
a trajectory of its own.

Legend: P prompt tokens.
"""

import asyncio
import hashlib
import json
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

import msgspec
import numpy as np

from offbeat_core import (
    Completion,
    GenerateRequest,
    Ids,
    ModelError,
    RecordedSession,
    SamplingParams,
    SessionEnd,
    SessionPlan,
    TrajectoryEnd,
)
from offbeat_data import Tokenizer
from offbeat_serve._answers import AnsweredMessage, answered_message, text_before
from offbeat_serve._calls import RecordedCall, RefusedCall, trajectories_of
from offbeat_serve._requests import (
    ChatMessage,
    ChatRequest,
    SamplingRequest,
    chat_prompt,
    message_text,
    template_message,
    turn_template,
)
from offbeat_serve._settings import RefusedError

KEY_PREFIX: Final = "session-"
"""Prefix of all keys, so that a client whose session is over is not mistaken for one without a session."""
REWARD_KEY_PREFIX: Final = "reward-"


@dataclass(frozen=True)
class _SampledTurn:
    """A sampled turn: all tokens up to its end, [P] int32, and its own."""

    ids: Ids
    said: Ids


class Session:
    """The calls of one agent.

    Attributes:
        key: the agent's, secret.
        reward_key: ends the session with a reward; processes that the agent starts need not have it; secret, and empty
            where no reward may be posted.
        over: set when the session has ended.
    """

    def __init__(self, plan: SessionPlan, tokenizer: Tokenizer, max_model_len: int) -> None:
        self.plan, self._tokenizer, self._max_model_len = plan, tokenizer, max_model_len
        self.key = KEY_PREFIX + secrets.token_urlsafe(24)
        self.reward_key = REWARD_KEY_PREFIX + secrets.token_urlsafe(24) if plan.may_post_reward else ""
        self.over = asyncio.Event()
        self._ended_by: SessionEnd = "taken"
        self._reward: float | None = None
        self._reward_parts: dict[str, float] = {}
        self._calls: list[RecordedCall] = []
        self._refused: RefusedCall | None = None
        self._num_calls = self._num_aborted = self._num_seeds = 0
        self._spoken: dict[bytes, _SampledTurn] = {}

    # ── what an agent asks ────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, prompts: Sequence[Ids], num_samples: int) -> None:
        """Count samples, `num_samples` of each prompt, unless there are too many or the session is over."""
        self.check_open()
        num_samples *= len(prompts)
        if self._num_calls + num_samples > self.plan.max_calls:
            message = f"this session may have {self.plan.max_calls} samples (max_calls), and has had {self._num_calls}"
            self.note_refusal(prompts, "max_turns")
            raise RefusedError(HTTPStatus.BAD_REQUEST, message, code="session_limit")
        self._num_calls += num_samples
        # Here and not where the samples are recorded: calls that were in flight when another was refused came before.
        self._refused = None

    def note_refusal(self, prompts: Sequence[Ids], ended: TrajectoryEnd) -> None:
        """Remember that a limit has refused a call: with no other call after it, the episode was cut off there."""
        if not self.over.is_set():
            self._refused = RefusedCall(prompt_ids=max(prompts, key=len), ended=ended)

    def check_open(self) -> None:
        if self.over.is_set():
            raise RefusedError(HTTPStatus.CONFLICT, "this session is over", code="session_over")

    def params(self, asked: SamplingRequest, max_tokens: int) -> SamplingParams:
        """Return how a call is sampled."""
        own = self.plan.params
        self._num_seeds += 1
        seed = hashlib.blake2b(f"{own.first_seed()}/{self._num_seeds}".encode(), digest_size=6).digest()
        return replace(
            own,
            max_tokens=min(max_tokens, own.max_tokens),
            stop=tuple(dict.fromkeys((*own.stop, *asked.stops))),
            stop_token_ids=tuple(dict.fromkeys((*own.stop_token_ids, *(asked.stop_token_ids or ())))),
            seed=int.from_bytes(seed, "little"),
        )

    def prompt(self, asked: ChatRequest) -> Ids:
        """Return the conversation up to the model's turn, [P] int32: see `chat_prompt`, with what was sampled here."""
        messages = asked.messages
        last = max((at for at, message in enumerate(messages) if message.role == "assistant"), default=-1)
        if last >= 0 and not any(message.was_sampled for message in messages):
            *_, mark = _marks(asked, messages[: last + 1])
            spoken = self._spoken.get(mark)
            if spoken is not None and (ids := self._continue(spoken, asked, last)) is not None:
                return ids
        return chat_prompt(asked, self._tokenizer)

    def _continue(self, spoken: _SampledTurn, asked: ChatRequest, last: int) -> Ids | None:
        """Return the prompt that begins with a turn and all before it; None if the chat template would rewrite it."""
        replies = [template_message(message) for message in asked.messages[last + 1 :]]
        if not replies:
            return spoken.ids
        try:
            reply_ids = turn_template(self._tokenizer, asked.template_options).reply_ids(spoken.said, replies)
        except ModelError:
            return None
        ids: Ids = np.concatenate([spoken.ids, reply_ids])
        return ids

    # ── what it is answered ───────────────────────────────────────────────────────────────────────────────────────

    def record(
        self, asked: SamplingRequest, requests: Sequence[GenerateRequest], found: Sequence[Sequence[Completion]]
    ) -> None:
        """Keep what was sampled. What comes after the end, or was aborted, is dropped."""
        if self.over.is_set():
            return
        for request, completions in zip(requests, found, strict=True):
            most = min(self.plan.params.max_tokens, self._max_model_len - len(request.prompt_ids))
            for completion in completions:
                if completion.stop_reason == "aborted":
                    self._num_aborted += 1
                elif num_tokens := len(completion.ids):
                    call = RecordedCall(
                        prompt_ids=request.prompt_ids, completion=completion, is_as_asked=num_tokens < most
                    )
                    self._keep(asked, call)

    def _keep(self, asked: SamplingRequest, call: RecordedCall) -> None:
        self._calls.append(call)
        if isinstance(asked, ChatRequest):
            text = text_before(call.completion, asked.stops)
            *_, mark = _marks(asked, [*asked.messages, answered_message(text, calls_tools=asked.calls_tools)])
            self._spoken[mark] = _SampledTurn(call.end_ids, call.completion.ids)

    def end(self, by: SessionEnd, reward: float | None = None, parts: Mapping[str, float] | None = None) -> None:
        """End it; the first end counts."""
        if not self.over.is_set():
            self._ended_by, self._reward, self._reward_parts = by, reward, dict(parts or {})
            self.over.set()

    @property
    def num_calls(self) -> int:
        return self._num_calls

    def result(self) -> RecordedSession:
        return RecordedSession(
            trajectories=trajectories_of(self._calls, self._tokenizer.decode, self._refused),
            answer=self._calls[-1].completion.text if self._calls else "",
            ended_by=self._ended_by,
            reward=self._reward,
            reward_parts=self._reward_parts,
            num_calls=self._num_calls,
            num_aborted=self._num_aborted,
        )


def _marks(asked: ChatRequest, messages: Sequence[ChatMessage | AnsweredMessage]) -> Iterator[bytes]:
    """Yield a digest that identifies the conversation up to each of its messages.

    Agents trim what they send back, and name calls anew: neither makes another conversation.
    """
    mark = hashlib.blake2b(json.dumps(asked.template_options, sort_keys=True).encode(), digest_size=16)
    for message in messages:
        mark.update(msgspec.json.encode(_plain(message)))
        yield mark.digest()


def _plain(message: ChatMessage | AnsweredMessage) -> list[Any]:
    calls = [(call.function.name, _arguments(call.function.arguments)) for call in message.tool_calls or ()]
    if isinstance(message, AnsweredMessage):
        return [message.role, (message.content or "").strip(), calls, None, None]
    text = message_text(message)
    said = text.strip() if message.role == "assistant" else text
    return [message.role, said, calls, message.name, message.reasoning_content]


def _arguments(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text


class Sessions:
    """All sessions of a server. Belongs to one event loop.

    Args:
        tokenizer: of the model.
        max_model_len: prompt and completion together at most, tokens.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        self._sessions: dict[str, Session] = {}
        self._by_reward_key: dict[str, Session] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._offered: OrderedDict[str, Session] = OrderedDict()

    def open(self, plan: SessionPlan) -> Session:
        """Begin a session; its key opens the server to the agent until the session is over."""
        session = Session(plan, self._tokenizer, self._max_model_len)
        self._sessions[session.key] = session
        if session.reward_key:
            self._by_reward_key[session.reward_key] = session
        loop = asyncio.get_running_loop()
        self._timers[session.key] = loop.call_later(plan.deadline_s, session.end, "deadline")
        if plan.is_offered:
            self._offered[session.key] = session
        return session

    def find(self, token: str) -> Session | None:
        """Return the session of a key, of either kind; None for a token of another kind.

        Raises:
            RefusedError: a key whose session is no longer there.
        """
        if not token.startswith((KEY_PREFIX, REWARD_KEY_PREFIX)):
            return None
        session = self._sessions.get(token) or self._by_reward_key.get(token)
        if session is None:
            message = "there is no session with this key: it is over, or its engine was started again"
            raise RefusedError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")
        return session

    def next_offer(self) -> Session | None:
        """Return a session for an agent that asks; the oldest that no other has got."""
        while self._offered:
            _, session = self._offered.popitem(last=False)
            if not session.over.is_set():
                return session
        return None

    async def wait_over(self, key: str) -> None:
        """Wait until a session has ended; at once when it is not there."""
        if (session := self._sessions.get(key)) is not None:
            await session.over.wait()

    def take(self, key: str) -> Session | None:
        """End a session and forget it: its `result` is what came of it. None where there is no such session."""
        session = self._sessions.pop(key, None)
        if session is None:
            return None
        self._timers.pop(key).cancel()
        self._offered.pop(key, None)
        self._by_reward_key.pop(session.reward_key, None)
        session.end("taken")
        return session
