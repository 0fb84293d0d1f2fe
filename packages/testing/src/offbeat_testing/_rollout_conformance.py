"""What the rollout contract promises, as tests. Every engine, real or fake, runs the same ones."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat_testing._fakes import FakeWeightStream
from offbeat_testing._models import changed_weights, reference_model
from offbeat_testing._rollout_weights import (
    LONG,
    PROMPT,
    ScoreConformance,
    WeightConformance,
    needs,
    on_engine,
    suite_request,
)
from offbeat_types import (
    ConfigError,
    DataError,
    LoraAdapter,
    OffbeatError,
    RolloutEngine,
)


class RolloutConformance(WeightConformance, ScoreConformance):
    """Mix into a test class; say how to make the engine.

        class TestMyEngine(RolloutConformance):
            async def make_engine(self, config):
                return await MyEngine.create(config)

    The model is a tiny one made by `tiny_model`; override `model_folder` for another, which the engine must serve
    unchanged in float32 with room for 512 tokens. Everything runs under a deadline of `deadline_s`. An engine that is
    dear to start can be lent from test to test: override `open_engine`.
    """

    # Sampling

    @on_engine
    async def test_logprobs_are_those_of_transformers(self, engine: RolloutEngine, reference: Any) -> None:
        """Log-probabilities equal the reference, at temperature 1 and another."""
        for temperature in (1.0, 0.7):
            (completion,) = await engine.generate(suite_request(temperature=temperature))
            assert completion.stop_reason == "length"
            assert len(completion.ids) == 24
            self.assert_logprobs(reference, completion, temperature)

    @on_engine
    async def test_temperature_zero_takes_the_likeliest_token(self, engine: RolloutEngine, reference: Any) -> None:
        """Greedy decoding equals transformers' and reports log-probabilities at temperature 1."""
        import torch

        (completion,) = await engine.generate(suite_request(temperature=0.0))
        self.assert_logprobs(reference, completion)
        ids = torch.from_numpy(np.concatenate([PROMPT, completion.ids]).astype(np.int64))
        with torch.no_grad():
            logits = reference(ids[None]).logits[0, len(PROMPT) - 1 : -1]
        gap = logits.amax(-1) - logits.gather(-1, ids[len(PROMPT) :, None])[:, 0]
        assert float(gap.max()) < self.tolerance

    @on_engine
    async def test_a_seed_reproduces_and_another_differs(self, engine: RolloutEngine) -> None:
        """Same seed, same tokens, alone or in company; another seed, other tokens."""
        (alone,) = await engine.generate(suite_request(seed=5))
        company = [engine.generate(suite_request(str(seed), seed=seed)) for seed in (3, 5, 9, 11)]
        _, (again,), (other,), _ = await asyncio.gather(*company)
        np.testing.assert_array_equal(alone.ids, again.ids)
        assert alone.ids.tolist() != other.ids.tolist()

    @on_engine
    async def test_sample_i_draws_with_seed_plus_i(self, engine: RolloutEngine, reference: Any) -> None:
        """A group holds n samples in order; each equals a request of its own."""
        group = await engine.generate(suite_request(num_samples=4, seed=5))
        assert len(group) == 4
        assert len({tuple(completion.ids.tolist()) for completion in group}) == 4
        for index, completion in enumerate(group):
            (single,) = await engine.generate(suite_request(f"s{index}", seed=5 + index))
            np.testing.assert_array_equal(completion.ids, single.ids)
            self.assert_logprobs(reference, completion)

    @on_engine
    async def test_stop_token_ends_a_sample(self, engine: RolloutEngine) -> None:
        """The stop token is the last one, and the tokens before it are unchanged."""
        (free,) = await engine.generate(suite_request())
        stop = int(free.ids[10])
        (stopped,) = await engine.generate(suite_request(stop_token_ids=(stop,)))
        first = free.ids.tolist().index(stop)
        np.testing.assert_array_equal(stopped.ids, free.ids[: first + 1])
        assert stopped.stop_reason == "stop"

    @on_engine
    async def test_stop_string_over_a_token_border_ends_a_sample(self, engine: RolloutEngine) -> None:
        """A string that no single token holds stops at the token that completes it."""
        (free,) = await engine.generate(suite_request(max_tokens=200))
        stop = _pair_of_letters(free.text)
        (stopped,) = await engine.generate(suite_request(max_tokens=200, stop=("never this", stop)))
        assert stopped.stop_reason == "stop"
        assert stop in stopped.text
        assert stop not in stopped.text[: -len(stop)]
        np.testing.assert_array_equal(stopped.ids, free.ids[: len(stopped.ids)])

    # Ending and pausing

    @on_engine
    async def test_abort_keeps_the_tokens_so_far(self, engine: RolloutEngine, reference: Any) -> None:
        """An aborted request returns what it has, marked; unknown ids are ignored."""
        task = asyncio.create_task(engine.generate(suite_request("long", num_samples=2, max_tokens=LONG)))
        await self.tokens(engine, 6)
        await engine.abort("nobody")
        await engine.abort("long")
        for completion in await task:
            assert completion.stop_reason == "aborted"
            assert 0 < len(completion.ids) < LONG
            self.assert_logprobs(reference, completion)

    @on_engine
    async def test_pause_wait_finishes_what_is_in_flight(self, engine: RolloutEngine) -> None:
        """`wait` returns when nothing is in flight; a request that comes later waits for `resume`."""
        needs(engine, "wait")
        task = asyncio.create_task(engine.generate(suite_request(max_tokens=40)))
        await self.tokens(engine, 2)
        await engine.pause("wait")
        later = asyncio.create_task(engine.generate(suite_request("later")))
        (completion,) = await task
        assert completion.stop_reason == "length"
        await asyncio.sleep(0.1)
        assert not later.done()
        await engine.resume()
        assert len((await later)[0].ids) == 24

    @on_engine
    async def test_pause_abort_returns_what_is_in_flight(self, engine: RolloutEngine) -> None:
        """`abort` ends everything in flight as aborted, and sampling works after `resume`."""
        needs(engine, "abort")
        task = asyncio.create_task(engine.generate(suite_request(max_tokens=LONG)))
        await self.tokens(engine, 4)
        await engine.pause("abort")
        assert (await task)[0].stop_reason == "aborted"
        await engine.resume()
        assert (await engine.generate(suite_request("next")))[0].stop_reason == "length"

    @on_engine
    async def test_pause_keep_holds_and_goes_on(self, engine: RolloutEngine) -> None:
        """A sample that was held becomes what it would have become."""
        needs(engine, "keep")
        (free,) = await engine.generate(suite_request(max_tokens=LONG))
        task = asyncio.create_task(engine.generate(suite_request(max_tokens=LONG)))
        await self.tokens(engine, 4)
        await engine.pause("keep")
        before = (await engine.health()).num_tokens
        await asyncio.sleep(0.1)
        assert (await engine.health()).num_tokens == before
        assert not task.done()
        await engine.resume()
        (held,) = await task
        np.testing.assert_array_equal(held.ids, free.ids)

    # What an engine does not declare

    @on_engine
    async def test_what_is_not_declared_is_refused_and_the_engine_serves_on(
        self, engine: RolloutEngine, model_folder: Path, reference: Any
    ) -> None:
        """An image, an adapter or an adapter's update that the engine does not take is one clear error, at once."""
        image = np.zeros((16, 24, 3), np.uint8)
        stream = FakeWeightStream(changed_weights(reference), 1)
        if not engine.capabilities.multimodal:
            with pytest.raises(ConfigError, match=r"request 'r' holds 1 image, .* not multimodal"):
                await engine.generate(replace(suite_request(), images=(image,)))
        if not engine.capabilities.lora:
            with pytest.raises(ConfigError, match=r"request 'r' wants the adapter 'poet', .* not do lora"):
                await engine.generate(replace(suite_request(), adapter="poet"))
            with pytest.raises(ConfigError, match=r"brings the adapter 'poet', .* not do lora"):
                await engine.update_weights(stream, 1, adapter=LoraAdapter(name="poet", scale=2.0))
        await engine.drop_adapter("nobody")
        (completion,) = await engine.generate(suite_request())
        assert completion.oldest_version == 0
        self.assert_logprobs(reference_model(model_folder), completion)

    @on_engine
    async def test_an_adapter_that_was_not_sent_is_refused_by_name(self, engine: RolloutEngine) -> None:
        """An engine with adapters names those that it has."""
        if not engine.capabilities.lora:
            pytest.skip("the engine takes no adapters")
        with pytest.raises(ConfigError, match="'nobody'"):
            await engine.generate(replace(suite_request(), adapter="nobody"))
        assert len((await engine.generate(suite_request()))[0].ids) == 24

    @on_engine
    async def test_an_image_that_is_none_is_refused(self, engine: RolloutEngine) -> None:
        """Another dtype or number of axes than [H, W, 3] uint8 is an error and not a guess."""
        if not engine.capabilities.multimodal:
            pytest.skip("the engine takes no images")
        wrong: list[Any] = [np.zeros((16, 24, 3), np.float32), np.zeros((16, 24), np.uint8)]
        for image in wrong:
            with pytest.raises(DataError, match="image 0 must be"):
                await engine.generate(replace(suite_request(), images=(image,)))

    # Life

    @on_engine
    async def test_health_counts(self, engine: RolloutEngine) -> None:
        """Health answers at once, before, while and after sampling."""
        idle = await engine.health()
        assert (idle.num_running, idle.num_tokens, idle.version) == (0, 0, 0)
        await engine.generate(suite_request(num_samples=3))
        done = await engine.health()
        assert done.num_tokens == 3 * 24
        assert (done.num_running, done.num_waiting) == (0, 0)
        assert 0 < done.busy_s <= done.uptime_s

    @on_engine
    async def test_close_aborts_what_is_in_flight(self, engine: RolloutEngine) -> None:
        """In-flight requests return as aborted; later ones are refused."""
        task = asyncio.create_task(engine.generate(suite_request(max_tokens=LONG)))
        await self.tokens(engine, 3)
        await engine.close()
        assert (await task)[0].stop_reason == "aborted"
        with pytest.raises(OffbeatError):
            await engine.generate(suite_request("late"))


def _pair_of_letters(text: str) -> str:
    """Return two neighbouring characters of plain ASCII whose pair first appears late enough to be worth a test."""
    for index in range(10, len(text) - 1):
        pair = text[index : index + 2]
        if pair.isascii() and pair.isprintable() and pair not in text[: index + 1]:
            return pair
    raise AssertionError("no such pair in the sampled text; take a longer sample")
