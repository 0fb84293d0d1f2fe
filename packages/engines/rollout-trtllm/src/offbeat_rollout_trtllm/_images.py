"""Images of a prompt: how they travel to the server, and which tokens TensorRT-LLM reads around them.

TensorRT-LLM 1.2 takes raw images with a text alone: a prompt of token ids that comes with images is decoded, and the
model's own processor encodes it again and puts as many placeholders in the place of each as the image takes. In the ids
that the model gets, a placeholder is a number beyond the vocabulary. The trainer sees all placeholders from the start.
So a prompt goes to the engine with one placeholder for each image, and what it was read as is compared with the ids
that the trainer sees, before the first sampled token counts.

Source: BaseLLM.generate_async in tensorrt_llm/llmapi/llm.py (stored 323158958); Qwen2VLInputProcessorBase in
tensorrt_llm/_torch/models/modeling_qwen2vl.py (stored 2926488359), whose `_postprocess` puts vocab_size + 1.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from offbeat_core import DataError, Image, ModelFolder
from offbeat_rollout_trtllm._versions import import_engine

MAX_REQUEST_IMAGE_BYTES: Final = 128 << 20
"""Pixels of one request at most, on either side of the wire: 44 megapixels, and base64 adds a third."""


@dataclass(frozen=True, kw_only=True)
class PromptImages:
    """The images of one prompt, in the order of their placeholders.

    Args:
        images: each [H, W, 3] uint8.
        token_id: placeholder; the prompt holds one for each place that an image takes.
        vocab_size: ids lie in [0, vocab_size).
    """

    images: tuple[Image, ...]
    token_id: int
    vocab_size: int

    @classmethod
    def of(cls, images: Sequence[Image], folder: ModelFolder, whose: str) -> Self:
        """Take the images of a request to a model with vision.

        Args:
            images: of the request.
            folder: of the model.
            whose: the request, for errors.

        Raises:
            DataError: the model names no placeholder, or the pixels are more than a request carries.
        """
        if folder.image_token_id is None:
            raise DataError(
                f"{whose}: {folder.path}/config.json names no image_token_id: images have no place in a prompt"
            )
        num_bytes = sum(image.nbytes for image in images)
        if num_bytes > MAX_REQUEST_IMAGE_BYTES:
            raise DataError(
                f"{whose}: its images have {num_bytes} bytes of pixels, and a request carries "
                f"{MAX_REQUEST_IMAGE_BYTES}: scale them to what the model sees"
            )
        return cls(images=tuple(images), token_id=folder.image_token_id, vocab_size=folder.vocab_size)

    def to_wire(self) -> dict[str, Any]:
        """Return JSON data: shapes, and pixels in base64."""
        packed = [
            {"shape": list(image.shape), "pixels": base64.b64encode(np.ascontiguousarray(image).tobytes()).decode()}
            for image in self.images
        ]
        return {"images": packed, "token_id": self.token_id, "vocab_size": self.vocab_size}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_wire` gave.

        Raises:
            DataError: pixels are not as many as the shape says, or too many.
        """
        images = tuple(_unpack(each) for each in data["images"])
        if (num_bytes := sum(image.nbytes for image in images)) > MAX_REQUEST_IMAGE_BYTES:
            raise DataError(f"images of {num_bytes} bytes, and a request carries {MAX_REQUEST_IMAGE_BYTES}")
        return cls(images=images, token_id=int(data["token_id"]), vocab_size=int(data["vocab_size"]))

    def engine_prompt(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return TensorRT-LLM's TokensPrompt: one placeholder for each image, and the images as Pillow's.

        Raises:
            DataError: other runs of placeholders than images.
            BackendError: Pillow is not installed where the engine runs.
        """
        array = np.asarray(ids)
        is_place = array == self.token_id
        overlaps = is_place & np.concatenate([[False], is_place[:-1]])
        num_runs = int(is_place.sum() - overlaps.sum())
        if num_runs != len(self.images):
            raise DataError(
                f"the prompt holds {num_runs} runs of placeholder tokens (id {self.token_id}) for {len(self.images)} "
                "images: each image needs one, with another token between two"
            )
        pillow = import_engine("PIL.Image")
        return {
            "prompt_token_ids": array[~overlaps].tolist(),
            "multi_modal_data": {"image": [pillow.fromarray(image) for image in self.images]},
        }

    def check_read(self, read: Sequence[int], ids: Sequence[int]) -> None:
        """Compare what the engine made of a prompt with the ids that the trainer sees.

        Raises:
            DataError: they are other tokens, with the first that differs.
        """
        if len(read) == len(ids):
            pairs = enumerate(zip(read, ids, strict=True))
            wrong = next((place for place, (found, wanted) in pairs if not self._is_same(found, wanted)), None)
            if wrong is None:
                return
            what = f"token {wrong} as {read[wrong]} instead of {ids[wrong]}"
        else:
            places = sum(1 for found in read if self._is_same(found, self.token_id))
            what = f"{len(read)} tokens ({places} for images) instead of {len(ids)} ({list(ids).count(self.token_id)})"
        raise DataError(
            f"TensorRT-LLM reads the prompt with images otherwise than the trainer: {what}; it decodes the ids and "
            "encodes them again, so give ids that the model's own processor makes of a text, and images in the size "
            "that the model sees"
        )

    def _is_same(self, found: int, wanted: int) -> bool:
        return found == wanted or (wanted == self.token_id and found >= self.vocab_size)


def _unpack(packed: Mapping[str, Any]) -> Image:
    shape = tuple(int(size) for size in packed["shape"])
    pixels = np.frombuffer(base64.b64decode(packed["pixels"], validate=True), np.uint8)
    if len(shape) != 3 or min(shape) < 1 or shape[2] != 3 or len(pixels) != shape[0] * shape[1] * 3:
        raise DataError(f"an image of shape {shape} came with {len(pixels)} bytes: it must be [H, W, 3] uint8")
    return pixels.reshape(shape)
