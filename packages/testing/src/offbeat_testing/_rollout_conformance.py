"""The promises of the rollout contract, as tests. Every engine, real or fake, runs the same ones."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat_core import (
    Completion,
    ConfigError,
    DataError,
    GenerateRequest,
    LoraAdapter,
    OffbeatError,
    RolloutEngine,
    RolloutEngineConfig,
    SamplingParams,
    ScoreRequest,
    ScoringEngine,
    WeightSyncError,
)
from offbeat_testing._fakes import FakeWeightStream
from offbeat_testing._models import (
    TinyFamily,
    changed_weights,
    logprob_errors,
    reference_logprobs,
    reference_model,
    tiny_model,
)

PROMPT = np.asarray([10, 44, 81, 7, 200, 31], np.int32)
LONG = 480


def suite_request(request_id: str = "r", *, num_samples: int = 1, **params: Any) -> GenerateRequest:
    params = {"max_tokens": 24, "ignore_eos": True, "seed": 5, **params}
    return GenerateRequest(
        request_id=request_id, prompt_ids=PROMPT, num_samples=num_samples, params=SamplingParams(**params)
    )


def needs(engine: RolloutEngine, mode: Any) -> None:
    if mode not in engine.capabilities.pause_modes:
        pytest.skip(f"the engine declares no pause mode {mode!r}")


def on_engine(check: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Return a test of a suite: `check` on a fresh engine with the model's folder, under the suite's deadline."""
    wanted = list(inspect.signature(check).parameters)[2:]

    def test(self: "EngineSuite", model_folder: Path, request: pytest.FixtureRequest) -> None:
        values = {name: request.getfixturevalue(name) for name in wanted}
        self.run(model_folder, lambda engine: check(self, engine, **values))

    test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
    return test


class EngineSuite:
    """One engine for each test, under a deadline; see `RolloutConformance`."""

    family: TinyFamily = "qwen3"
    tolerance: float = 1e-4
    deadline_s: float = 60.0

    async def make_engine(self, config: RolloutEngineConfig) -> RolloutEngine:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def model_folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        errors = logprob_errors(model, PROMPT, completion, temperature=temperature)[start:]
        assert (errors <= self.tolerance).all(), f"off by {errors.max()} nats, token {start + errors.argmax()}"

    async def tokens(self, engine: RolloutEngine, num_tokens: int) -> None:
        start = (await engine.health()).num_tokens
        while (await engine.health()).num_tokens < start + num_tokens:
            await asyncio.sleep(0.001)


_DRAW = np.random.default_rng(3)
_PROMPT = _DRAW.integers(3, 250, 9).astype(np.int32)
_CONTINUATIONS = tuple(_DRAW.integers(3, 250, length).astype(np.int32) for length in (12, 0, 1, 40))


class ScoreConformance(EngineSuite):
    """Tests of engines that declare `scores`; the others skip them."""

    @on_engine
    async def test_scores_are_those_of_transformers(self, engine: RolloutEngine, reference: Any) -> None:
        """Given tokens have the reference's log-probabilities, at 1 and, where the engine can, another temperature."""
        scorer = _scorer(engine)
        for temperature in (1.0, 0.7):
            request = ScoreRequest(
                request_id=f"s{temperature}",
                prompt_ids=_PROMPT,
                continuations=_CONTINUATIONS,
                temperature=temperature,
            )
            try:
                scores = await scorer.score(request)
            except ConfigError:
                if temperature == 1.0:
                    raise
                continue
            for ids, found in zip(_CONTINUATIONS, scores, strict=True):
                whole = np.concatenate([_PROMPT, ids])
                expected = reference_logprobs(reference, whole, temperature=temperature)[len(_PROMPT) :]
                np.testing.assert_allclose(found, expected, atol=self.tolerance, rtol=0)

    @on_engine
    async def test_what_no_model_can_score_is_refused(self, engine: RolloutEngine) -> None:
        scorer = _scorer(engine)
        for ids, words in (([10**7], "tokenizer"), ([5] * 600, "max_model_len")):
            request = ScoreRequest(request_id="s", prompt_ids=_PROMPT, continuations=(np.asarray(ids, np.int32),))
            with pytest.raises(DataError, match=words):
                await scorer.score(request)


def _scorer(engine: RolloutEngine) -> ScoringEngine:
    if not engine.capabilities.scores:
        pytest.skip("the engine does not score")
    return engine  # type: ignore[return-value]


class WeightConformance(EngineSuite):
    """Tests of every engine; one that does not sleep skips those of sleep."""

    @on_engine
    async def test_update_in_mid_generation_splits_the_versions(
        self, engine: RolloutEngine, model_folder: Path, reference: Any
    ) -> None:
        """Tokens before the update have the old policy's log-probabilities, tokens after it exactly the new one's."""
        needs(engine, "keep")
        task = asyncio.create_task(engine.generate(suite_request(num_samples=3, max_tokens=LONG)))
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

    @on_engine
    async def test_a_wrong_stream_is_refused_and_never_mixed(
        self, engine: RolloutEngine, model_folder: Path, reference: Any
    ) -> None:
        """After a failed update the engine serves the old weights or nothing; a full update heals it."""
        old = reference_model(model_folder)
        weights = changed_weights(reference)
        name, tensor = weights[3]
        wrong = {
            "an unknown name": FakeWeightStream([*weights[:3], ("no.such.weight", tensor)], 1),
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
        (completion,) = await engine.generate(suite_request("healed"))
        assert completion.oldest_version == 3
        self.assert_logprobs(reference, completion)

    async def _old_or_nothing(self, engine: RolloutEngine, old: Any, what: str) -> None:
        try:
            (completion,) = await engine.generate(suite_request(what))
        except OffbeatError:
            return
        assert completion.oldest_version == 0, what
        self.assert_logprobs(old, completion)

    @on_engine
    async def test_sleep_and_wake_leave_no_trace(self, engine: RolloutEngine) -> None:
        if 1 not in engine.capabilities.sleep_levels:
            pytest.skip("the engine does not sleep")
        (before,) = await engine.generate(suite_request())
        await engine.pause("wait")
        await engine.sleep(1)
        await engine.wake()
        await engine.resume()
        (after,) = await engine.generate(suite_request())
        np.testing.assert_array_equal(before.ids, after.ids)

    @on_engine
    async def test_samples_held_through_sleep_continue_under_the_new_weights(
        self, engine: RolloutEngine, reference: Any
    ) -> None:
        """Do what a colocated trainer does: take the memory to train, bring weights first, then return the cache."""
        needs(engine, "keep")
        if 2 not in engine.capabilities.sleep_levels:
            pytest.skip("the engine does not give its weights back")
        task = asyncio.create_task(engine.generate(suite_request(num_samples=2, max_tokens=LONG)))
        await self.tokens(engine, 30)
        await engine.pause("keep")
        await engine.sleep(2)
        later = asyncio.create_task(engine.generate(suite_request("later")))
        await engine.wake(("weights",))
        stream = FakeWeightStream(changed_weights(reference), version=7)
        assert await engine.update_weights(stream, 7) == stream.expected()
        await engine.wake(("kv_cache",))
        await engine.resume()
        for completion in await task:
            assert [segment.version for segment in completion.segments] == [0, 7]
            self.assert_logprobs(reference, completion, start=completion.segments[0].num_tokens)
        assert (await later)[0].oldest_version == 7

    @on_engine
    async def test_without_the_weights_that_sleep_gave_back_nothing_is_sampled(
        self, engine: RolloutEngine, model_folder: Path
    ) -> None:
        """See that work in flight ends as aborted, and new work is refused, until a whole update has come."""
        needs(engine, "keep")
        if 2 not in engine.capabilities.sleep_levels:
            pytest.skip("the engine does not give its weights back")
        task = asyncio.create_task(engine.generate(suite_request(max_tokens=LONG)))
        await self.tokens(engine, 4)
        await engine.pause("keep")
        await engine.sleep(2)
        await engine.wake()
        await engine.resume()
        assert (await task)[0].stop_reason == "aborted"
        with pytest.raises(WeightSyncError):
            await engine.generate(suite_request("later"))
        weights = [(name, tensor.detach()) for name, tensor in reference_model(model_folder).named_parameters()]
        await engine.update_weights(FakeWeightStream(weights, 3), 3)
        assert (await engine.generate(suite_request("healed")))[0].oldest_version == 3


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
        for temperature in (1.0, 0.7):
            (completion,) = await engine.generate(suite_request(temperature=temperature))
            assert completion.stop_reason == "length"
            assert len(completion.ids) == 24
            self.assert_logprobs(reference, completion, temperature)

    @on_engine
    async def test_temperature_zero_takes_the_likeliest_token(self, engine: RolloutEngine, reference: Any) -> None:
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
        task = asyncio.create_task(engine.generate(suite_request("long", num_samples=2, max_tokens=LONG)))
        await self.tokens(engine, 6)
        await engine.abort("unknown")
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
        needs(engine, "abort")
        task = asyncio.create_task(engine.generate(suite_request(max_tokens=LONG)))
        await self.tokens(engine, 4)
        await engine.pause("abort")
        assert (await task)[0].stop_reason == "aborted"
        await engine.resume()
        assert (await engine.generate(suite_request("next")))[0].stop_reason == "length"

    @on_engine
    async def test_pause_keep_holds_and_goes_on(self, engine: RolloutEngine) -> None:
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
        await engine.drop_adapter("unknown")
        (completion,) = await engine.generate(suite_request())
        assert completion.oldest_version == 0
        self.assert_logprobs(reference_model(model_folder), completion)

    @on_engine
    async def test_an_adapter_that_was_not_sent_is_refused_by_name(self, engine: RolloutEngine) -> None:
        if not engine.capabilities.lora:
            pytest.skip("the engine takes no adapters")
        with pytest.raises(ConfigError, match="'unknown'"):
            await engine.generate(replace(suite_request(), adapter="unknown"))
        assert len((await engine.generate(suite_request()))[0].ids) == 24

    @on_engine
    async def test_an_image_that_is_none_is_refused(self, engine: RolloutEngine) -> None:
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
    async def test_health_says_whether_tokens_must_come(self, engine: RolloutEngine) -> None:
        """Samples are being decoded while tokens come, and none are before, while the engine is paused, and after."""
        assert (await engine.health()).num_decoding == 0
        task = asyncio.create_task(engine.generate(suite_request(num_samples=2, max_tokens=LONG)))
        while not (await engine.health()).num_decoding:
            assert not task.done(), "the samples have ended, and health has never said that they were decoded"
            await asyncio.sleep(0.001)
        await engine.pause("keep" if "keep" in engine.capabilities.pause_modes else "abort")
        assert (await engine.health()).num_decoding == 0
        await engine.abort("r")
        await engine.resume()
        await task
        assert (await engine.health()).num_decoding == 0

    @on_engine
    async def test_close_aborts_what_is_in_flight(self, engine: RolloutEngine) -> None:
        task = asyncio.create_task(engine.generate(suite_request(max_tokens=LONG)))
        await self.tokens(engine, 3)
        await engine.close()
        assert (await task)[0].stop_reason == "aborted"
        with pytest.raises(OffbeatError):
            await engine.generate(suite_request("late"))


def _pair_of_letters(text: str) -> str:
    for index in range(10, len(text) - 1):
        pair = text[index : index + 2]
        if pair.isascii() and pair.isprintable() and pair not in text[: index + 1]:
            return pair
    raise AssertionError("no such pair in the sampled text; take a longer sample")
