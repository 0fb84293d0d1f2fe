"""Images of a data set's rows: kept as the file they came in, until their pixels are wanted.

A picture is brought to the size in which the model sees it here, once. A Qwen-VL processor leaves an image of that size
as it is, so that engines which would resize differently (torchvision's and Pillow's bicubic are not the same) are given
equal pixels.
"""

import base64
import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from offbeat_data._image_rules import ImageRules
from offbeat_types import BackendError, DataError, Image

_PREVIEW_PX: Final = 256
_BROKEN = (OSError, ValueError, SyntaxError)  # what Pillow raises about a file
_INSTALL = 'images are read with Pillow; install it with: pip install "offbeat-data[images]"'


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One image of a prompt, as plain data that travels between processes.

    Args:
        data: an image file: PNG, JPEG, or what else Pillow reads.
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
        try:
            upright = _on_white(_upright(image))
        except _BROKEN as error:
            raise _broken(self.data, error) from error
        if upright.size != (self.width, self.height):
            upright = upright.resize((self.width, self.height), _pillow().Resampling.BICUBIC)
        return np.array(upright, dtype=np.uint8)

    def preview(self) -> str:
        """A small copy for people, at most 256 pixels wide and high, as a `data:` address that a page can hold.

        Raises:
            DataError, BackendError: as `pixels`.

        Source: RFC 2397.
        """
        image = _pillow().fromarray(self.pixels())
        image.thumbnail((_PREVIEW_PX, _PREVIEW_PX))
        files = {
            kind: io.BytesIO() for kind in ("png", "jpeg")
        }  # drawings are smaller as one, photographs as the other
        for kind, file in files.items():
            image.save(file, format=kind, optimize=True)
        kind, file = min(files.items(), key=lambda each: each[1].tell())
        return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def read_picture(value: Any, folder: Path, rules: ImageRules) -> Picture:
    """What a row gives for an image.

    Args:
        value: bytes of an image file; its path; or, as datasets stores images, {bytes, path} with one of them null.
        folder: of the data, which relative paths start from.
        rules: of the model.

    Raises:
        DataError: another value, no such file, no image, or a shape that the model does not take.
        BackendError: Pillow is not installed.

    Source: huggingface/datasets, features/image.py (struct of bytes and path).
    """
    data = _read(value, folder)
    image = _open(data)
    width, height = image.size
    try:
        if _turns_by_quarter(image):
            width, height = height, width
    except _BROKEN as error:
        raise _broken(data, error) from error
    height, width = rules.fit(height, width)
    return Picture(data=data, height=height, width=width)


def picture_key(value: Any) -> Any:
    """What tells an image from another, as JSON data: a digest of its bytes, or its path."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    return hashlib.blake2b(value, digest_size=16).hexdigest() if isinstance(value, bytes) else value


def _read(value: Any, folder: Path) -> bytes:
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
    """The header of an image file; its pixels are decoded later."""
    pillow = _pillow()
    try:
        return pillow.open(io.BytesIO(data))
    except (*_BROKEN, pillow.DecompressionBombError) as error:
        raise DataError(f"{len(data)} bytes are no image that Pillow reads: {error}; write PNG or JPEG") from error


def _broken(data: bytes, error: Exception) -> DataError:
    return DataError(f"an image of {len(data)} bytes is broken: {error}; write it again")


def _turns_by_quarter(image: Any) -> bool:
    """Whether the camera was held upright: width and height are the other way round.

    Source: EXIF 2.3, tag 0x0112. It may stand behind the pixels of a PNG, which is why Pillow decodes those for it.
    """
    return int(image.getexif().get(0x0112, 1)) >= 5


def _upright(image: Any) -> Any:
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _on_white(image: Any) -> Any:
    """As RGB, seen on a white page: the colours of what is transparent mean nothing, and are black in most drawings.

    Engines are given these pixels, so that none decides on a ground of its own: transformers would drop transparency.

    Source: vLLM 0.32, multimodal/image.py, rgba_to_rgb (the same ground, the same way).
    """
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    page = _pillow().new("RGB", image.size, "white")
    page.paste(image, mask=image.getchannel("A"))
    return page
