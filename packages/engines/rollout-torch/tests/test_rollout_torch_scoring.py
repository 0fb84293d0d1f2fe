"""Scores of given tokens equal transformers', whatever is computed together and however the work is cut."""

import asyncio

import numpy as np
import pytest

from offbeat_core import (
    DataError,
    GenerateRequest,
    OffbeatError,
    SamplingParams,
    ScoreRequest,
    ScoringEngine,
)
from offbeat_testing import reference_logprobs, reference_model, tiny_model

pytestmark = pytest.mark.asyncio
LENGTHS = (0, 1, 40, 7, 40, 130)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request, tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("scored"), request.param)


def draw_request(num_prompt, temperature=1.0, lengths=LENGTHS):
    draw = np.random.default_rng(num_prompt)
    prompt = draw.integers(3, 300, num_prompt).astype(np.int32)
    continuations = tuple(draw.integers(3, 300, length).astype(np.int32) for length in lengths)
    return ScoreRequest(request_id="s", prompt_ids=prompt, continuations=continuations, temperature=temperature)


@pytest.mark.parametrize("options", [{}, {"max_prefill_tokens": 16, "kv_cache_tokens": 512}], ids=["roomy", "tight"])
async def test_scores_are_those_of_transformers(folder, options, open_engine):
    requests = [draw_request(1), draw_request(33), draw_request(90, temperature=0.6)]

    async with open_engine(folder, max_model_len=256, options=options) as engine:
        assert isinstance(engine, ScoringEngine)
        assert engine.capabilities.scores
        found = [await engine.score(request) for request in requests]
    reference = reference_model(folder)
    for request, scores in zip(requests, found, strict=True):
        for ids, logprobs in zip(request.continuations, scores, strict=True):
            assert logprobs.dtype == np.float32
            whole = np.concatenate([request.prompt_ids, ids])
            expected = reference_logprobs(reference, whole, temperature=request.temperature)
            np.testing.assert_allclose(logprobs, expected[len(request.prompt_ids) :], atol=1e-4, rtol=0)


async def test_scoring_leaves_what_is_being_sampled_as_it_is(folder, open_engine):
    request = GenerateRequest(
        request_id="g",
        prompt_ids=np.arange(5, 25, dtype=np.int32),
        num_samples=4,
        params=SamplingParams(max_tokens=60, ignore_eos=True, seed=1),
    )

    async with open_engine(folder, max_model_len=256) as engine:
        alone = await engine.generate(request)
    async with open_engine(folder, max_model_len=256) as engine:
        sampling = asyncio.ensure_future(engine.generate(request))
        for _ in range(5):
            await engine.score(draw_request(33))
        assert not sampling.done(), "the test shows nothing: nothing was sampled beside the scoring"
        together = await sampling
    for one, other in zip(alone, together, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()


async def test_a_temperature_of_0_is_refused(folder, open_engine):
    async with open_engine(folder, max_model_len=256) as engine:
        with pytest.raises(DataError, match="above 0"):
            await engine.score(draw_request(5, temperature=0.0))


async def test_an_engine_that_sleeps_scores_nothing(folder, open_engine):
    async with open_engine(folder, max_model_len=256) as engine:
        await engine.sleep(1)
        with pytest.raises(OffbeatError, match="sleeps without kv_cache"):
            await engine.score(draw_request(5))
        await engine.wake()
        assert len(await engine.score(draw_request(5))) == len(LENGTHS)
