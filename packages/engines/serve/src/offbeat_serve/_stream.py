"""Answers as server-sent events: what is sampled as it is sampled, then what is left of the finished answer.

Deltas are prefixes of the finished answer: text is held back while it may be a part of a character or the beginning of
a stop text, and all of it where tools may be called. Where the engine is no `StreamingEngine`, all comes at the end.

Source: https://platform.openai.com/docs/api-reference/chat/streaming; https://html.spec.whatwg.org (event streams)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from offbeat_core import Completion, Ids
from offbeat_data import Tokenizer
from offbeat_serve._answers import ChatAnswer, CompletionAnswer, Sampled
from offbeat_serve._requests import SamplingRequest
from offbeat_serve._settings import RefusedError, error_answer

MakeAnswer = Callable[[Sequence[Sampled], int], ChatAnswer | CompletionAnswer]
"""Builds the answer of what was sampled and the policy version served now."""

KEEP_ALIVE: Final = b": sampling\n\n"
"""A comment, which clients pass over."""
_DONE: Final = b"data: [DONE]\n\n"


@dataclass
class _Choice:
    """State of one sample, and how much of it was sent."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    decoded: int = 0
    context: int = 0
    sent_tokens: int = 0
    sent_chars: int = 0
    token_chars: int = 0

    def decode(self, tokenizer: Tokenizer) -> None:
        """Add the text of the tokens that are new, unless it ends within a character.

        Source: vllm, vllm/transformers_utils/detokenizer_utils.py: the tokens before decide about a leading space.
        """
        before = tokenizer.decode(self.ids[self.context : self.decoded])
        after = tokenizer.decode(self.ids[self.context :])
        if not after.endswith("\ufffd"):
            self.text += after[len(before) :]
            self.context, self.decoded = self.decoded, len(self.ids)

    def sendable(self, stops: Sequence[str]) -> int:
        """Characters that no stop text can take back."""
        found = [at for stop in stops if (at := self.text.find(stop, self.sent_chars)) >= 0]
        return min(found, default=len(self.text) - max((len(stop) - 1 for stop in stops), default=0))


class AnswerStream:
    """The events of one answer.

    Args:
        request: what was asked.
        prompts: each [P] int32, of as many choices as the request has samples.
        version: policy version served at the beginning.
        make: builds the answer.
        tokenizer: of the model.
    """

    def __init__(
        self, request: SamplingRequest, prompts: Sequence[Ids], version: int, make: MakeAnswer, tokenizer: Tokenizer
    ) -> None:
        self._request, self._prompts, self._version = request, prompts, version
        self._make, self._tokenizer = make, tokenizer
        self._choices = [_Choice() for _ in range(len(prompts) * request.num_samples)]
        self._sent_prompts = set[int]()

    def deltas(self, tokens: Sequence[tuple[int, int, int, float]]) -> Iterator[bytes]:
        """The events of new tokens: (prompt, sample, id, log-probability) each."""
        if self._request.calls_tools:
            return
        grown = set[int]()
        for prompt, sample, token, logprob in tokens:
            index = prompt * self._request.num_samples + sample
            self._choices[index].ids.append(token)
            self._choices[index].logprobs.append(logprob)
            grown.add(index)
        for index in sorted(grown):
            choice = self._choices[index]
            choice.decode(self._tokenizer)
            if (end := choice.sendable(self._request.stops)) > choice.sent_chars:
                yield self._delta(index, choice, end)

    def _delta(self, index: int, choice: _Choice, end: int) -> bytes:
        start, prompt = choice.sent_tokens, self._prompts[index // self._request.num_samples]
        ids, text = choice.ids[start:], choice.text[choice.sent_chars : end]
        partial = Completion.join(ids, choice.logprobs[start:], [(self._version, len(ids))], None, text)
        head, [chunk] = _parts(self._make([Sampled(prompt, [partial])], self._version))
        chunk |= {"index": index, "finish_reason": None}
        del chunk["ended_by"], chunk["version_segments"]
        if offsets := (chunk["logprobs"] or {}).get("text_offset"):
            chunk["logprobs"]["text_offset"] = [offset + choice.token_chars for offset in offsets]
            choice.token_chars += offsets[-1] + len(chunk["logprobs"]["tokens"][-1])
        if "message" in chunk:
            chunk["delta"] = _said(chunk.pop("message"), is_first=not start)
        choice.sent_chars, choice.sent_tokens = end, len(choice.ids)
        return self._event(head, chunk)

    def rest(self, answer: ChatAnswer | CompletionAnswer) -> Iterator[bytes]:
        """The events of the part of a finished answer that was not sent yet, and the end."""
        head, chunks = _parts(answer)
        for index, chunk in enumerate(chunks):
            choice = self._choices[index]
            _leave_out(chunk, choice)
            if "message" not in chunk:
                yield self._event(head, chunk)
                continue
            said = _said(chunk.pop("message"), is_first=not choice.sent_tokens)
            spoken = {"index": index, "delta": said, "finish_reason": None}
            spoken |= {name: chunk.pop(name) for name in ("logprobs", "token_ids") if name in chunk}
            yield self._event(head, spoken)
            yield self._event(head, {**chunk, "delta": {}})
        options = self._request.stream_options
        if options and options.include_usage:
            yield _event({**head, "choices": [], "usage": msgspec.to_builtins(answer.usage)})
        yield _DONE

    def _event(self, head: dict[str, Any], chunk: dict[str, Any]) -> bytes:
        """Return one chunk; the ids of a prompt are in the first one alone."""
        owner = head if "prompt_token_ids" in head else chunk
        prompt_ids = owner.pop("prompt_token_ids", None)
        which = 0 if owner is head else chunk["index"]
        extra: dict[str, Any] = {}
        if prompt_ids is not None and which not in self._sent_prompts:
            self._sent_prompts.add(which)
            extra = {"prompt_token_ids": prompt_ids}
        if owner is head:
            return _event({**head, **extra, "choices": [chunk]})
        return _event({**head, "choices": [{**chunk, **extra}]})


def error_event(refusal: RefusedError) -> bytes:
    """Return the event that ends a stream which fails after its status was sent."""
    return _event(msgspec.to_builtins(error_answer(refusal)))


def _parts(answer: ChatAnswer | CompletionAnswer) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what every chunk has, and the choices."""
    head: dict[str, Any] = msgspec.to_builtins(answer)
    choices: list[dict[str, Any]] = head.pop("choices")
    del head["usage"]
    if isinstance(answer, ChatAnswer):
        head["object"] = "chat.completion.chunk"
    return head, choices


def _said(message: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
    """Return a message as a delta."""
    message.pop("token_ids", None)  # the choice has them
    for number, call in enumerate(message.get("tool_calls", ())):
        call["index"] = number
    if not is_first:
        del message["role"]  # clients add up what deltas say
    return message


def _leave_out(chunk: dict[str, Any], choice: _Choice) -> None:
    """Remove from a finished choice the part that was sent already."""
    if not choice.sent_tokens:
        return
    if "token_ids" in chunk:
        chunk["token_ids"] = chunk["token_ids"][choice.sent_tokens :]
    if chunk["logprobs"]:
        lists = {name: value for name, value in chunk["logprobs"].items() if value is not None}
        chunk["logprobs"] |= {name: value[choice.sent_tokens :] for name, value in lists.items()}
    if "message" in chunk:
        chunk["message"]["content"] = (chunk["message"]["content"] or "")[choice.sent_chars :]
    else:
        chunk["text"] = chunk["text"][choice.sent_chars :]


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
