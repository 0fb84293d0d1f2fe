"""Images of a row: kept as the file they came in, in the size in which the model sees them, as so many tokens.

A model's processor leaves an image of that size as it is, so that engines which would resize differently (torchvision's
and Pillow's bicubic are not the same) are given equal pixels.
"""

import base64
import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from offbeat_core import BackendError, DataError, Ids, Image, ModelError
from offbeat_data._chat.template import RenderedChat
from offbeat_data._image_rules import ImageRules, load_image_rules
from offbeat_data._sources.rows import Row
from offbeat_data._tokenizer import Tokenizer

_PREVIEW_PX: Final = 256
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Pillow has some forty more readers, and one starts Ghostscript; images come from data sets and from servers."""
_BROKEN = (OSError, ValueError, SyntaxError)  # what Pillow raises about a file
_INSTALL = 'images are read with Pillow; install it with: pip install "offbeat-data[images]"'


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One image of a prompt, as plain data that travels between processes.

    Args:
        data: an image file: PNG, JPEG, WEBP, GIF or BMP.
        height: in which the model sees it, in pixels.
        width: the same.
    """

    data: bytes
    height: int
    width: int

    def pixels(self) -> Image:
        """[height, width, 3] uint8. On white where it is transparent, and a camera's turn of the picture applied.

        Raises:
            DataError: the file is broken further in than its first lines.
            BackendError: Pillow is not installed.
        """
        image = _open(self.data)
        longest = 2 * max(self.height, self.width)
        image.draft(None, (longest, longest))  # a JPEG may be decoded at a half, a quarter or an eighth
        try:
            upright = _on_white(_upright(image))
        except _BROKEN as error:
            raise _broken(self.data, error) from error
        if upright.size != (self.width, self.height):
            upright = upright.resize((self.width, self.height), _pillow().Resampling.BICUBIC)
        return np.array(upright, dtype=np.uint8)

    def preview(self) -> str:
        """Return a small copy for people, at most 256 pixels wide and high, as a `data:` address that a page can hold.

        Raises:
            DataError, BackendError: as `pixels`.

        Source: RFC 2397.
        """
        image = _pillow().fromarray(self.pixels())
        image.thumbnail((_PREVIEW_PX, _PREVIEW_PX))
        # Drawings are smaller as PNG, photographs as JPEG.
        files = {kind: io.BytesIO() for kind in ("png", "jpeg")}
        for kind, file in files.items():
            image.save(file, format=kind, optimize=True)
        kind, file = min(files.items(), key=lambda each: each[1].tell())
        return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def read_picture(value: Any, folder: Path, rules: ImageRules, max_pixels: int) -> Picture:
    """Return what a row gives for an image.

    Args:
        value: bytes of an image file; its path; or, as datasets stores images, {bytes, path} with one of them null.
        folder: of the data, which relative paths start from.
        rules: of the model.
        max_pixels: an image of more is refused, by its header.

    Raises:
        DataError: it cannot be read, or is too large.

    Source: huggingface/datasets, features/image.py (struct of bytes and path).
    """
    data = _read_bytes(value, folder)
    image = _open(data)
    width, height = image.size
    if width * height > max_pixels:
        raise DataError(
            f"an image of {width} x {height} pixels: at most {max_pixels} are decoded; make it smaller, or raise "
            "data.max_image_pixels"
        )
    try:
        if _turns_by_quarter(image):
            width, height = height, width
    except _BROKEN as error:
        raise _broken(data, error) from error
    height, width = rules.fit(height, width)
    return Picture(data=data, height=height, width=width)


def picture_key(value: Any) -> Any:
    """Return what identifies an image, as JSON data: a digest of its bytes, or its path."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    return hashlib.blake2b(value, digest_size=16).hexdigest() if isinstance(value, bytes) else value


def _read_bytes(value: Any, folder: Path) -> bytes:
    found = value
    if isinstance(value, dict):
        found = value.get("bytes") or value.get("path")
    if isinstance(found, bytes):
        return found
    if not isinstance(found, str) or not found:
        raise DataError(f"an image must be a path, bytes, or an object of bytes and path: got {value!r:.80}")
    path = folder / Path(found).expanduser()
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"image {path} cannot be read: {error}; paths are those of this machine, or relative to the data's folder"
        ) from error


def _pillow() -> Any:
    try:
        from PIL import Image as PillowImage
    except ImportError as error:
        raise BackendError(_INSTALL) from error
    return PillowImage


def _open(data: bytes) -> Any:
    """Return the header of an image file; its pixels are decoded later."""
    pillow = _pillow()
    try:
        return pillow.open(io.BytesIO(data), formats=_FORMATS)
    except pillow.UnidentifiedImageError as error:
        raise DataError(
            f"{len(data)} bytes are no image that Pillow reads as {', '.join(_FORMATS)}; write PNG or JPEG"
        ) from error
    except (*_BROKEN, pillow.DecompressionBombError) as error:
        raise DataError(f"{len(data)} bytes are no image that Pillow reads: {error}; write PNG or JPEG") from error


def _broken(data: bytes, error: Exception) -> DataError:
    return DataError(f"an image of {len(data)} bytes is broken: {error}; write it again")


def _turns_by_quarter(image: Any) -> bool:
    """Return whether the camera was held upright: width and height are the other way round.

    Source: EXIF 2.3, tag 0x0112. It may stand behind the pixels of a PNG, which is why Pillow decodes those for it.
    """
    return int(image.getexif().get(0x0112, 1)) >= 5


def _upright(image: Any) -> Any:
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _on_white(image: Any) -> Any:
    """Convert to RGB on a white page: the colours of transparent pixels mean nothing, and are black in most drawings.

    Engines are given these pixels, so that none decides on a ground of its own: transformers would drop transparency.

    Source: vLLM 0.32, multimodal/image.py, rgba_to_rgb (the same ground, the same way).
    """
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    page = _pillow().new("RGB", image.size, "white")
    page.paste(image, mask=image.getchannel("A"))
    return page


IMAGES: Final = "images"
"""Column of the images of a row: paths, or bytes. Source: dataset card of hiyouga/geometry3k."""
MARK: Final = "<image>"
"""Place of an image in a text. Source: the same."""


def with_images(question: Any, row: Row) -> Any:
    """Return what a row asks: its text, and which images go with it. One text may be asked of many."""
    values = _values(row)
    return [question, [picture_key(value) for value in values]] if values and question is not None else question


class RowImages:
    """Reads the images of rows, and brings their placeholders into the prompt; reads a model's rules with the first.

    Args:
        tokenizer: of the model.
        max_pixels: of an image, as in `read_picture`.
    """

    def __init__(self, tokenizer: Tokenizer, max_pixels: int) -> None:
        self._tokenizer, self._max_pixels = tokenizer, max_pixels

    def read(
        self, row: Row, messages: list[dict[str, Any]], source: str
    ) -> tuple[list[dict[str, Any]], tuple[Picture, ...]]:
        """Return the images of a row, and its messages with the marks in texts as parts of their own.

        So chat templates of vision-language models take them. Texts without any mark have all images before the first
        words of the user. A row without a column of images is left as it is, whatever it says.
        """
        path = Path(source).expanduser()
        folder, pictures = path if path.is_dir() else path.parent, []
        for number, value in enumerate(_values(row), 1):
            try:
                pictures.append(read_picture(value, folder, self._rules, self._max_pixels))
            except DataError as error:
                raise DataError(f"image {number}: {error}") from error
        if pictures and any(self._placeholder in json.dumps(each, default=str) for each in messages):
            raise DataError(
                f"the texts hold placeholders of images ({self._placeholder!r}): leave placeholders out of the texts, "
                f"and write {MARK} where an image is, or nothing"
            )
        # A text column may hold the mark as words; a part of a message is a place, whatever columns the row has.
        has_places = any(_is_place(part) for each in messages for part in _list(each.get("content")))
        return _place(messages, len(pictures)) if IMAGES in row or has_places else messages, tuple(pictures)

    def expand(self, chat: RenderedChat, pictures: Sequence[Picture]) -> RenderedChat:
        """Write each placeholder, which a chat template writes once for an image, as often as it takes tokens."""
        if not pictures:
            return chat
        pieces = chat.text.split(self._placeholder)
        if len(pieces) != len(pictures) + 1:
            raise DataError(
                f"the chat template wrote {len(pieces) - 1} placeholders {self._placeholder!r} for {len(pictures)} "
                "images: use the template of a vision-language model, and leave placeholders out of the texts"
            )
        images = [self._rules.write(self._text, count) for count in self._counts(pictures)]
        written = [image + piece for image, piece in zip(images, pieces[1:], strict=True)]
        ends = np.cumsum([len(piece) + len(self._placeholder) for piece in pieces[:-1]])
        added = np.cumsum([0, *(len(image) - len(self._placeholder) for image in images)])

        def moved(at: int) -> int:
            return at + int(added[np.searchsorted(ends, at, side="right")])

        spans = tuple((moved(start), moved(end)) for start, end in chat.spans)
        return RenderedChat(text="".join([pieces[0], *written]), spans=spans)

    def seen_by(self, chat: RenderedChat, pictures: Sequence[Picture]) -> Sequence[Picture]:
        """Return the images of the turns that a rendered part of a conversation holds."""
        return pictures[: chat.text.count(self._placeholder)] if pictures else pictures

    def check(self, ids: Ids, pictures: Sequence[Picture]) -> None:
        """Make sure that the tokenizer took every placeholder for one token."""
        if not pictures:
            return
        wanted = sum(self._counts(pictures))
        found = int(np.count_nonzero(ids == self._rules.token_id))
        if found != wanted:
            raise DataError(
                f"the images take {wanted} placeholder tokens (id {self._rules.token_id}), the prompt holds {found}"
            )

    def read_part(self, part: Mapping[str, Any]) -> Picture:
        """Return the image that an environment has answered with.

        Raises:
            DataError: it cannot be read, or the model takes none.
        """
        try:
            rules = self._rules
        except ModelError as error:
            raise DataError(f"an environment may say texts only to this model: {error}") from error
        return read_image_part(part, rules, self._max_pixels)

    def _counts(self, pictures: Sequence[Picture]) -> list[int]:
        return [self._rules.num_tokens(picture.height, picture.width) for picture in pictures]

    @cached_property
    def _rules(self) -> ImageRules:
        return load_image_rules(self._tokenizer.source)

    @cached_property
    def _placeholder(self) -> str:
        """Text that a chat template writes for an image."""
        return self._text(self._rules.template_id)

    def _text(self, token_id: int) -> str:
        text = self._tokenizer.token_text(token_id)
        if not text:
            raise ModelError(f"{self._tokenizer.source}: the tokenizer has no token {token_id} for images")
        return text


_ADDRESS: Final = re.compile(r"data:image/[\w.+-]+;base64,(.*)", re.DOTALL)


def is_image(part: Any) -> bool:
    """Return whether a part of a message's content is an image, as OpenAI's chat messages have it."""
    return isinstance(part, Mapping) and part.get("type") == "image_url"


def image_part(kind: str, data: str) -> dict[str, Any]:
    """Return the part of an image; `kind` is a media type as image/png, `data` the file in base64."""
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def read_image_part(part: Mapping[str, Any], rules: ImageRules, max_pixels: int) -> Picture:
    """Return the image in such a part.

    Raises:
        DataError: it is not in the part itself but elsewhere, or no image.

    Source: OpenAI's API, chat messages (`image_url`); RFC 2397.
    """
    held = part.get("image_url")
    address = held.get("url") if isinstance(held, Mapping) else held
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None:
        raise DataError(f"an image must be given as data:image/...;base64,..., and nothing is fetched: {address!r:.60}")
    try:
        data = base64.b64decode(found.group(1), validate=True)
    except ValueError as error:
        raise DataError(f"an image is not in base64: {error}") from error
    return read_picture(data, Path(), rules, max_pixels)


def refuse_images(row: Row) -> None:
    """Refuse a row with images where no chat template is used."""
    if row.get(IMAGES):
        raise DataError("images need a chat template: set data.chat_template to on")


def _place(messages: list[dict[str, Any]], num_images: int) -> list[dict[str, Any]]:
    placed = [
        {**message, "content": _parts(message["content"])} if "content" in message else message for message in messages
    ]
    found = sum(_is_place(part) for message in placed for part in _list(message.get("content")))
    if found not in ((0, num_images) if num_images else (0,)):
        raise DataError(f"the prompt has {found} places for images ({MARK}), and the row {num_images} images")
    if found < num_images:
        first = next((message for message in placed if message["role"] == "user"), placed[0])
        first["content"] = [{"type": "image"}] * num_images + _list(first.get("content"))
    return placed


def _is_place(part: Mapping[str, Any]) -> bool:
    """Return whether chat templates write a placeholder for a part of a message."""
    return part.get("type") in ("image", "image_url")


def _values(row: Row) -> list[Any]:
    """Return what a row gives for its images: a list, or one alone."""
    value = row.get(IMAGES)
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _list(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return [part for part in content if isinstance(part, dict)]
    return [{"type": "text", "text": str(content)}] if content else []


def _parts(content: Any) -> Any:
    """Return a text with marks as parts; everything else as it is."""
    if not isinstance(content, str) or MARK not in content:
        return content
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(MARK)):
        parts += [{"type": "image"}] * bool(number)
        parts += [{"type": "text", "text": text}] * bool(text)
    return parts
