"""Plays episodes: the model speaks, the environment answers, until one of them or a limit ends it.

A conversation grows by tokens and is never rendered or encoded as a whole again: the next prompt is the prompt before,
the tokens sampled after it, and those that the template puts between two turns. Rendering the whole anew would change
it, for a model samples token sequences that its tokenizer would not choose, and templates trim what they are given.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from offbeat_core import Completion, DataError, Ids, Image, ModelError, Reply, Trajectory, TrajectoryEnd
from offbeat_data._chat.template import STAND_IN, ChatTemplate, Message, RenderedChat
from offbeat_data._datasets.prompts import uses_template
from offbeat_data._environments.built_in import EnvironmentConfig
from offbeat_data._escaping import escape_tools, escape_value
from offbeat_data._images import Picture, RowImages, is_image
from offbeat_data._sources.rows import as_text
from offbeat_data._sources.sources import SourceConfig
from offbeat_data._tokenizer import Tokenizer, whole_text

_QUESTION: Final[Message] = {"role": "user", "content": "?"}


class TurnTemplate:
    """Turns what an environment says into the tokens that follow the model's.

    Args:
        tokenizer: of the model.
        config: the `data` section: whether the chat template is used, and with which options.

    Raises:
        ModelError, ConfigError: see `uses_template`.
    """

    def __init__(self, tokenizer: Tokenizer, config: SourceConfig) -> None:
        self._tokenizer, self._options = tokenizer, escape_tools(tokenizer, config.template_options)
        self._template = tokenizer.require_template() if uses_template(config, tokenizer) else None
        self._checked: set[tuple[str, ...]] = set()
        self._separators: dict[tuple[str, ...], str] = {}
        self._images = RowImages(tokenizer, config.max_image_pixels)

    def reply_ids(self, said_ids: Ids, messages: Sequence[Message]) -> Ids:
        """Tokens to put after the model's.

        Args:
            said_ids: [T] int32, tokens of the turn as sampled; an end token, or the separator that the template
                writes after a turn, is not repeated when they end with it.
            messages: what the environment says, with `role` and `content`. Control tokens in the content are
                encoded as words, and so in all other keys: a tool that returns "<|im_end|>" must not end a turn, nor
                must one that a model has called by such a name. A content may be a list of
                parts, texts and images: {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}.

        Returns:
            [R] int32. Without a chat template, the contents as plain text.

        Raises:
            ModelError: the template renders what was said before differently once there is a reply to it.
            DataError: the template refuses the messages, or the model sees no images.
        """
        return self._encode(said_ids, messages, self._pictures(messages))

    def reply(self, completion: Completion, messages: Sequence[Message]) -> Reply:
        """Return what the model reads, and sees, after a turn of its own. Raises as `reply_ids`."""
        words = "".join(f"\n[{message.get('role')}] {_words(message.get('content'))}\n" for message in messages)
        pictures = self._pictures(messages)
        ids = self._encode(completion.ids, messages, pictures)
        return Reply(ids=ids, text=whole_text(words), images=tuple(picture.pixels() for picture in pictures))

    def _pictures(self, messages: Sequence[Message]) -> list[Picture]:
        found = [part for message in messages for part in _parts(message.get("content")) if is_image(part)]
        if found and self._template is None:
            raise DataError("an environment may say texts only without a chat template: set data.chat_template to on")
        return [self._images.read_part(part) for part in found]

    def _encode(self, said_ids: Ids, messages: Sequence[Message], pictures: Sequence[Picture]) -> Ids:
        plain = [self._as_words(message) for message in messages]
        if self._template is None:
            text = "".join(message["content"] for message in plain)
        else:
            self.check([str(message.get("role")) for message in plain])
            text = self._render(self._template, STAND_IN, plain).partition(STAND_IN)[2]
        text = self._images.expand(RenderedChat(text=text, spans=()), pictures).text
        [ids] = self._tokenizer.encode([text], add_special_tokens=False)
        self._images.check(ids, pictures)
        if not (len(ids) and len(said_ids) and ids[0] == said_ids[-1]):
            return ids
        is_end = ids[0] in self._tokenizer.end_ids or self._separator([str(message.get("role")) for message in plain])
        return ids[1:] if is_end else ids  # else it is the first of the environment's words

    def _separator(self, roles: Sequence[str]) -> str:
        """Return the text that the template writes between a turn and the words of messages that follow it."""
        if self._template is None:
            return ""
        if (key := tuple(roles)) not in self._separators:
            text = self._render(self._template, STAND_IN, [{"role": role, "content": STAND_IN} for role in roles])
            self._separators[key] = text.split(STAND_IN)[1]
        return self._separators[key]

    def _as_words(self, message: Message) -> Message:
        """Return a message whose control tokens are words, those in its name and other keys too."""
        content = self._plain(message.get("content"))
        return {**escape_value(self._tokenizer, {**message, "content": None}), "content": content}

    def _plain(self, content: Any) -> Any:
        """Return a content with control tokens as words: a text, or with images the parts that templates know."""
        parts = _parts(content)
        if not any(map(is_image, parts)):
            return self._tokenizer.escape("".join(map(_part_text, parts)))
        return [
            {"type": "image"} if is_image(part) else {"type": "text", "text": self._tokenizer.escape(_part_text(part))}
            for part in parts
        ]

    def _render(self, template: ChatTemplate, said: str, replies: Sequence[Message]) -> str:
        """Return the text of a question, the model's words and the replies, up to where it speaks again."""
        conversation = [_QUESTION, {"role": "assistant", "content": said}, *replies]
        return template.render(conversation, add_generation_prompt=True, options=self._options).text

    def check(self, roles: Sequence[str]) -> None:
        """Refuse a template that goes back on what the model has read and said.

        Args:
            roles: of the messages that follow a turn of the model, such as ["tool"].

        Raises:
            ModelError: it renders a turn differently once such messages follow.
            DataError: it refuses such messages.
        """
        if self._template is None or tuple(roles) in self._checked:
            return
        opening = self._template.render([_QUESTION], add_generation_prompt=True, options=self._options).text
        replies = [{"role": role, "content": "?"} for role in roles]
        said = _probe(self._template, opening)
        if not self._render(self._template, said, replies).startswith(opening + said):
            raise ModelError(_complaint(self._tokenizer.source, roles, opening, said))
        self._checked.add(tuple(roles))


def _probe(template: ChatTemplate, opening: str) -> str:
    """Return what a model may say: plain words, with thoughts before them where the template knows of thoughts."""
    if "</think>" not in template.source or opening.rstrip().endswith("</think>"):
        return STAND_IN
    begin = "" if opening.rstrip().endswith("<think>") else "<think>\n"
    return f"{begin}{STAND_IN}\n</think>\n\n{STAND_IN}"


def _parts(content: Any) -> list[Any]:
    """Return the parts of a message's content, which may be a text alone."""
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": "" if content is None else as_text(content)}]


def _part_text(part: Any) -> str:
    if not isinstance(part, Mapping) or "text" not in part:
        raise DataError(f"an environment may say texts only, and images as image_url: got a part {part!r:.80}")
    return str(part["text"])


def _words(content: Any) -> str:
    """Return a content for people."""
    return "".join("[image]" if is_image(part) else _part_text(part) for part in _parts(content))


def _complaint(source: str, roles: Sequence[str], opening: str, said: str) -> str:
    what = "drops or moves thoughts" if "think" in said else "changes the opening or the words"
    return (
        f"the chat template of {source} {what} of a turn once a message of role {' and '.join(roles)} follows it, so "
        f"the model would be trained on another conversation than it is used in (its turns open with "
        f"{opening[-40:]!r}): put a chat_template.jinja into that folder that keeps earlier turns as they are, or let "
        f"the environment answer in another role, such as tool"
    )


Sample = Callable[[Ids, tuple[Image, ...], int], Awaitable[Completion]]
"""Samples one turn: called with the context [P] int32, the images in it that came after the prompt, in order and each
[H, W, 3] uint8, and the longest turn in tokens."""
Answer = Callable[[str], Awaitable[Sequence[Message] | None]]
"""`Environment.step`."""


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Bounds of an episode.

    Args:
        max_turns: of the model.
        max_tokens: after the prompt, said by the model and sent to it.
        max_turn_tokens: of one turn.
    """

    max_turns: int
    max_tokens: int
    max_turn_tokens: int

    @classmethod
    def of(cls, config: EnvironmentConfig, max_turn_tokens: int) -> "EpisodeLimits":
        """Return the limits of a configuration."""
        return cls(max_turns=config.max_turns, max_tokens=config.max_tokens, max_turn_tokens=max_turn_tokens)


async def play_episode(
    prompt_ids: Ids, sample: Sample, answer: Answer, template: TurnTemplate, limits: EpisodeLimits
) -> Trajectory:
    """Play from the prompt to the end. What was sampled stays as it is, whatever text it makes.

    Args:
        prompt_ids: [P] int32.
        sample: samples one turn.
        answer: takes the text of a turn, of the last one too, and returns what the environment says to it.
        template: turns that into tokens.
        limits: of the episode.

    Raises:
        ModelError: the chat template cannot be continued; see `TurnTemplate.reply_ids`.
        OffbeatError: whatever `sample` and `answer` raise.
    """
    turns: list[Completion] = []
    replies: list[Reply] = []
    context_ids, tokens_left = prompt_ids, limits.max_tokens
    images: tuple[Image, ...] = ()
    num_routed = 0
    while True:
        completion = await sample(context_ids, images, min(limits.max_turn_tokens, tokens_left))
        turns.append(completion.with_routes_since(num_routed))
        num_routed = len(context_ids) + len(completion.ids) - 1  # the last one is computed with the next turn
        messages = await answer(completion.text)
        ended = _why_over(completion, messages, len(turns), limits)
        if ended:
            return Trajectory(turns=tuple(turns), replies=tuple(replies), ended=ended)
        reply = await _reply(template, completion, messages or [])
        tokens_left -= len(completion.ids) + len(reply.ids)
        if tokens_left < 1:
            return Trajectory(turns=tuple(turns), replies=tuple(replies), ended="max_tokens")
        replies.append(reply)
        images += reply.images
        context_ids = np.concatenate([context_ids, completion.ids, reply.ids]).astype(np.int32, copy=False)


async def _reply(template: TurnTemplate, completion: Completion, messages: Sequence[Message]) -> Reply:
    """Return the reply, made in another thread where there are images to decode: everything waits for this one."""
    if not any(is_image(part) for message in messages for part in _parts(message.get("content"))):
        return template.reply(completion, messages)
    return await asyncio.to_thread(template.reply, completion, messages)


def _why_over(
    completion: Completion, messages: Sequence[Message] | None, num_turns: int, limits: EpisodeLimits
) -> TrajectoryEnd | None:
    """Why there is no further turn; None when there is one, if its reply leaves room."""
    if completion.stop_reason not in ("eos", "stop"):
        return "cut_off"  # an answer would follow words that it never ended
    if messages is None:
        return "done"
    return "max_turns" if num_turns >= limits.max_turns else None
