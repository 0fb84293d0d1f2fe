"""Prompts with images: pixels arrive, and the tokens around them are the trainer's, or the request is refused."""

import asyncio
import functools
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from trtllm_peers import open_in, record_of
from trtllm_sight import Sight

from offbeat_core import ConfigError, DataError, RolloutEngineConfig, SamplingParams
from offbeat_rollout_trtllm import TrtllmRolloutEngine
from offbeat_rollout_trtllm._images import MAX_REQUEST_IMAGE_BYTES, PromptImages
from offbeat_rollout_trtllm._requests import to_engine_params
from offbeat_rollout_trtllm._server_link import HttpEngine, ServerLink
from offbeat_testing import FakeWeightStream, changed_weights

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(90)]


@pytest.fixture
def process(seeing, start_engine):
    return start_engine(seeing, num_workers=2)


@pytest.fixture
def sight(seeing):
    return Sight(seeing)


@pytest.fixture
def open_engine(tmp_path):
    @asynccontextmanager
    async def opened(process, folder, **options):
        options = {"server": process.address, "call_deadline_s": 30.0, **options}
        config = RolloutEngineConfig(model_path=str(folder), max_model_len=256, options=options)
        engine = await TrtllmRolloutEngine.create(config, open_handles=functools.partial(open_in, tmp_path))
        try:
            yield engine
        finally:
            await engine.close()

    return opened


async def test_log_probabilities_after_images_are_those_of_transformers(process, seeing, sight, open_engine):
    async with open_engine(process, seeing) as engine:
        assert engine.capabilities.multimodal
        requests = [sight.request(number, str(number), num_samples=2) for number in (0, 1, 3)]
        for request, completions in zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True):
            assert len({tuple(each.ids) for each in completions}) == 2
            for completion in completions:
                assert sight.error(request, completion) < 1e-4
        (completion, _) = await engine.generate(requests[1])
        inverted = (255 - sight.images[0],)
        assert sight.error(requests[1], completion, inverted) > 1e-2, "the pixels make no difference"


async def test_the_tower_s_weights_come_with_the_others_and_the_engine_is_asked_once(
    process, seeing, sight, open_engine
):
    request = sight.request(1)
    async with open_engine(process, seeing, bucket_bytes=1 << 14) as engine:
        (before,) = await engine.generate(request)
        assert sight.error(request, before) < 1e-4
        weights = changed_weights(sight.model)  # in place
        await engine.update_weights(FakeWeightStream(weights, 1), 1)
        (after,) = await engine.generate(request)
    assert sight.error(request, after) < 1e-4
    assert sight.error(request, before) > 1e-2, "the weights make no difference"
    record = record_of(process.address)
    assert record["num_questions"] == 1
    assert len(record["flushes"]) > 2
    assert any("visual" in name for flush in record["flushes"] for name in flush)


async def test_prompts_that_do_not_fit_their_images_are_refused_and_the_engine_serves_on(
    process, seeing, sight, open_engine
):
    request = sight.request(1)
    ids, pad, images = request.prompt_ids, sight.image_id, request.images
    letters = [sight.tokenizer(letter).input_ids[-1] for letter in "he"]  # which the tokenizer joins
    first, places = ids.tolist().index(pad), ids.tolist().count(pad)
    wrong = {
        rf"\({places} for images\) instead of {len(ids) - 1} \({places - 1}\)": (np.delete(ids, first), images),
        rf"\({places} for images\) instead of {len(ids) + 1} \({places + 1}\)": (np.insert(ids, first, pad), images),
        r"1 runs of placeholder tokens .* for 2 images": (ids, sight.images[:2]),
        r"2 runs of placeholder tokens .* for 1 images": (np.insert(ids, first + 1, 7), images),
        f"holds {places} placeholder tokens of images": (ids, ()),
        "cannot prepare images of 1 x 400 pixels": (ids, (np.zeros((400, 1, 3), np.uint8),)),
        "reads the prompt with images otherwise than the trainer": (np.concatenate([letters * 4, ids]), images),
    }
    async with open_engine(process, seeing) as engine:
        for words, (given, pictures) in wrong.items():
            with pytest.raises(DataError, match=words):
                await engine.generate(replace(request, prompt_ids=given.astype(np.int32), images=pictures))
        (completion,) = await engine.generate(request)
        assert sight.error(request, completion) < 1e-4
    http = HttpEngine(process.address, deadline_s=20.0)
    assert (await http.call("GET", "/standin/record"))["num_running"] == 0, "a refused prompt is still sampled from"


async def test_a_model_for_text_takes_no_image_from_a_request_nor_over_the_wire(
    folder, start_engine, sight, open_engine
):
    """TensorRT-LLM would drop the image without a word."""
    server, request = start_engine(folder), sight.request(1)
    async with open_engine(server, folder) as engine:
        with pytest.raises(ConfigError, match="holds 1 image, and this rollout-trtllm is not multimodal"):
            await engine.generate(replace(request, prompt_ids=np.array([5, 6], np.int32)))
    images = PromptImages(images=request.images, token_id=3, vocab_size=320)
    params = to_engine_params(SamplingParams(max_tokens=2), seed=0, eos_ids=(), max_tokens=2)
    stream = ServerLink(server.address, deadline_s=20.0).stream("1", [5, 3, 6], params, images)
    with pytest.raises(DataError, match="has 1 images, and this engine's model takes none"):
        async with aclosing(stream) as deltas:
            await anext(deltas)


async def test_pixels_travel_as_they_are_and_within_bounds(sight, monkeypatch):
    images = PromptImages(images=sight.images, token_id=3, vocab_size=320)
    again = PromptImages.from_wire(images.to_wire())
    for one, other in zip(images.images, again.images, strict=True):
        np.testing.assert_array_equal(one, other)
    for shape in ([40, 56], [40, 56, 4], [40, 57, 3], [-40, -56, 3]):
        wire = images.to_wire()
        wire["images"][0]["shape"] = shape
        with pytest.raises(DataError, match="it must be"):
            PromptImages.from_wire(wire)
    monkeypatch.setattr("offbeat_rollout_trtllm._images.MAX_REQUEST_IMAGE_BYTES", 1 << 13)
    with pytest.raises(DataError, match="a request carries 8192"):
        PromptImages.from_wire(images.to_wire())
    assert MAX_REQUEST_IMAGE_BYTES > 1 << 20
