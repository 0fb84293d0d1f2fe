"""What engines promise of weights: updates, and sleep that gives them back; a part of `RolloutConformance`."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat_testing._engine_suite import LONG, PROMPT, EngineSuite, needs, suite_request
from offbeat_testing._fakes import FakeWeightStream
from offbeat_testing._reference import changed_weights, reference_logprobs, reference_model
from offbeat_types import OffbeatError, RolloutEngine, WeightSyncError


class WeightConformance(EngineSuite):
    """For every engine; one that does not sleep skips what is of sleep."""

    def test_update_in_mid_generation_splits_the_versions(self, model_folder: Path, reference: Any) -> None:
        """Tokens before the update have the old policy's log-probabilities, tokens after it exactly the new one's."""

        async def check(engine: RolloutEngine) -> None:
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
            (completion,) = await engine.generate(suite_request("healed"))
            assert completion.oldest_version == 3
            self.assert_logprobs(reference, completion)

        self.run(model_folder, check)

    async def _old_or_nothing(self, engine: RolloutEngine, old: Any, what: str) -> None:
        try:
            (completion,) = await engine.generate(suite_request(what))
        except OffbeatError:
            return
        assert completion.oldest_version == 0, what
        self.assert_logprobs(old, completion)

    def test_sleep_and_wake_leave_no_trace(self, model_folder: Path) -> None:
        """After sleep level 1 and `wake` the same seed gives the same tokens."""

        async def check(engine: RolloutEngine) -> None:
            if 1 not in engine.capabilities.sleep_levels:
                pytest.skip("the engine does not sleep")
            (before,) = await engine.generate(suite_request())
            await engine.pause("wait")
            await engine.sleep(1)
            await engine.wake()
            await engine.resume()
            (after,) = await engine.generate(suite_request())
            np.testing.assert_array_equal(before.ids, after.ids)

        self.run(model_folder, check)

    def test_samples_held_through_sleep_go_on_under_the_new_weights(self, model_folder: Path, reference: Any) -> None:
        """What a colocated trainer does: its own memory while it trains, new weights first, then the cache again."""

        async def check(engine: RolloutEngine) -> None:
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

        self.run(model_folder, check)

    def test_without_the_weights_that_sleep_gave_back_nothing_is_sampled(self, model_folder: Path) -> None:
        """What was in flight ends as aborted, and what comes is refused, until a whole update has come."""

        async def check(engine: RolloutEngine) -> None:
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

        self.run(model_folder, check)
