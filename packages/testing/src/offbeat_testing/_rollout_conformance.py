"""What the rollout contract promises, as tests. Every engine, real or fake, runs the same ones."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat_testing._fakes import FakeWeightStream
from offbeat_testing._reference import changed_weights, reference_logprobs, reference_model
from offbeat_testing._score_conformance import ScoreConformance
from offbeat_testing._tiny_models import TinyFamily, tiny_model
from offbeat_types import (
    Completion,
    ConfigError,
    DataError,
    GenerateRequest,
    LoraAdapter,
    OffbeatError,
    RolloutEngine,
    RolloutEngineConfig,
    SamplingParams,
    WeightSyncError,
)

PROMPT = np.asarray([10, 44, 81, 7, 200, 31], np.int32)
LONG = 480


def _request(request_id: str = "r", *, num_samples: int = 1, **params: Any) -> GenerateRequest:
    params = {"max_tokens": 24, "ignore_eos": True, "seed": 5, **params}
    return GenerateRequest(
        request_id=request_id, prompt_ids=PROMPT, num_samples=num_samples, params=SamplingParams(**params)
    )


class RolloutConformance(ScoreConformance):
    """Mix into a test class; say how to make the engine.

        class TestMyEngine(RolloutConformance):
            async def make_engine(self, config):
                return await MyEngine.create(config)

    The model is a tiny one made by `tiny_model`; override `model_folder` for another, which the engine must serve
    unchanged in float32 with room for 512 tokens. Everything runs under a deadline of `deadline_s`. An engine that is
    dear to start can be lent from test to test: override `open_engine`.
    """

    family: TinyFamily = "qwen3"
    tolerance: float = 1e-4
    deadline_s: float = 60.0

    async def make_engine(self, config: RolloutEngineConfig) -> RolloutEngine:
        """Return the engine under test."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def model_folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return the folder of the model to serve."""
        return tiny_model(tmp_path_factory.mktemp("conformance") / cls.family, cls.family)

    @pytest.fixture
    def reference(self, model_folder: Path) -> Any:
        """Return the same model under transformers, fresh for each test."""
        return reference_model(model_folder)

    def run(self, folder: Path, check: Callable[[RolloutEngine], Awaitable[None]]) -> None:
        """Make an engine, run `check` on it, close it; all under the deadline."""

        async def bounded() -> None:
            async with asyncio.timeout(self.deadline_s), self.open_engine(folder) as engine:
                await check(engine)

        asyncio.run(bounded())

    @asynccontextmanager
    async def open_engine(self, folder: Path) -> AsyncIterator[RolloutEngine]:
        """Give out an engine that serves the folder's weights as version 0, with its counters at zero; then end it."""
        engine = await self.make_engine(
            RolloutEngineConfig(model_path=str(folder), device="cpu", max_model_len=512, max_running=16)
        )
        try:
            yield engine
        finally:
            await engine.close()

    def assert_logprobs(self, model: Any, completion: Completion, temperature: float = 1.0, start: int = 0) -> None:
        """Compare tokens from `start` on with what transformers computes in one pass over the whole sequence."""
        ids = np.concatenate([PROMPT, completion.ids])
        expected = reference_logprobs(model, ids, temperature=temperature)[len(PROMPT) :]
        np.testing.assert_allclose(completion.logprobs[start:], expected[start:], atol=self.tolerance, rtol=0)

    # Sampling

    def test_logprobs_are_those_of_transformers(self, model_folder: Path, reference: Any) -> None:
        """Log-probabilities equal the reference, at temperature 1 and another."""

        async def check(engine: RolloutEngine) -> None:
            for temperature in (1.0, 0.7):
                (completion,) = await engine.generate(_request(temperature=temperature))
                assert completion.stop_reason == "length"
                assert len(completion.ids) == 24
                self.assert_logprobs(reference, completion, temperature)

        self.run(model_folder, check)

    def test_temperature_zero_takes_the_likeliest_token(self, model_folder: Path, reference: Any) -> None:
        """Greedy decoding equals transformers' and reports log-probabilities at temperature 1."""

        async def check(engine: RolloutEngine) -> None:
            import torch

            (completion,) = await engine.generate(_request(temperature=0.0))
            self.assert_logprobs(reference, completion)
            ids = torch.from_numpy(np.concatenate([PROMPT, completion.ids]).astype(np.int64))
            with torch.no_grad():
                logits = reference(ids[None]).logits[0, len(PROMPT) - 1 : -1]
            gap = logits.amax(-1) - logits.gather(-1, ids[len(PROMPT) :, None])[:, 0]
            assert float(gap.max()) < self.tolerance

        self.run(model_folder, check)

    def test_a_seed_reproduces_and_another_differs(self, model_folder: Path) -> None:
        """Same seed, same tokens, alone or in company; another seed, other tokens."""

        async def check(engine: RolloutEngine) -> None:
            (alone,) = await engine.generate(_request(seed=5))
            company = [engine.generate(_request(str(seed), seed=seed)) for seed in (3, 5, 9, 11)]
            _, (again,), (other,), _ = await asyncio.gather(*company)
            np.testing.assert_array_equal(alone.ids, again.ids)
            assert alone.ids.tolist() != other.ids.tolist()

        self.run(model_folder, check)

    def test_sample_i_draws_with_seed_plus_i(self, model_folder: Path, reference: Any) -> None:
        """A group holds n samples in order; each equals a request of its own."""

        async def check(engine: RolloutEngine) -> None:
            group = await engine.generate(_request(num_samples=4, seed=5))
            assert len(group) == 4
            assert len({tuple(completion.ids.tolist()) for completion in group}) == 4
            for index, completion in enumerate(group):
                (single,) = await engine.generate(_request(f"s{index}", seed=5 + index))
                np.testing.assert_array_equal(completion.ids, single.ids)
                self.assert_logprobs(reference, completion)

        self.run(model_folder, check)

    def test_stop_token_ends_a_sample(self, model_folder: Path) -> None:
        """The stop token is the last one, and the tokens before it are unchanged."""

        async def check(engine: RolloutEngine) -> None:
            (free,) = await engine.generate(_request())
            stop = int(free.ids[10])
            (stopped,) = await engine.generate(_request(stop_token_ids=(stop,)))
            first = free.ids.tolist().index(stop)
            np.testing.assert_array_equal(stopped.ids, free.ids[: first + 1])
            assert stopped.stop_reason == "stop"

        self.run(model_folder, check)

    def test_stop_string_over_a_token_border_ends_a_sample(self, model_folder: Path) -> None:
        """A string that no single token holds stops at the token that completes it."""

        async def check(engine: RolloutEngine) -> None:
            (free,) = await engine.generate(_request(max_tokens=200))
            stop = _pair_of_letters(free.text)
            (stopped,) = await engine.generate(_request(max_tokens=200, stop=("never this", stop)))
            assert stopped.stop_reason == "stop"
            assert stop in stopped.text
            assert stop not in stopped.text[: -len(stop)]
            np.testing.assert_array_equal(stopped.ids, free.ids[: len(stopped.ids)])

        self.run(model_folder, check)

    # Ending and pausing

    def test_abort_keeps_the_tokens_so_far(self, model_folder: Path, reference: Any) -> None:
        """An aborted request returns what it has, marked; unknown ids are ignored."""

        async def check(engine: RolloutEngine) -> None:
            task = asyncio.create_task(engine.generate(_request("long", num_samples=2, max_tokens=LONG)))
            await self.tokens(engine, 6)
            await engine.abort("nobody")
            await engine.abort("long")
            for completion in await task:
                assert completion.stop_reason == "aborted"
                assert 0 < len(completion.ids) < LONG
                self.assert_logprobs(reference, completion)

        self.run(model_folder, check)

    def test_pause_wait_finishes_what_is_in_flight(self, model_folder: Path) -> None:
        """`wait` returns when nothing is in flight; a request that comes later waits for `resume`."""

        async def check(engine: RolloutEngine) -> None:
            _needs(engine, "wait")
            task = asyncio.create_task(engine.generate(_request(max_tokens=40)))
            await self.tokens(engine, 2)
            await engine.pause("wait")
            later = asyncio.create_task(engine.generate(_request("later")))
            (completion,) = await task
            assert completion.stop_reason == "length"
            await asyncio.sleep(0.1)
            assert not later.done()
            await engine.resume()
            assert len((await later)[0].ids) == 24

        self.run(model_folder, check)

    def test_pause_abort_returns_what_is_in_flight(self, model_folder: Path) -> None:
        """`abort` ends everything in flight as aborted, and sampling works after `resume`."""

        async def check(engine: RolloutEngine) -> None:
            _needs(engine, "abort")
            task = asyncio.create_task(engine.generate(_request(max_tokens=LONG)))
            await self.tokens(engine, 4)
            await engine.pause("abort")
            assert (await task)[0].stop_reason == "aborted"
            await engine.resume()
            assert (await engine.generate(_request("next")))[0].stop_reason == "length"

        self.run(model_folder, check)

    def test_pause_keep_holds_and_goes_on(self, model_folder: Path) -> None:
        """A sample that was held becomes what it would have become."""

        async def check(engine: RolloutEngine) -> None:
            _needs(engine, "keep")
            (free,) = await engine.generate(_request(max_tokens=LONG))
            task = asyncio.create_task(engine.generate(_request(max_tokens=LONG)))
            await self.tokens(engine, 4)
            await engine.pause("keep")
            before = (await engine.health()).num_tokens
            await asyncio.sleep(0.1)
            assert (await engine.health()).num_tokens == before
            assert not task.done()
            await engine.resume()
            (held,) = await task
            np.testing.assert_array_equal(held.ids, free.ids)

        self.run(model_folder, check)

    # Weights

    def test_update_in_mid_generation_splits_the_versions(self, model_folder: Path, reference: Any) -> None:
        """Tokens before the update have the old policy's log-probabilities, tokens after it exactly the new one's."""

        async def check(engine: RolloutEngine) -> None:
            _needs(engine, "keep")
            task = asyncio.create_task(engine.generate(_request(num_samples=3, max_tokens=LONG)))
            await self.tokens(engine, 30)
            await engine.pause("keep")
            old = reference_model(model_folder)
            stream = FakeWeightStream(changed_weights(reference), version=7)
            proof = await engine.update_weights(stream, 7)
            assert proof == stream.expected()
            assert (await engine.health()).version == 7
            await engine.resume()
            for completion in await task:
                assert [segment.version for segment in completion.segments] == [0, 7]
                split = completion.segments[0].num_tokens
                assert 0 < split < LONG
                assert sum(segment.num_tokens for segment in completion.segments) == len(completion.ids)
                assert completion.oldest_version == 0
                self.assert_logprobs(reference, completion, start=split)
                ids = np.concatenate([PROMPT, completion.ids[:split]])
                before = reference_logprobs(old, ids)[len(PROMPT) :]
                np.testing.assert_allclose(completion.logprobs[:split], before, atol=self.tolerance, rtol=0)

        self.run(model_folder, check)

    def test_a_wrong_stream_is_refused_and_never_mixed(self, model_folder: Path, reference: Any) -> None:
        """After a failed update the engine serves the old weights or nothing; a full update heals it."""

        async def check(engine: RolloutEngine) -> None:
            old = reference_model(model_folder)
            weights = changed_weights(reference)
            name, tensor = weights[3]
            wrong = {
                "a name nobody has": FakeWeightStream([*weights[:3], ("no.such.weight", tensor)], 1),
                "a shape that differs": FakeWeightStream([*weights[:3], (name, tensor[:-1])], 1),
                "a tensor that never came": FakeWeightStream(weights[:-1], 1),
                "a sender that died": FakeWeightStream(weights, 1, fail_after=4),
                "another version": FakeWeightStream(weights, 2),
            }
            for index, (what, stream) in enumerate(wrong.items()):
                with pytest.raises(WeightSyncError):
                    await engine.update_weights(stream, 1)
                await self._old_or_nothing(engine, old, f"{index}: {what}")
            await engine.update_weights(FakeWeightStream(weights, 3), 3)
            (completion,) = await engine.generate(_request("healed"))
            assert completion.oldest_version == 3
            self.assert_logprobs(reference, completion)

        self.run(model_folder, check)

    async def _old_or_nothing(self, engine: RolloutEngine, old: Any, what: str) -> None:
        try:
            (completion,) = await engine.generate(_request(what))
        except OffbeatError:
            return
        assert completion.oldest_version == 0, what
        self.assert_logprobs(old, completion)

    # What an engine does not declare

    def test_what_is_not_declared_is_refused_and_the_engine_serves_on(self, model_folder: Path, reference: Any) -> None:
        """An image, an adapter or an adapter's update that the engine does not take is one clear error, at once."""

        async def check(engine: RolloutEngine) -> None:
            image = np.zeros((16, 24, 3), np.uint8)
            stream = FakeWeightStream(changed_weights(reference), 1)
            if not engine.capabilities.multimodal:
                with pytest.raises(ConfigError, match=r"request 'r' holds 1 image, .* not multimodal"):
                    await engine.generate(replace(_request(), images=(image,)))
            if not engine.capabilities.lora:
                with pytest.raises(ConfigError, match=r"request 'r' wants the adapter 'poet', .* not do lora"):
                    await engine.generate(replace(_request(), adapter="poet"))
                with pytest.raises(ConfigError, match=r"brings the adapter 'poet', .* not do lora"):
                    await engine.update_weights(stream, 1, adapter=LoraAdapter(name="poet", scale=2.0))
            await engine.drop_adapter("nobody")
            (completion,) = await engine.generate(_request())
            assert completion.oldest_version == 0
            self.assert_logprobs(reference_model(model_folder), completion)

        self.run(model_folder, check)

    def test_an_adapter_that_was_not_sent_is_refused_by_name(self, model_folder: Path) -> None:
        """An engine with adapters names those that it has."""

        async def check(engine: RolloutEngine) -> None:
            if not engine.capabilities.lora:
                pytest.skip("the engine takes no adapters")
            with pytest.raises(ConfigError, match="'nobody'"):
                await engine.generate(replace(_request(), adapter="nobody"))
            assert len((await engine.generate(_request()))[0].ids) == 24

        self.run(model_folder, check)

    def test_an_image_that_is_none_is_refused(self, model_folder: Path) -> None:
        """Another dtype or number of axes than [H, W, 3] uint8 is an error and not a guess."""

        async def check(engine: RolloutEngine) -> None:
            if not engine.capabilities.multimodal:
                pytest.skip("the engine takes no images")
            wrong: list[Any] = [np.zeros((16, 24, 3), np.float32), np.zeros((16, 24), np.uint8)]
            for image in wrong:
                with pytest.raises(DataError, match="image 0 must be"):
                    await engine.generate(replace(_request(), images=(image,)))

        self.run(model_folder, check)

    # Life

    def test_health_counts(self, model_folder: Path) -> None:
        """Health answers at once, before, while and after sampling."""

        async def check(engine: RolloutEngine) -> None:
            idle = await engine.health()
            assert (idle.num_running, idle.num_tokens, idle.version) == (0, 0, 0)
            await engine.generate(_request(num_samples=3))
            done = await engine.health()
            assert done.num_tokens == 3 * 24
            assert (done.num_running, done.num_waiting) == (0, 0)
            assert 0 < done.busy_s <= done.uptime_s

        self.run(model_folder, check)

    def test_sleep_and_wake_leave_no_trace(self, model_folder: Path) -> None:
        """After sleep level 1 and `wake` the same seed gives the same tokens."""

        async def check(engine: RolloutEngine) -> None:
            if 1 not in engine.capabilities.sleep_levels:
                pytest.skip("the engine does not sleep")
            (before,) = await engine.generate(_request())
            await engine.pause("wait")
            await engine.sleep(1)
            await engine.wake()
            await engine.resume()
            (after,) = await engine.generate(_request())
            np.testing.assert_array_equal(before.ids, after.ids)

        self.run(model_folder, check)

    def test_samples_held_through_sleep_go_on_under_the_new_weights(self, model_folder: Path, reference: Any) -> None:
        """What a colocated trainer does: its own memory while it trains, new weights first, then the cache again."""

        async def check(engine: RolloutEngine) -> None:
            _needs(engine, "keep")
            if 2 not in engine.capabilities.sleep_levels:
                pytest.skip("the engine does not give its weights back")
            task = asyncio.create_task(engine.generate(_request(num_samples=2, max_tokens=LONG)))
            await self.tokens(engine, 30)
            await engine.pause("keep")
            await engine.sleep(2)
            later = asyncio.create_task(engine.generate(_request("later")))
            await engine.wake(("weights",))
            stream = FakeWeightStream(changed_weights(reference), version=7)
            assert await engine.update_weights(stream, 7) == stream.expected()
            await engine.wake(("kv_cache",))
            await engine.resume()
            for completion in await task:
                assert [segment.version for segment in completion.segments] == [0, 7]
                self.assert_logprobs(reference, completion, start=completion.segments[0].num_tokens)
            assert (await later)[0].oldest_version == 7

        self.run(model_folder, check)

    def test_without_the_weights_that_sleep_gave_back_nothing_is_sampled(self, model_folder: Path) -> None:
        """What was in flight ends as aborted, and what comes is refused, until a whole update has come."""

        async def check(engine: RolloutEngine) -> None:
            _needs(engine, "keep")
            if 2 not in engine.capabilities.sleep_levels:
                pytest.skip("the engine does not give its weights back")
            task = asyncio.create_task(engine.generate(_request(max_tokens=LONG)))
            await self.tokens(engine, 4)
            await engine.pause("keep")
            await engine.sleep(2)
            await engine.wake()
            await engine.resume()
            assert (await task)[0].stop_reason == "aborted"
            with pytest.raises(WeightSyncError):
                await engine.generate(_request("later"))
            weights = [(name, tensor.detach()) for name, tensor in reference_model(model_folder).named_parameters()]
            await engine.update_weights(FakeWeightStream(weights, 3), 3)
            assert (await engine.generate(_request("healed")))[0].oldest_version == 3

        self.run(model_folder, check)

    def test_close_aborts_what_is_in_flight(self, model_folder: Path) -> None:
        """In-flight requests return as aborted; later ones are refused."""

        async def check(engine: RolloutEngine) -> None:
            task = asyncio.create_task(engine.generate(_request(max_tokens=LONG)))
            await self.tokens(engine, 3)
            await engine.close()
            assert (await task)[0].stop_reason == "aborted"
            with pytest.raises(OffbeatError):
                await engine.generate(_request("late"))

        self.run(model_folder, check)

    async def tokens(self, engine: RolloutEngine, num_tokens: int) -> None:
        """Wait until this many further tokens have been sampled."""
        start = (await engine.health()).num_tokens
        while (await engine.health()).num_tokens < start + num_tokens:
            await asyncio.sleep(0.001)


def _needs(engine: RolloutEngine, mode: Any) -> None:
    if mode not in engine.capabilities.pause_modes:
        pytest.skip(f"the engine declares no pause mode {mode!r}")


def _pair_of_letters(text: str) -> str:
    """Return two neighbouring characters of plain ASCII whose pair first appears late enough to be worth a test."""
    for index in range(10, len(text) - 1):
        pair = text[index : index + 2]
        if pair.isascii() and pair.isprintable() and pair not in text[: index + 1]:
            return pair
    raise AssertionError("no such pair in the sampled text; take a longer sample")
