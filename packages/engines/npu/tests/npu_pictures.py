"""A prompt with two images of different sizes, for the tiny vision-language models."""

import json

import numpy as np

from offbeat_testing import tiny_vision_model

PIXELS = 8  # of a side of what one placeholder stands for
IMAGES = tuple(
    np.random.default_rng(side).integers(0, 256, (side, 2 * side, 3), np.uint8) for side in (3 * PIXELS, 2 * PIXELS)
)


def pictured(folder, family):
    """Write a model, and draw ids that begin with the placeholders of `IMAGES`: [N] int32, and how many are prompt."""
    tiny_vision_model(folder, family)
    config = json.loads((folder / "config.json").read_text())
    image, start, end = (config[f"{name}_token_id"] for name in ("image", "vision_start", "vision_end"))
    parts = [[start, *[image] * (each.shape[0] * each.shape[1] // PIXELS**2), end, 7] for each in IMAGES]
    prompt = np.concatenate(parts)
    ids = np.concatenate([prompt, np.random.default_rng(0).integers(3, 300, 9)]).astype(np.int32)
    return ids, len(prompt)
