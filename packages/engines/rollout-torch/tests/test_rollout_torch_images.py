"""Samples of prompts with images: their log-probabilities are those of transformers, however they are computed."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor

from offbeat_core import (
    Completion,
    DataError,
    GenerateRequest,
    SamplingParams,
    ScoreRequest,
    VersionSegment,
)
from offbeat_testing import FakeWeightStream, changed_weights, reference_model, tiny_vision_model

pytestmark = pytest.mark.asyncio
FAMILIES = [(family, tied) for family in ("qwen3_vl", "qwen2_5_vl", "qwen3_5") for tied in (True, False)]
SIZES = ((40, 56), (33, 70), (24, 24))


class Yardstick:
    """transformers and the folder's own image processor."""

    def __init__(self, folder):
        self.model, self.processor = reference_model(folder), AutoImageProcessor.from_pretrained(folder)
        config = self.model.config
        self.image_id, self.video_id = config.image_token_id, config.video_token_id
        self.ends = config.vision_start_token_id, config.vision_end_token_id
        draw = np.random.default_rng(3)
        self.images = tuple(draw.integers(0, 256, (*size, 3), np.uint8) for size in SIZES)

    def prompt(self, num_images, seed=0):
        """(ids, images): words, and between them placeholders."""
        draw, images = np.random.default_rng(seed), self.images[:num_images]
        parts = [draw.integers(3, 300, 4)]
        for image in images:
            count = self.processor.get_number_of_image_patches(*image.shape[:2]) // 4
            parts += [[self.ends[0]], np.full(count, self.image_id), [self.ends[1]], draw.integers(3, 300, 3)]
        return np.concatenate(parts).astype(np.int32), images

    def error(self, request, completion, start=0):
        """Largest distance in nats; up to the first placeholder that was sampled, which transformers cannot take."""
        special = np.isin(completion.ids, [self.image_id, self.video_id])
        count = int(np.argmax(special)) if special.any() else len(special)
        assert count > start, "nothing to compare"
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.ids[:count]]).astype(np.int64))[None]
        given = {}
        if request.images:
            given = dict(
                self.processor(images=list(request.images), input_data_format="channels_last", return_tensors="pt")
            )
            given["mm_token_type_ids"] = (ids == self.image_id).int()
        with torch.no_grad():
            logits = self.model(input_ids=ids, use_cache=False, **given).logits[0, :-1]
        chosen = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[len(request.prompt_ids) - 1 :, 0]
        return float(np.abs(completion.logprobs[:count] - chosen.numpy())[start:].max())


def ask(yardstick, num_images, request_id="r", *, num_samples=1, max_tokens=12, seed=0):
    ids, images = yardstick.prompt(num_images, seed)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=5)
    return GenerateRequest(request_id=request_id, prompt_ids=ids, images=images, num_samples=num_samples, params=params)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda param: f"{param[0]}-{'tied' if param[1] else 'untied'}")
def folder(request, tmp_path_factory):
    family, tied = request.param
    return tiny_vision_model(tmp_path_factory.mktemp("images") / family, family, tied=tied)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return tiny_vision_model(tmp_path_factory.mktemp("images") / "model")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return tiny_vision_model(tmp_path_factory.mktemp("images") / "model", "qwen3_5", text={"num_hidden_layers": 3})


@pytest.mark.parametrize("max_prefill_tokens", [16, 2048])
async def test_prompts_of_0_1_and_3_images_decode_together(folder, max_prefill_tokens, open_engine):
    """Whole prompts in one step, or cut within images; three samples share what the tower saw."""
    yardstick = Yardstick(folder)
    requests = [ask(yardstick, count, f"r{count}", num_samples=3, seed=count) for count in (0, 1, 3)]

    async with open_engine(folder, max_model_len=256, options={"max_prefill_tokens": max_prefill_tokens}) as engine:
        assert engine.capabilities.multimodal
        found = await asyncio.gather(*map(engine.generate, requests))
    for each, completions in zip(requests, found, strict=True):
        assert max(yardstick.error(each, completion) for completion in completions) < 1e-4


@pytest.mark.parametrize("model", ["qwen3", "hybrid"])
async def test_new_weights_look_again(model, request, open_engine):
    """Of a sample that is held, the tokens after an update are those of the new tower."""
    folder = request.getfixturevalue(model)
    yardstick = Yardstick(folder)
    request = ask(yardstick, 1, max_tokens=200)

    async with open_engine(folder, max_model_len=256) as engine:
        task = asyncio.create_task(engine.generate(request))
        while (await engine.health()).num_tokens < 8:
            await asyncio.sleep(0.005)
        await engine.pause("keep")
        stream = FakeWeightStream(changed_weights(yardstick.model), 1)
        await engine.update_weights(stream, 1)
        await engine.resume()
        [held] = await task
        [fresh] = await engine.generate(ask(yardstick, 3, "fresh"))
    assert [segment.version for segment in held.segments] == [0, 1]
    assert yardstick.error(ask(yardstick, 3, "fresh"), fresh) < 1e-4
    special = np.isin(held.ids, [yardstick.image_id, yardstick.video_id])
    if not special[: held.segments[0].num_tokens + 1].any():
        assert yardstick.error(request, held, held.segments[0].num_tokens) < 1e-4


async def test_states_of_prompts_with_images_are_those_of_their_samples(hybrid, open_engine):
    """Rows join and leave; where there is too little room for all, samples are set back and see their images again."""
    yardstick = Yardstick(hybrid)
    lengths = {"a": (1, 2, 40), "b": (0, 1, 5), "c": (3, 2, 12), "d": (2, 1, 60), "e": (1, 1, 3), "f": (0, 2, 30)}
    requests = [
        ask(yardstick, num_images, name, num_samples=num_samples, max_tokens=max_tokens, seed=place)
        for place, (name, (num_images, num_samples, max_tokens)) in enumerate(lengths.items())
    ]
    options = {"kv_cache_tokens": 400, "max_prefill_tokens": 48}
    async with open_engine(hybrid, max_model_len=256, max_running=5, options=options) as engine:
        found = await asyncio.gather(*map(engine.generate, requests))
        assert engine._worker._runner.num_prefilled > sum(len(each.prompt_ids) for each in requests), "some came back"
    for each, completions in zip(requests, found, strict=True):
        assert max(yardstick.error(each, completion) for completion in completions) < 1e-4


async def test_what_was_computed_of_images_is_not_kept_for_other_prompts(qwen3, open_engine):
    """Placeholders are the same tokens whatever the image."""
    yardstick = Yardstick(qwen3)
    async with open_engine(qwen3, max_model_len=256) as engine:
        cache = engine._worker._runner.scheduler.cache
        await engine.generate(ask(yardstick, 1, max_tokens=100))
        assert cache.kept_tokens == 0
        await engine.generate(ask(yardstick, 0, max_tokens=100))
        assert cache.kept_tokens > 0


async def test_sleep_gives_the_tower_back_and_an_update_brings_it(qwen3, open_engine):
    yardstick = Yardstick(qwen3)

    async with open_engine(qwen3, max_model_len=256) as engine:
        await engine.sleep(2)
        await engine.wake()
        await engine.update_weights(FakeWeightStream(changed_weights(yardstick.model), 1), 1)
        [completion] = await engine.generate(ask(yardstick, 1))
    assert yardstick.error(ask(yardstick, 1), completion) < 1e-4


async def test_placeholders_that_do_not_fit_the_images_are_refused(qwen3, open_engine):
    yardstick = Yardstick(qwen3)
    ids, images = yardstick.prompt(1)
    wrong = [(ids, ()), (ids, images * 2), (ids[:-6], images), (ids, (np.zeros((64, 64, 3), np.uint8),))]

    async with open_engine(qwen3, max_model_len=256) as engine:
        for prompt_ids, given in wrong:
            with pytest.raises(DataError, match="placeholder tokens"):
                await engine.generate(GenerateRequest(request_id="r", prompt_ids=prompt_ids, images=given))
        assert len(await engine.generate(ask(yardstick, 1))) == 1


@pytest.mark.parametrize("max_prefill_tokens", [1024, 17])
async def test_tokens_after_images_are_scored(folder, max_prefill_tokens, open_engine):
    """Of several continuations, which share what the tower saw; whole prompts in one pass, or cut within images."""
    yardstick, draw = Yardstick(folder), np.random.default_rng(9)
    continuations = tuple(draw.integers(3, 250, length).astype(np.int32) for length in (11, 1, 30))

    async with open_engine(folder, max_model_len=256, options={"max_prefill_tokens": max_prefill_tokens}) as engine:
        assert engine.capabilities.scores_images
        for num_images in (0, 1, 3):
            ids, images = yardstick.prompt(num_images)
            request = ScoreRequest(request_id="s", prompt_ids=ids, continuations=continuations, images=images)
            for continuation, scores in zip(continuations, await engine.score(request), strict=True):
                segments = (VersionSegment(version=0, num_tokens=len(continuation)),)
                scored = Completion(ids=continuation, logprobs=scores, segments=segments, stop_reason="length")
                assert yardstick.error(request, scored) < 1e-4
        with pytest.raises(DataError, match="placeholder tokens"):
            await engine.score(ScoreRequest(request_id="s", prompt_ids=ids, continuations=continuations))
