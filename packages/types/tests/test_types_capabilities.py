"""What an engine does not declare is refused with one error, whatever the engine."""

import re
from typing import Any

import numpy as np
import pytest

from offbeat_types import ConfigError, DataError, GenerateRequest, LoraAdapter, RolloutCapabilities

IMAGE = np.zeros((2, 5, 3), np.uint8)
NOTHING = RolloutCapabilities(pause_modes=("wait",))
EVERYTHING = RolloutCapabilities(pause_modes=("wait",), multimodal=True, lora=True)


def request(**more: Any) -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt_ids=np.array([1], np.int32), **more)


def test_text_is_what_every_engine_takes() -> None:
    NOTHING.check(request(), "engine")
    NOTHING.check_adapter(None, "engine")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"adapter": "poet"}, "request 'r' wants the adapter 'poet', and this engine does not do lora"),
        ({"images": (IMAGE,)}, "request 'r' holds 1 image, and this engine is not multimodal"),
        ({"images": (IMAGE, IMAGE)}, "request 'r' holds 2 images, and this engine is not multimodal"),
    ],
)
def test_what_is_beyond_an_engine_is_named(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        NOTHING.check(request(**more), "engine")
    EVERYTHING.check(request(**more), "engine")


def test_an_update_with_an_adapter_is_refused_where_there_can_be_none() -> None:
    adapter = LoraAdapter(name="poet", scale=0.5)
    with pytest.raises(ConfigError, match="brings the adapter 'poet', and this engine does not do lora"):
        NOTHING.check_adapter(adapter, "engine")
    EVERYTHING.check_adapter(adapter, "engine")


@pytest.mark.parametrize(
    "image",
    [np.zeros((2, 5), np.uint8), np.zeros((3, 2, 5), np.uint8), np.zeros((2, 5, 3), np.float32), IMAGE[:0]],
    ids=["grey", "channels first", "float", "empty"],
)
def test_an_image_is_pixels_by_row_column_and_colour(image: Any) -> None:
    with pytest.raises(DataError, match=re.escape(f"image 1 must be [H, W, 3] uint8, got {image.shape} {image.dtype}")):
        EVERYTHING.check(request(images=(IMAGE, image)), "engine")


@pytest.mark.parametrize(("name", "scale"), [("", 1.0), ("poet", float("nan")), ("poet", float("inf"))])
def test_an_adapter_has_a_name_and_a_scale(name: str, scale: float) -> None:
    with pytest.raises(ConfigError, match="needs a name and a finite scale"):
        LoraAdapter(name=name, scale=scale)
