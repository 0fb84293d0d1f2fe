"""Exact numerics: a sample's log-probabilities have the same bits alone, among others, and however it is computed."""

import asyncio

import numpy as np
import pytest

from offbeat_core import ConfigError, GenerateRequest, SamplingParams, ScoreRequest
from offbeat_testing import logprob_errors, reference_model, tiny_model

pytestmark = pytest.mark.asyncio
LENGTHS = (1, 7, 63, 130, 150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Wide enough that some matrices are packed and some are not."""
    return tiny_model(tmp_path_factory.mktemp("m"), "qwen3", hidden_size=192)


def ask(index, *, num_samples=1, max_tokens=8, temperature=0.7):
    ids = np.random.default_rng(index).integers(3, 300, LENGTHS[index]).astype(np.int32)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=10 * index, temperature=temperature)
    return GenerateRequest(request_id=str(index), prompt_ids=ids, num_samples=num_samples, params=params)


def assert_same(one, other):
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_array_equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_sample_does_not_depend_on_others_and_on_how_it_is_computed(folder, open_engine, dtype):
    exact = {"numerics": "exact"}
    requests = [ask(0), ask(1, max_tokens=60), ask(2), ask(3, num_samples=2), ask(4)]
    async with open_engine(folder, dtype=dtype, num_threads=1, options=exact) as engine:
        alone = [await engine.generate(each) for each in requests]
        again = await asyncio.gather(*(engine.generate(each) for each in requests))  # prompts are kept
        model = reference_model(folder)
        bound = {"float32": 1e-4, "bfloat16": 0.2}[dtype]
        assert max(logprob_errors(model, requests[3].prompt_ids, alone[3][0], temperature=0.7)) < bound
        [scores] = await engine.score(
            ScoreRequest(
                request_id="s", prompt_ids=requests[1].prompt_ids, continuations=(alone[1][0].ids,), temperature=0.7
            )
        )
        np.testing.assert_array_equal(scores, alone[1][0].logprobs)
    cramped = {**exact, "max_prefill_tokens": 20, "kv_cache_tokens": 512, "prefix_cache_share": 0.0}
    async with open_engine(folder, dtype=dtype, num_threads=1, options=cramped) as engine:
        together = await asyncio.gather(*(engine.generate(each) for each in requests))
    for one, other, third in zip(alone, again, together, strict=True):
        for sample, same, cut in zip(one, other, third, strict=True):
            assert_same(sample, same)
            assert_same(sample, cut)


async def test_what_computes_otherwise_is_refused(tmp_path, folder, open_engine):
    for options, named in (({"static_rows": True}, "static_rows"), ({"pack_weights": False}, "pack_weights")):
        with pytest.raises(ConfigError, match=named):
            async with open_engine(folder, options={"numerics": "exact", **options}):
                pass
    with pytest.raises(ConfigError, match="weight_format"):
        async with open_engine(folder, weight_format="fp8", options={"numerics": "exact"}):
            pass
    with pytest.raises(ConfigError, match="this model is of qwen3_moe"):
        async with open_engine(tiny_model(tmp_path, "qwen3_moe"), options={"numerics": "exact"}):
            pass
