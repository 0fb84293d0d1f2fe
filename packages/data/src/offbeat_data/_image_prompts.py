"""Rows with images: where each stands among the words, and as how many tokens."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from offbeat_data._chat_template import RenderedChat
from offbeat_data._files import Row
from offbeat_data._image_rules import ImageRules, load_image_rules
from offbeat_data._pictures import Picture, picture_key, read_picture
from offbeat_data._tokenizer import Tokenizer
from offbeat_types import DataError, Ids, ModelError

IMAGES: Final = "images"
"""Column of the images of a row: paths, or bytes. Source: dataset card of hiyouga/geometry3k."""
MARK: Final = "<image>"
"""Place of an image in a text. Source: the same."""


def with_images(question: Any, row: Row) -> Any:
    """What a row asks: its text, and which images go with it. One text may be asked of many."""
    values = _values(row)
    return [question, [picture_key(value) for value in values]] if values and question is not None else question


class RowImages:
    """Reads the images of rows, and brings their placeholders into the prompt.

    Args:
        tokenizer: of the model, in whose folder the rules for its images are; they are read with the first image.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def read(self, row: Row, source: str) -> tuple[Picture, ...]:
        """The images of a row.

        Args:
            row: with paths, bytes, or both as datasets writes them.
            source: where the row is from; relative paths start from its folder.

        Raises:
            DataError: one of them is none; with its number.
            ModelError: the model takes no images.
            BackendError: Pillow is not installed.
        """
        path = Path(source).expanduser()
        folder, pictures = path if path.is_dir() else path.parent, []
        for number, value in enumerate(_values(row), 1):
            try:
                pictures.append(read_picture(value, folder, self._rules))
            except DataError as error:
                raise DataError(f"image {number}: {error}") from error
        return tuple(pictures)

    def place(self, messages: list[dict[str, Any]], row: Row, num_images: int) -> list[dict[str, Any]]:
        """Turn the marks in texts into parts of their own, as chat templates of vision-language models take them.

        Texts without any mark have all images before the first words of the user. A row without a column of images
        is left as it is, whatever it says.

        Raises:
            DataError: other places than images.
        """
        if IMAGES not in row:
            return messages
        placed = [
            {**message, "content": _parts(message["content"])} if "content" in message else message
            for message in messages
        ]
        found = sum(part.get("type") == "image" for message in placed for part in _list(message.get("content")))
        if found not in ((0, num_images) if num_images else (0,)):
            raise DataError(f"the prompt has {found} places for images ({MARK}), and the row {num_images} images")
        if found < num_images:
            first = next((message for message in placed if message["role"] == "user"), placed[0])
            first["content"] = [{"type": "image"}] * num_images + _list(first.get("content"))
        return placed

    def expand(self, chat: RenderedChat, pictures: Sequence[Picture]) -> RenderedChat:
        """Write each placeholder, which a chat template writes once for an image, as often as it takes tokens.

        Raises:
            DataError: the text has another number of them than there are images.
            ModelError: the tokenizer does not know the placeholder.
        """
        if not pictures:
            return chat
        pieces = chat.text.split(self._placeholder)
        if len(pieces) != len(pictures) + 1:
            raise DataError(
                f"the chat template wrote {len(pieces) - 1} placeholders {self._placeholder!r} for {len(pictures)} "
                "images: use the template of a vision-language model, and leave placeholders out of the texts"
            )
        counts = [self._rules.num_tokens(picture.height, picture.width) for picture in pictures]
        written = [self._placeholder * count + piece for count, piece in zip(counts, pieces[1:], strict=True)]
        ends = np.cumsum([len(piece) + len(self._placeholder) for piece in pieces[:-1]])
        added = np.cumsum([0, *((count - 1) * len(self._placeholder) for count in counts)])

        def moved(at: int) -> int:
            return at + int(added[np.searchsorted(ends, at, side="right")])

        spans = tuple((moved(start), moved(end)) for start, end in chat.spans)
        return RenderedChat(text="".join([pieces[0], *written]), spans=spans)

    def seen_by(self, chat: RenderedChat, pictures: Sequence[Picture]) -> Sequence[Picture]:
        """The images of the turns that a rendered part of a conversation holds."""
        return pictures[: chat.text.count(self._placeholder)] if pictures else pictures

    def check(self, ids: Ids, pictures: Sequence[Picture]) -> None:
        """Make sure that the tokenizer took every placeholder for one token.

        Raises:
            DataError: the ids hold another number of placeholder tokens than the images take.
        """
        if not pictures:
            return
        wanted = sum(self._rules.num_tokens(picture.height, picture.width) for picture in pictures)
        found = int(np.count_nonzero(ids == self._rules.token_id))
        if found != wanted:
            raise DataError(
                f"the images take {wanted} placeholder tokens (id {self._rules.token_id}), the prompt holds {found}"
            )

    @cached_property
    def _rules(self) -> ImageRules:
        return load_image_rules(self._tokenizer.source)

    @cached_property
    def _placeholder(self) -> str:
        text = self._tokenizer.token_text(self._rules.token_id)
        if not text:
            raise ModelError(f"{self._tokenizer.source}: the tokenizer has no token {self._rules.token_id} for images")
        return text


def _values(row: Row) -> list[Any]:
    """What a row gives for its images: a list, or one alone."""
    value = row.get(IMAGES)
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _list(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return [part for part in content if isinstance(part, dict)]
    return [{"type": "text", "text": str(content)}] if content else []


def _parts(content: Any) -> Any:
    """A text with marks as parts; everything else as it is."""
    if not isinstance(content, str) or MARK not in content:
        return content
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(MARK)):
        parts += [{"type": "image"}] * bool(number)
        parts += [{"type": "text", "text": text}] * bool(text)
    return parts
