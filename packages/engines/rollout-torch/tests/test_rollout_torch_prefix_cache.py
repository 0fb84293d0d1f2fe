"""What ended samples have computed serves prompts that begin with their tokens, and nothing else."""

import numpy as np
import pytest

from offbeat_core import GenerateRequest, SamplingParams
from offbeat_testing import FakeWeightStream, changed_weights, logprob_errors, reference_model, tiny_model

pytestmark = pytest.mark.asyncio
NEW_TOKENS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("m"))


def ask(name, prompt_ids, *, num_samples=1, max_tokens=50):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=5)
    return GenerateRequest(
        request_id=name, prompt_ids=np.asarray(prompt_ids, np.int32), num_samples=num_samples, params=params
    )


def ids_of(seed, num_tokens):
    return np.random.default_rng(seed).integers(3, 300, num_tokens).astype(np.int32)


class Counter:
    """Generates, and says how many tokens were prefilled for it."""

    def __init__(self, engine):
        self._engine, self._runner = engine, engine._worker._runner
        self.cache = self._runner.scheduler.cache

    async def __call__(self, request):
        before = self._runner.num_prefilled
        found = await self._engine.generate(request)
        return found, self._runner.num_prefilled - before


async def play(generate, prompt, num_samples):
    """Two turns; what was prefilled for each sample's second one, and its completion."""
    first, _ = await generate(ask("first", prompt, num_samples=num_samples))
    turns = []
    for number, one in enumerate(first):
        later = np.concatenate((prompt, one.ids, ids_of(number, NEW_TOKENS)))
        [second], num_prefilled = await generate(ask(f"second{number}", later))
        turns.append((one, second, num_prefilled))
    return turns


def assert_same(one, other):
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize(("num_tokens", "num_samples"), [(100, 1), (90, 3), (200, 3)])
async def test_a_later_turn_computes_only_what_is_new(folder, open_engine, num_tokens, num_samples):
    """Of one sample, of a group that copies its prompt, and of one that shares it. The last token drawn is new, too."""
    prompt = ids_of(99, num_tokens)
    async with open_engine(folder) as engine:
        turns = await play(Counter(engine), prompt, num_samples)
    async with open_engine(folder, options={"prefix_cache_share": 0}) as engine:
        plain = await play(Counter(engine), prompt, num_samples)
    for turn, other in zip(turns, plain, strict=True):
        assert_same(turn[0], other[0])
        assert_same(turn[1], other[1])
        assert turn[2] == NEW_TOKENS + 1
        assert other[2] == num_tokens + 50 + NEW_TOKENS


async def test_prompts_that_begin_alike_compute_what_differs(folder, open_engine):
    """Such as those with one system prompt; of a group and of one sample, and less than a whole prompt is kept."""
    system = ids_of(1, 150)
    async with open_engine(folder) as engine:
        generate = Counter(engine)
        await generate(ask("a", np.concatenate((system, ids_of(2, 30)))))
        [one], of_one = await generate(ask("b", np.concatenate((system, ids_of(3, 30)))))
        _, of_group = await generate(ask("c", np.concatenate((system, ids_of(4, 30))), num_samples=4))
        _, of_other = await generate(ask("d", ids_of(5, 180)))
    assert (of_one, of_group, of_other) == (30, 29, 180)
    assert logprob_errors(reference_model(folder), np.concatenate((system, ids_of(3, 30))), one).max() < 1e-4


@pytest.mark.parametrize("static_rows", [False, True], ids=["growing", "static"])
async def test_an_update_and_sleep_drop_what_is_kept(folder, open_engine, static_rows):
    """Keys and values of old weights would be served under new ones: rows of one length are the default on CUDA."""
    model, prompt = reference_model(folder), ids_of(99, 100)
    options = {"static_rows": static_rows, "kv_cache_tokens": 2**15}  # more than eight static rows take
    whole = 100 - static_rows  # in static rows the last token of a prompt is decoded
    async with open_engine(folder, options=options, max_running=8) as engine:
        generate = Counter(engine)
        await generate(ask("a", prompt))
        assert generate.cache.kept_tokens > 0
        await engine.update_weights(FakeWeightStream(changed_weights(model, seed=1), 1), 1)
        assert generate.cache.kept_tokens == 0
        [one], num_prefilled = await generate(ask("b", prompt))
        assert num_prefilled == whole
        assert logprob_errors(model, prompt, one).max() < 1e-4
        await engine.sleep(1)
        assert generate.cache.allocated_tokens == 0
        await engine.wake()
        assert (await generate(ask("c", prompt)))[1] == whole


async def test_the_least_recently_used_goes_first_and_the_budget_holds(folder, open_engine):
    """Room for two sequences of 99 + 50 tokens."""
    prompts = [ids_of(seed, 100) for seed in range(3)]
    async with open_engine(folder, options={"kv_cache_tokens": 1024, "prefix_cache_share": 0.3}) as engine:
        generate = Counter(engine)
        counts = []
        for number, which in enumerate((0, 1, 0, 2, 0, 1)):
            counts.append((await generate(ask(str(number), prompts[which])))[1])
            assert generate.cache.kept_tokens <= 307
        assert counts == [100, 100, 0, 100, 0, 100]
        # Samples that need the whole budget have it.
        await generate(ask("all", ids_of(7, 300), num_samples=8, max_tokens=200))
        assert generate.cache.allocated_tokens <= 1024
