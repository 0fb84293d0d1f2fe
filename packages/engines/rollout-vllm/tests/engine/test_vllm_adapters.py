"""LoRA adapters on the real engine: served for each request, replaced while samples are in flight, proved, refused."""

import asyncio
import json
from dataclasses import replace

import pytest
import pytest_asyncio
from engine_checks import (
    DEADLINE_S,
    LONG,
    SHORT,
    config_of,
    draw_adapter,
    error_of,
    merged,
    request,
    until_running,
    until_sampled,
)

from offbeat_core import (
    ConfigError,
    LoraAdapter,
    ModelError,
    OffbeatError,
    WeightSyncError,
)
from offbeat_rollout_vllm._in_workers.extension import WorkerSide
from offbeat_testing import FakeWeightStream, changed_weights, logprob_errors, reference_model, tiny_model

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(DEADLINE_S)]  # a first start on a cold machine takes a minute
POET = LoraAdapter(name="poet", scale=0.7)
CLERK = LoraAdapter(name="clerk", scale=2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("adapters") / "model", "qwen3", tied=True)


class TestAdapters:
    """All on one engine, in this process, so that a test can look inside."""

    @pytest.fixture(autouse=True)
    def take(self, shared_engine, folder):
        self._shared, self._folder, self._model = shared_engine, folder, reference_model(folder)

    @pytest_asyncio.fixture
    async def engine(self):
        config = config_of(self._folder, options={"enable_lora": True, "max_loras": 2, "max_lora_rank": 8})
        async with self._shared.lend(config) as engine:
            yield engine
            for adapter in (POET, CLERK):
                await engine.drop_adapter(adapter.name)

    async def error(self, engine, tensors, prompt=SHORT, adapter=POET):
        """Of a sample with an adapter, if these are its tensors."""
        with merged(self._model, tensors, adapter.scale) as model:
            return await error_of(engine, model, request("sample", prompt, adapter.name))

    async def send(self, engine, adapter, version, tensors=None, **how):
        """Load an adapter drawn at random, and check the proof."""
        tensors = tensors or draw_adapter(self._model, **{"seed": version, **how})
        stream = FakeWeightStream(list(tensors.items()), version)
        assert await engine.update_weights(stream, version, adapter=adapter) == stream.expected()
        return tensors

    async def test_each_request_is_sampled_with_its_adapter(self, engine):
        assert engine.capabilities.lora
        tensors = {"poet": await self.send(engine, POET, 1), "clerk": await self.send(engine, CLERK, 2, rank=8)}
        names = ["", "poet", "clerk", "poet", "clerk", ""]
        requests = [request(f"{number}", adapter=name) for number, name in enumerate(names)]
        found = await asyncio.gather(*map(engine.generate, requests))
        for name, (completion,) in zip(names, found, strict=True):
            assert [segment.version for segment in completion.segments] == [{"": 0, "poet": 1, "clerk": 2}[name]]
            if not name:
                assert logprob_errors(self._model, SHORT, completion).max() < 1e-3
                continue
            assert logprob_errors(self._model, SHORT, completion).max() > 0.1, "the adapter makes a difference"
            with merged(self._model, tensors[name], {"poet": 0.7, "clerk": 2.0}[name]) as model:
                assert logprob_errors(model, SHORT, completion).max() < 1e-3
        assert (await engine.health()).version == 2

    async def test_after_each_of_five_updates_nothing_of_the_old_adapter_is_left(self, engine):
        """Ranks and layers change, so what is no longer there must be zero; the prompt was cached under the old one."""
        how = [{"rank": 8}, {"rank": 2}, {"layers": ("q_proj", "down_proj")}, {"rank": 5}, {"layers": ("v_proj",)}]
        for version, each in enumerate(how, 1):
            tensors = await self.send(engine, POET, version, **each)
            (completion,) = await engine.generate(request(f"{version}", LONG, "poet"))
            assert [segment.version for segment in completion.segments] == [version]
            with merged(self._model, tensors, POET.scale) as model:
                assert logprob_errors(model, LONG, completion).max() < 1e-3

    async def test_cached_keys_and_values_of_the_old_adapter_are_off_by_nats(self, engine, monkeypatch):
        """The reason for `set_version`: vLLM finds cached blocks by the adapter's name, which stays."""
        await self.send(engine, POET, 1)
        await engine.generate(request("old", LONG, "poet"))
        with monkeypatch.context() as without:
            without.setattr(engine._form._engine, "reset_prefix_cache", lambda **_: True)
            tensors = await self.send(engine, POET, 2)
        assert await self.error(engine, tensors, LONG) > 0.1

    async def test_an_adapter_replaced_in_flight_splits_the_versions(self, engine):
        old = await self.send(engine, POET, 3)
        tasks = [
            asyncio.create_task(engine.generate(request(name or "base", adapter=name, max_tokens=400)))
            for name in ("poet", "")
        ]
        await until_sampled(engine, 60)
        new = await self.send(engine, POET, 4)
        ((completion,), (base,)) = await asyncio.gather(*tasks)
        assert [segment.version for segment in completion.segments] == [3, 4]
        split = completion.segments[0].num_tokens
        with merged(self._model, old, POET.scale) as model:
            assert logprob_errors(model, SHORT, completion)[:split].max() < 1e-3
        with merged(self._model, new, POET.scale) as model:
            assert logprob_errors(model, SHORT, completion)[split:].max() < 1e-3
        assert [segment.version for segment in base.segments] == [0]
        assert logprob_errors(self._model, SHORT, base).max() < 1e-3

    async def test_an_update_of_the_model_keeps_the_adapters(self, engine):
        tensors = await self.send(engine, POET, 1)
        await engine.update_weights(FakeWeightStream(changed_weights(self._model), 5), 5)
        (completion,) = await engine.generate(request(adapter="poet"))
        assert [segment.version for segment in completion.segments] == [5]
        with merged(self._model, tensors, POET.scale) as model:
            assert logprob_errors(model, SHORT, completion).max() < 1e-3

    async def test_a_sync_through_offbeat_weightsync(self, engine):
        """The trainer's side of it: the adapter alone is selected, sent, loaded and proved."""
        from offbeat_weightsync import InProcessStream, select_adapter

        drawn = draw_adapter(self._model, seed=9)
        adapter = select_adapter([*self._model.named_parameters(), *drawn.items()])
        stream = InProcessStream(adapter, 6)
        proof = await engine.update_weights(stream, 6, adapter=POET)
        assert (proof.version, proof.num_tensors) == (6, len(drawn))
        assert await self.error(engine, drawn) < 1e-3

    async def test_a_folder_of_peft(self, engine, tmp_path):
        tensors = draw_adapter(self._model, rank=4, seed=2)
        write_peft_folder(tmp_path, tensors, r=4, lora_alpha=6)
        assert (await engine.load_adapter("poet", tmp_path, 2)).num_tensors == len(tensors)
        assert await self.error(engine, tensors, adapter=replace(POET, scale=1.5)) < 1e-3
        write_peft_folder(tmp_path, tensors, r=4, lora_alpha=6, use_dora=True)
        with pytest.raises(ModelError, match="use_dora"):
            await engine.load_adapter("poet", tmp_path, 3)

    async def test_on_a_cpu_samples_without_an_adapter_are_computed_with_the_one_in_the_last_slot(self, engine):
        """A silent fault of vLLM's: shown, with one adapter more than this package lets in."""
        limits = engine._adapters._limits
        for version in (1, 2):
            await self.send(engine, replace(POET, name=f"poet {version}"), version)
        company = request("company", adapter="poet 1")
        (completion,), _ = await asyncio.gather(*map(engine.generate, (request(), company)))
        assert logprob_errors(self._model, SHORT, completion).max() < 1e-3
        engine._adapters._limits = replace(limits, num_adapters=3)
        try:
            await self.send(engine, CLERK, 3)
            (completion,), _ = await asyncio.gather(*map(engine.generate, (request(), company)))
            assert logprob_errors(self._model, SHORT, completion).max() > 0.1
        finally:
            engine._adapters._limits = limits
            for version in (1, 2):
                await engine.drop_adapter(f"poet {version}")

    # Proofs and refusals

    @pytest.mark.parametrize("part", ["lora_a_stacked", "lora_b_stacked"])
    async def test_a_proof_sees_what_changed_after_the_load(self, engine, part):
        class Spoiled(FakeWeightStream):
            def prove(self, read):
                model = self.engine._form._engine.model_executor.driver_worker.worker.model_runner.get_model()
                held = getattr(model.get_submodule("model.layers.1.mlp.gate_up_proj"), part)[1]
                held[model.lora_manager.lora_index_to_id.index(1), 0, 1, 2] += 1
                return super().prove(read)

        stream = Spoiled(list(draw_adapter(self._model).items()), 1)
        stream.engine = engine
        with pytest.raises(WeightSyncError, match=r"other numbers than were sent in .*\.layers\.1\.mlp\.up_proj\."):
            await engine.update_weights(stream, 1, adapter=POET)
        with pytest.raises(WeightSyncError, match="'poet' has no usable weights"):
            await engine.generate(request(adapter="poet"))

    async def test_a_stream_that_fails_leaves_the_old_adapter_serving(self, engine):
        old = await self.send(engine, POET, 1)
        new = list(draw_adapter(self._model, seed=2).items())
        name, matrix = new[2]
        wrong = {
            "lora_B.weight', which did not come": [*new[:-1]],
            "no matrix 'no.such.weight'": [*new, *_renamed(new[:2], "no.such")],
            "must have shape": [*new[:2], (name, matrix[:, :-1]), *new[3:]],
            "came twice": [*new, new[0]],
            "as PEFT names them": [("model.norm.weight", matrix)],
            "max_lora_rank = 8": list(draw_adapter(self._model, rank=9).items()),
            "got none": [],
        }
        for words, tensors in wrong.items():
            with pytest.raises(WeightSyncError, match=words):
                await engine.update_weights(FakeWeightStream(tensors, 2), 2, adapter=POET)
        with pytest.raises(WeightSyncError, match="died"):
            await engine.update_weights(FakeWeightStream(new, 2, fail_after=3), 2, adapter=POET)
        assert (await engine.generate(request(adapter="poet")))[0].oldest_version == 1
        assert await self.error(engine, old) < 1e-3

    async def test_a_load_that_fails_at_a_worker_ends_what_uses_the_adapter_and_nothing_else(self, engine, monkeypatch):
        await self.send(engine, POET, 1)
        tasks = {
            name: asyncio.create_task(engine.generate(request(name or "base", adapter=name, max_tokens=300)))
            for name in ("poet", "")
        }
        await until_running(engine, 2)
        with monkeypatch.context() as failing:
            failing.setattr(WorkerSide, "add_adapter", _fail)
            with pytest.raises(WeightSyncError, match="could not add_adapter: OSError: no such device"):
                await self.send(engine, POET, 2)
        assert (await tasks["poet"])[0].stop_reason == "aborted"
        assert (await tasks[""])[0].stop_reason == "length"
        with pytest.raises(WeightSyncError, match="'poet' has no usable weights"):
            await engine.generate(request(adapter="poet"))
        await self.send(engine, POET, 3)
        assert (await engine.generate(request(adapter="poet")))[0].oldest_version == 3
        engine._adapters.mark_all_unusable("they were given back")  # as sleep(2) does, which a CPU has not
        with pytest.raises(WeightSyncError, match="they were given back; send it again"):
            await engine.generate(request(adapter="poet"))

    async def test_no_more_adapters_than_vllm_keeps(self, engine):
        """vLLM would put one in another's place, and fetch that again from a folder that has gone."""
        third = replace(POET, name="third")
        await self.send(engine, POET, 1)
        await self.send(engine, CLERK, 2)
        with pytest.raises(ConfigError, match="holds 2 adapters and has 'poet', 'clerk'"):
            await self.send(engine, third, 3)
        with pytest.raises(ConfigError, match="no adapter 'third'"):
            await engine.generate(request(adapter="third"))
        task = asyncio.create_task(engine.generate(request("long", adapter="poet", max_tokens=400)))
        await until_running(engine, 1)
        with pytest.raises(OffbeatError, match="in flight use the adapter 'poet'"):
            await engine.drop_adapter("poet")
        await engine.abort("long")
        await task
        await engine.drop_adapter("poet")
        with pytest.raises(ConfigError, match="no adapter 'poet'"):
            await engine.generate(request(adapter="poet"))
        tensors = await self.send(engine, third, 3)
        assert await self.error(engine, tensors, adapter=third) < 1e-3
        await engine.drop_adapter("third")


def _fail(self, **arguments):
    raise OSError("no such device")


def _renamed(pairs, layer):
    return [(f"base_model.model.{layer}.lora_{name[-8:]}", matrix) for name, matrix in pairs]


def write_peft_folder(folder, tensors, **config):
    """As PEFT's `save_pretrained` lays it out."""
    from safetensors.torch import save_file

    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "target_modules": ["q_proj"], "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
