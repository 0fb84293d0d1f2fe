"""Scores of given tokens equal transformers', whatever is computed together and however the work is cut."""

import asyncio

import numpy as np
import pytest

from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_testing import reference_logprobs, reference_model, tiny_model
from offbeat_types import (
    DataError,
    GenerateRequest,
    OffbeatError,
    RolloutEngineConfig,
    SamplingParams,
    ScoreRequest,
    ScoringEngine,
)

LENGTHS = (0, 1, 40, 7, 40, 130)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request, tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("scored"), request.param)


def draw_request(num_prompt, temperature=1.0, lengths=LENGTHS):
    draw = np.random.default_rng(num_prompt)
    prompt = draw.integers(3, 300, num_prompt).astype(np.int32)
    continuations = tuple(draw.integers(3, 300, length).astype(np.int32) for length in lengths)
    return ScoreRequest(request_id="s", prompt_ids=prompt, continuations=continuations, temperature=temperature)


def with_engine(folder, check, **options):
    async def run():
        config = RolloutEngineConfig(model_path=str(folder), device="cpu", max_model_len=256, options=options)
        engine = await TorchRolloutEngine.create(config)
        try:
            return await check(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.mark.parametrize("options", [{}, {"max_prefill_tokens": 16, "kv_cache_tokens": 512}], ids=["roomy", "tight"])
def test_scores_are_those_of_transformers(folder, options):
    requests = [draw_request(1), draw_request(33), draw_request(90, temperature=0.6)]

    async def score(engine):
        assert isinstance(engine, ScoringEngine)
        assert engine.capabilities.scores
        return [await engine.score(request) for request in requests]

    reference = reference_model(folder)
    for request, scores in zip(requests, with_engine(folder, score, **options), strict=True):
        for ids, found in zip(request.continuations, scores, strict=True):
            assert found.dtype == np.float32
            whole = np.concatenate([request.prompt_ids, ids])
            expected = reference_logprobs(reference, whole, temperature=request.temperature)
            np.testing.assert_allclose(found, expected[len(request.prompt_ids) :], atol=1e-4, rtol=0)


def test_scoring_leaves_what_is_being_sampled_as_it_is(folder):
    request = GenerateRequest(
        request_id="g",
        prompt_ids=np.arange(5, 25, dtype=np.int32),
        num_samples=4,
        params=SamplingParams(max_tokens=60, ignore_eos=True, seed=1),
    )

    async def alone(engine):
        return await engine.generate(request)

    async def together(engine):
        sampling = asyncio.ensure_future(engine.generate(request))
        for _ in range(5):
            await engine.score(draw_request(33))
        assert not sampling.done(), "the test shows nothing: nothing was sampled beside the scoring"
        return await sampling

    for one, other in zip(with_engine(folder, alone), with_engine(folder, together), strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_ids": np.zeros(0, np.int32)}, "at least one token"),
        ({"temperature": 0.0}, "above 0"),
    ],
)
def test_what_cannot_be_scored_is_refused(folder, change, words):
    async def score(engine):
        fields = {"request_id": "s", "prompt_ids": np.arange(3, 12, dtype=np.int32), "continuations": ()} | change
        with pytest.raises(DataError, match=words):
            await engine.score(ScoreRequest(**fields))

    with_engine(folder, score)


def test_an_engine_that_sleeps_scores_nothing(folder):
    async def check(engine):
        await engine.sleep(1)
        with pytest.raises(OffbeatError, match="sleeps without kv_cache"):
            await engine.score(draw_request(5))
        await engine.wake()
        assert len(await engine.score(draw_request(5))) == len(LENGTHS)

    with_engine(folder, check)
