"""vLLM's silent faults, each shown to be there still, and shown not to reach a user through this package.

A test that shows a fault fails when vLLM has mended it: then what works around it can go.
"""

import asyncio
import copy
from dataclasses import replace
from importlib import import_module

import numpy as np
import psutil
import pytest
import pytest_asyncio
from engine_checks import DEADLINE_S, LONG, SHORT, config_of, error_of, request, started, until_sampled

from offbeat_core import (
    ConfigError,
    PeerFailedError,
    Reply,
    RolloutEngineConfig,
    Trajectory,
    WeightSyncError,
)
from offbeat_rollout_vllm import VllmRolloutEngine
from offbeat_rollout_vllm._in_workers.extension import WorkerSide
from offbeat_testing import (
    FakeWeightStream,
    changed_weights,
    logprob_errors,
    reference_logprobs,
    reference_model,
    tiny_model,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(DEADLINE_S)]  # a first start on a cold machine takes a minute


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("faults") / "model", "qwen3", tied=True)


class TestFaults:
    """All on one engine, in this process, so that a test can look inside."""

    @pytest.fixture(autouse=True)
    def take(self, shared_engine, folder):
        self._shared, self._folder, self._model = shared_engine, folder, reference_model(folder)

    @pytest_asyncio.fixture
    async def engine(self):
        async with self._shared.lend(config_of(self._folder)) as engine:
            yield engine

    def stream(self, version=1, seed=1):
        """New weights for the engine; `self._model` has them too."""
        return FakeWeightStream(changed_weights(self._model, seed=seed), version)

    # A tied head

    async def test_a_tied_head_left_as_it_was_is_off_by_nats(self, engine, monkeypatch):
        monkeypatch.setattr(WorkerSide, "_refresh_heads", lambda self: None)
        monkeypatch.setattr(WorkerSide, "check_heads", lambda self: None)
        await engine.update_weights(self.stream(), 1)
        assert await error_of(engine, self._model) > 0.5

    async def test_a_tied_head_left_as_it_was_fails_the_update_and_a_whole_update_heals(self, engine, monkeypatch):
        with monkeypatch.context() as without:
            without.setattr(WorkerSide, "_refresh_heads", lambda self: None)
            with pytest.raises(WeightSyncError, match="lm_head serves other numbers"):
                await engine.update_weights(self.stream(1), 1)
        with pytest.raises(WeightSyncError, match="no usable weights"):
            await engine.generate(request())
        await engine.update_weights(self.stream(2, seed=2), 2)
        assert await error_of(engine, self._model) < 1e-3

    # A stale prefix cache

    async def test_cached_keys_and_values_of_old_weights_are_off_by_nats(self, engine, monkeypatch):
        await engine.generate(request("old", LONG))
        monkeypatch.setattr(engine._form._engine, "reset_prefix_cache", lambda **_: True)
        await engine.update_weights(self.stream(), 1)
        assert await error_of(engine, self._model, request("new", LONG)) > 0.1

    async def test_an_update_drops_cached_keys_and_values(self, engine):
        await engine.generate(request("old", LONG))
        await engine.update_weights(self.stream(), 1)
        assert await error_of(engine, self._model, request("new", LONG)) < 1e-3

    async def test_an_update_that_cannot_drop_them_fails(self, engine, monkeypatch):
        with monkeypatch.context() as stuck:
            stuck.setattr(engine._form._engine, "reset_prefix_cache", lambda **_: False)
            with pytest.raises(Exception, match="did not drop"):
                await engine.update_weights(self.stream(), 1)
        with pytest.raises(WeightSyncError, match="no usable weights"):
            await engine.generate(request())
        await engine.update_weights(self.stream(2, seed=2), 2)

    # Log-probabilities of another distribution

    @pytest.mark.parametrize(
        ("params", "cut"),
        [
            ({"temperature": 0.6}, lambda p: p),
            ({"temperature": 0.8, "top_k": 5}, lambda p: np.where(p >= np.sort(p)[-5], p, 0)),
            ({"temperature": 1.3, "min_p": 0.3}, lambda p: np.where(p >= 0.3 * p.max(), p, 0)),
            ({"temperature": 1.3, "top_p": 0.7}, lambda p: _nucleus(p, 0.7)),
        ],
        ids=["temperature", "top_k", "min_p", "top_p"],
    )
    async def test_logprobs_are_of_the_sampled_distribution(self, engine, params, cut):
        (completion,) = await engine.generate(request(**params))
        rows = _distributions(self._model, SHORT, completion.ids, params["temperature"])
        kept = np.stack([cut(row) for row in rows])
        chosen = kept[np.arange(len(completion.ids)), completion.ids]
        expected = np.log(chosen / kept.sum(-1))
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3, rtol=0)
        raw = reference_logprobs(self._model, np.concatenate([SHORT, completion.ids]))[len(SHORT) :]
        assert np.abs(raw - expected).max() > 0.1, "the raw ones, vLLM's default, are others"

    async def test_greedy_and_sampled_requests_in_one_batch_keep_their_own(self, engine):
        requests = [request(str(index), temperature=0.0 if index % 2 else 0.6) for index in range(6)]
        found = await asyncio.gather(*map(engine.generate, requests))
        for index, (completion,) in enumerate(found):
            temperature = 1.0 if index % 2 else 0.6
            assert logprob_errors(self._model, SHORT, completion, temperature=temperature).max() < 1e-3

    # Packed weights that look empty

    async def test_packed_weights_are_proved_by_what_serves(self, engine):
        model = engine._form._engine.model_executor.driver_worker.worker.model_runner.get_model()
        held = model.get_submodule("model.layers.0.self_attn.qkv_proj").weight
        assert held.numel() == 0, "a proof from the parameters would hash nothing"
        with pytest.raises(Exception):  # noqa: B017 - how it fails is vLLM's business
            model.load_weights(self.stream())
        stream = self.stream(1, seed=3)
        assert await engine.update_weights(stream, 1) == stream.expected()
        assert await error_of(engine, self._model) < 1e-3

    @pytest.mark.parametrize("name", ["model.norm", "model.layers.1.mlp.down_proj", "lm_head"])
    async def test_a_proof_sees_what_changed_after_the_load(self, engine, name):
        model = engine._form._engine.model_executor.driver_worker.worker.model_runner.get_model()

        class Spoiled(FakeWeightStream):
            def prove(self, read):
                _spoil(model.get_submodule(name))
                return super().prove(read)

        weights = [*changed_weights(self._model), ("lm_head.weight", self._model.lm_head.weight.detach().clone())]
        expected = FakeWeightStream(weights, 1).expected()
        assert await engine.update_weights(FakeWeightStream(weights, 1), 1) == expected
        assert await engine.update_weights(Spoiled(weights, 1), 1) != expected

    async def test_numbers_that_no_product_shows_are_proved_too(self, engine):
        weights = changed_weights(self._model)
        for index, (name, tensor) in enumerate(weights):
            tensor.view(-1)[index % 7 :: 11] = -0.0
            tensor.view(-1)[index % 5 :: 13] = 1e-40
            weights[index] = name, tensor
        stream = FakeWeightStream(weights, 1)
        assert await engine.update_weights(stream, 1) == stream.expected()

    # What else a rollout needs

    async def test_a_group_computes_its_prompt_once(self, engine, monkeypatch):
        cached = {}
        outputs = import_module("offbeat_rollout_vllm._forms")
        read = outputs.read_output

        def note(output, label):
            cached[output.request_id] = output.num_cached_tokens
            return read(output, label)

        await engine.update_weights(self.stream(), 1)  # nothing is cached now
        monkeypatch.setattr(outputs, "read_output", note)
        await engine.generate(request("group", LONG, num_samples=4))
        assert sorted(cached.values()) == [0, 256, 256, 256]

    async def test_two_updates_in_flight_make_three_segments(self, engine):
        old = reference_model(self._folder)
        task = asyncio.create_task(engine.generate(request("long", max_tokens=400)))
        for version in (3, 8):
            await until_sampled(engine, 20)
            await engine.update_weights(self.stream(version, seed=version), version)
        (completion,) = await task
        assert [segment.version for segment in completion.segments] == [0, 3, 8]
        first, second, last = (segment.num_tokens for segment in completion.segments)
        assert first >= 20
        assert second >= 20
        ids = np.concatenate([SHORT, completion.ids])
        for model, chosen in ((old, slice(0, first)), (self._model, slice(first + second, None))):
            expected = reference_logprobs(model, ids)[len(SHORT) :]
            np.testing.assert_allclose(completion.logprobs[chosen], expected[chosen], atol=1e-3, rtol=0)
        assert last == 400 - first - second

    async def test_two_turns_with_an_update_between_them_and_one_within(self, engine):
        """A conversation: the prompt of a turn is every token so far, sampled ones as they were sampled."""
        policies = {0: reference_model(self._folder)}
        (first,) = await engine.generate(request("turn 1", LONG))
        await engine.update_weights(self.stream(1, seed=3), 1)
        policies[1] = copy.deepcopy(self._model)
        reply = Reply(ids=np.asarray([40, 41, 42], np.int32))
        prompt = np.concatenate([LONG, first.ids, reply.ids])
        task = asyncio.create_task(engine.generate(request("turn 2", prompt, max_tokens=150)))
        await until_sampled(engine, 20)
        await engine.update_weights(self.stream(2, seed=4), 2)
        policies[2] = self._model
        (second,) = await task
        trajectory = Trajectory(turns=(first, second), replies=(reply,), ended="max_turns")
        assert [segment.version for segment in trajectory.segments] == [0, 1, 2]
        sequence = trajectory.to_sequence(LONG)
        expected = {
            version: reference_logprobs(model, sequence.ids)[sequence.loss_mask] for version, model in policies.items()
        }
        start = 0
        for segment in trajectory.segments:
            run = slice(start, start + segment.num_tokens)
            np.testing.assert_allclose(trajectory.logprobs[run], expected[segment.version][run], atol=1e-3, rtol=0)
            start += segment.num_tokens

    async def test_end_of_sequence_is_the_folders(self, engine):
        (free,) = await engine.generate(request())
        eos = int(free.ids[5])
        table = engine._table
        before = table.eos_ids
        try:
            table.eos_ids = frozenset([eos])
            (ended,) = await engine.generate(request(ignore_eos=False))
            (on,) = await engine.generate(request("on", ignore_eos=True))
        finally:
            table.eos_ids = before
        assert ended.stop_reason == "eos"
        assert ended.ids.tolist() == free.ids[: free.ids.tolist().index(eos) + 1].tolist()
        assert on.stop_reason == "length"

    async def test_requests_without_a_seed_differ(self, engine):
        first, second = await engine.generate(request(num_samples=2, seed=None))
        assert first.ids.tolist() != second.ids.tolist()

    async def test_an_option_that_vllm_does_not_have_is_refused_by_name(self):
        config = RolloutEngineConfig(model_path=str(self._folder), options={"blok_size": 64})
        with pytest.raises(ConfigError, match="did you mean block_size"):
            await VllmRolloutEngine.create(config)


async def test_bfloat16_with_biases_is_proved_bit_by_bit(tmp_path):
    """Another family, whose matrices have biases, and a head size that vLLM's attention on a CPU takes."""
    import torch

    folder = tiny_model(tmp_path / "model", "qwen2", tied=False, num_heads=2, num_kv_heads=1)
    model = reference_model(folder)
    weights = [(name, tensor.to(torch.bfloat16).view(torch.int16)) for name, tensor in changed_weights(model)]

    class Bits(FakeWeightStream):
        """bfloat16 on the way, hashed as the integers that its bits are (NumPy has no bfloat16)."""

        def __iter__(self):
            return ((name, tensor.view(torch.bfloat16)) for name, tensor in self.tensors)

        def prove(self, read):
            return super().prove(lambda name: read(name).view(torch.int16))

    async with started(config_of(folder, dtype="bfloat16", max_running=4)) as engine:
        stream = Bits(weights, 1)
        assert await engine.update_weights(stream, 1) == stream.expected()
        (completion,) = await engine.generate(request())
        assert logprob_errors(model, SHORT, completion).max() < 0.2


@pytest.mark.nightly
async def test_a_call_to_a_core_that_was_killed_is_answered_with_its_name(folder):
    """vLLM leaves such a call unanswered; samples in flight and what comes later learn of it as well."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    async with started(config_of(folder, options={"form": "async"})) as engine:
        sampling = asyncio.create_task(engine.generate(request("killed", max_tokens=400)))
        while not (await engine.health()).num_tokens:
            await asyncio.sleep(0.01)
        for child in psutil.Process().children(recursive=True):
            if child.pid not in before and "resource_tracker" not in " ".join(child.cmdline()):
                child.kill()
        async with asyncio.timeout(60):
            for call in (engine.pause("keep"), sampling, engine.generate(request("later"))):
                with pytest.raises(PeerFailedError, match="vLLM failed"):
                    await call


@pytest.mark.nightly
async def test_a_seeded_prompt_that_takes_several_steps_kills_a_bare_vllm(folder, monkeypatch):
    monkeypatch.setattr("offbeat_rollout_vllm._in_workers.extension.spare_generators", lambda runner: None)
    async with started(config_of(folder, options={"max_num_batched_tokens": 128})) as engine:
        with pytest.raises(PeerFailedError, match="offset"):
            await engine.generate(request("long", LONG))
        with pytest.raises(PeerFailedError, match="make a new one"):
            await engine.generate(request("after"))


@pytest.mark.nightly
async def test_prompts_that_take_several_steps_keep_their_seeds(folder):
    """More prompt tokens than one step takes: vLLM discards what is drawn before a prompt is whole."""
    async with started(config_of(folder, max_running=8, options={"max_num_batched_tokens": 48})) as engine:
        model = reference_model(folder)
        prompts = [LONG[: 46 + index] for index in range(12)] + [LONG]
        requests = [request(f"r{index}", prompt, seed=index) for index, prompt in enumerate(prompts)]
        found = await asyncio.gather(*map(engine.generate, requests))
        for one, prompt, (completion,) in zip(requests, prompts, found, strict=True):
            assert logprob_errors(model, prompt, completion).max() < 1e-3
            (alone,) = await engine.generate(replace(one, request_id="alone"))
            assert completion.ids.tolist() == alone.ids.tolist()
        task = asyncio.create_task(engine.generate(request("held", num_samples=4, max_tokens=400)))
        while (await engine.health()).num_running < 4:
            await asyncio.sleep(0.001)
        await engine.update_weights(FakeWeightStream(changed_weights(model), 1), 1)
        for completion in await task:
            assert completion.oldest_version == 0
            assert completion.segments[-1].version == 1


def _distributions(model, prompt, ids, temperature):
    """[T, V] float64: the whole distribution before each sampled token."""
    import torch

    with torch.no_grad():
        tokens = torch.from_numpy(np.concatenate([prompt, ids]).astype(np.int64))
        logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1].double() / temperature
        return torch.softmax(logits, -1).numpy()


def _nucleus(p, mass):
    """The fewest likeliest tokens whose probabilities reach `mass`."""
    order = np.argsort(p)[::-1]
    last = int(np.searchsorted(np.cumsum(p[order]), mass)) + 1
    kept = np.zeros_like(p)
    kept[order[:last]] = p[order[:last]]
    return kept


def _spoil(module):
    """Change one number of what a module serves with."""
    import torch

    if not hasattr(module, "cpu_linear"):
        module.weight.data.view(-1)[3] += 1
        return
    held = import_module("offbeat_rollout_vllm._in_workers.weights")
    weight = held.unpack(module, torch.float32).clone()
    weight[1, 2] += 1
    layers = import_module("vllm.model_executor.layers.utils")
    stand_in = torch.nn.Module()
    stand_in.weight = torch.nn.Parameter(weight, requires_grad=False)
    layers.dispatch_cpu_unquantized_gemm(stand_in, remove_weight=False)
    module.cpu_linear = stand_in.cpu_linear
