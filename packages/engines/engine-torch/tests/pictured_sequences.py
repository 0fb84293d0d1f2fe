"""Sequences with images for tiny vision-language models, and what transformers says of them."""

import json
import math
from importlib import import_module

import numpy as np
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from offbeat_core import TrainSequence

SIZES = ((40, 56), (33, 70), (24, 24))


TOWERS = ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.", "model.embed_vision.")
"""Beginnings of the names of what turns pixels into embeddings."""


def token_ids(folder):
    """Ids of a vision model's placeholder, and of the tokens before and after an image."""
    config = json.loads((folder / "config.json").read_text())
    found = {name.partition("_token_")[0]: value for name, value in config.items() if "_token_" in name}
    names = ("image", "boi", "eoi") if "boi" in found else ("image", "vision_start", "vision_end")
    return tuple(found[name] for name in names)


def num_placeholders(processor, image):
    """Count the placeholder tokens of an image, by its family's image processor."""
    height, width = image.shape[:2]
    family = type(processor).__name__
    if family.startswith("Gemma3"):
        return processor.size["height"] * processor.size["width"] // 64
    if family.startswith("Gemma4"):
        resize = import_module(type(processor).__module__).get_aspect_ratio_preserving_size
        return math.prod(resize(height, width, 4, processor.max_soft_tokens * 4, 2)) // 64
    return processor.get_number_of_image_patches(height, width) // 4


def draw_image(size, seed):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)


class Pictures:
    """Draws sequences for one model folder."""

    def __init__(self, folder):
        self.folder = folder
        self.image_id, self.start_id, self.end_id = token_ids(folder)
        self.processor = AutoImageProcessor.from_pretrained(folder)

    def prompt(self, images, rng):
        """Words, and between them the images' placeholders."""
        parts = [rng.integers(3, 300, 3)]
        for image in images:
            count = num_placeholders(self.processor, image)
            parts += [[self.start_id], np.full(count, self.image_id), [self.end_id], rng.integers(3, 300, 2)]
        return np.concatenate(parts).astype(np.int32)

    def sequence(self, images, seed, *, prompt=None, length=7):
        rng = np.random.default_rng(seed)
        prompt = self.prompt(images, rng) if prompt is None else prompt
        ids = np.concatenate([prompt, rng.integers(3, 300, length)]).astype(np.int32)
        mask = np.arange(len(ids)) >= len(prompt)
        mask[len(prompt) + 2 :: 3] = False
        advantage = rng.normal(size=len(ids)).astype(np.float32)
        return TrainSequence(ids=ids, loss_mask=mask, extras={"advantage": advantage}, images=tuple(images))

    def groups(self, counts, samples=2, seed=0):
        """For each count a prompt with so many images, of different sizes, and its samples."""
        made = []
        for number, count in enumerate(counts):
            images = [draw_image(SIZES[place % 3], 10 * seed + number + place) for place in range(count)]
            prompt = self.prompt(images, np.random.default_rng([seed, number]))
            made += [self.sequence(images, [seed, number, each], prompt=prompt) for each in range(samples)]
        return made


class Yardstick:
    """transformers and the model's own image processor, one sequence at a time."""

    def __init__(self, folder, dtype=torch.float32):
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        self.model.eval()
        self.processor = AutoImageProcessor.from_pretrained(folder)

    def given(self, sequence):
        """Return the inputs of images, and which tokens they are; those in the loss were sampled."""
        made = self.processor(images=list(sequence.images), input_data_format="channels_last", return_tensors="pt")
        kinds = (sequence.ids == self.model.config.image_token_id) & ~sequence.loss_mask
        kinds_name = "token_type_ids" if self.model.config.model_type == "gemma3" else "mm_token_type_ids"
        names = ("pixel_values", "image_grid_thw", "image_position_ids")
        return {name: made[name] for name in names if name in made} | {kinds_name: torch.from_numpy(kinds)[None].int()}

    def logprobs(self, sequence):
        """[T - 1] of each token given those before it."""
        ids = torch.from_numpy(sequence.ids.astype(np.int64))[None]
        given = self.given(sequence) if sequence.images else {}
        logits = self.model(input_ids=ids, use_cache=False, **given).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]

    def gradients(self, sequences):
        """Loss and gradients of a policy gradient over all loss tokens."""
        total = sum(int(each.loss_mask.sum()) for each in sequences)
        loss = torch.zeros((), dtype=torch.float64)
        for each in sequences:
            mask = torch.from_numpy(each.loss_mask[1:])
            advantage = torch.from_numpy(each.extras["advantage"][1:])[mask].double()
            loss = loss - (self.logprobs(each)[mask] * advantage).sum() / total
        loss.backward()
        return float(loss.detach()), {name: each.grad for name, each in self.model.named_parameters()}
