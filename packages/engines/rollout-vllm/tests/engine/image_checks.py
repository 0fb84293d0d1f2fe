"""What engines on a vision-language model must do with images; the yardstick is transformers and the model's processor.

Each check takes an engine that serves a `tiny_vision_model` as it lies in its folder.
"""

import asyncio
from dataclasses import replace

import engine_checks
import numpy as np
import pytest
from engine_checks import draw_adapter, merged

from offbeat_core import DataError, LoraAdapter
from offbeat_testing import FakeWeightStream

SIZES = ((40, 56), (33, 70), (24, 24))
POET = LoraAdapter(name="poet", scale=0.7)


class Trainer:
    """What trains the model: transformers, with the model's own processor."""

    def __init__(self, folder):
        import torch
        import transformers

        self.model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = transformers.AutoProcessor.from_pretrained(folder)
        draw = np.random.default_rng(3)
        self.images = tuple(draw.integers(0, 256, (*size, 3), np.uint8) for size in SIZES)

    def prompt(self, num_images, first=0):
        """(prompt ids as the processor gives them, images)."""
        images = self.images[first : first + num_images]
        text = "look " + "".join("<|vision_start|><|image_pad|><|vision_end|> and " for _ in images) + "say:"
        encoded = self.processor(text=[text], images=list(images) or None, return_tensors="np")
        return encoded["input_ids"][0].astype(np.int32), images

    def logprobs(self, ids, images):
        """[T] float32: of each token given those before it, in one pass; 0 for the first."""
        import torch

        inputs = {}
        tokens = torch.from_numpy(np.asarray(ids, np.int64))[None]
        if images:
            prepared = self.processor.image_processor(images=list(images), return_tensors="pt")
            is_image = (tokens == self.model.config.image_token_id).int()
            inputs = {**prepared, "mm_token_type_ids": is_image}
        with torch.no_grad():
            logits = self.model(input_ids=tokens, use_cache=False, **inputs).logits[0, :-1].float()
        chosen = torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None])[:, 0]
        return np.concatenate([np.zeros(1, np.float32), chosen.numpy()])

    def whole(self, completion):
        """Tokens before the first placeholder that was sampled: a random model does, and transformers takes no more."""
        special = {self.model.config.image_token_id, self.model.config.video_token_id}
        ids = completion.ids.tolist()
        return next((place for place, token in enumerate(ids) if token in special), len(ids))

    def error(self, request, completion, images=None, start=0):
        """Largest distance of a completion's log-probabilities, in nats."""
        count = self.whole(completion)
        ids = np.concatenate([request.prompt_ids, completion.ids[:count]])
        expected = self.logprobs(ids, request.images if images is None else images)[len(request.prompt_ids) :]
        assert count > start, "nothing to compare"
        return float(np.abs(completion.logprobs[:count] - expected)[start:].max())


def request(prompt, images=(), request_id="r", **params):
    return replace(engine_checks.request(request_id, prompt, **params), images=images)


async def check_numbers_of_images(engine, trainer):
    """0, 1 and 3 images, alone and in one batch; a group shares its prompt."""
    requests = [request(*trainer.prompt(number), str(number), num_samples=2) for number in (0, 1, 3)]
    found = [await engine.generate(one) for one in requests]
    found += await asyncio.gather(*map(engine.generate, requests))
    for one, completions in zip([*requests, *requests], found, strict=True):
        assert completions[0].ids.tolist() != completions[1].ids.tolist()
        for completion in completions:
            assert trainer.error(one, completion) < 1e-4
    one = requests[1]
    other = (255 - trainer.images[0],)
    assert trainer.error(one, found[1][0], other) > 1e-2, "the pixels make a difference"


async def check_refusals(engine, trainer):
    """The tokens that the trainer will see are those the engine computes with, or it says so; nothing is repaired."""
    prompt, images = trainer.prompt(1)
    pad = trainer.model.config.image_token_id
    first = prompt.tolist().index(pad)
    wrong = {
        r"take 35 placeholder tokens \(id \d+\), and it holds 34": (np.delete(prompt, first), images),
        "and it holds 36": (np.insert(prompt, first, pad), images),
        "and it holds 1,": (np.concatenate([prompt[:first], [pad], prompt[prompt.tolist().index(pad) + 35 :]]), images),
        r"take 35 and 36 placeholder tokens": (prompt, trainer.images[:2]),
        "holds 35 placeholder tokens of images": (prompt, ()),
        "cannot prepare images of 1 x 400 pixels": (prompt, (np.zeros((400, 1, 3), np.uint8),)),
    }
    for words, (ids, given) in wrong.items():
        with pytest.raises(DataError, match=words):
            await engine.generate(request(ids.astype(np.int32), given))
    (completion,) = await engine.generate(request(prompt, images))
    assert trainer.error(request(prompt, images), completion) < 1e-4


async def check_adapter(engine, trainer):
    """An adapter of the language model, served together with an image."""
    language = {
        name: tensor for name, tensor in draw_adapter(trainer.model, seed=2).items() if ".language_model." in name
    }
    stream = FakeWeightStream(list(language.items()), 9)
    assert await engine.update_weights(stream, 9, adapter=POET) == stream.expected()
    one = replace(request(*trainer.prompt(1)), adapter="poet")
    (completion,) = await engine.generate(one)
    assert [segment.version for segment in completion.segments] == [9]
    with merged(trainer.model, language, POET.scale):
        assert trainer.error(one, completion) < 1e-4
