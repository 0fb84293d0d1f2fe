import json
from contextlib import asynccontextmanager
from typing import ClassVar

import numpy as np
import pytest
from engine_checks import draw_adapter, merged
from image_checks import POET, Trainer, check_adapter, check_numbers_of_images, check_refusals

from offbeat_core import GenerateRequest, RolloutEngineConfig, SamplingParams, load_backend
from offbeat_rollout_vllm import VllmRolloutEngine
from offbeat_testing import FakeWeightStream, RolloutConformance, tiny_vision_model

DEADLINE_S = 300.0
PROMPT = np.asarray([10, 44, 81, 7, 200, 31], np.int32)  # the suite's own
pytestmark = pytest.mark.timeout(DEADLINE_S)  # a first start on a cold machine takes a minute


class Vllm(RolloutConformance):
    """The suite of every engine, on one real engine for the whole class; the last test closes it.

    pytest takes what a class inherits first, so each class names that test again.
    """

    options: ClassVar = {}
    deadline_s = DEADLINE_S

    @pytest.fixture(scope="class")
    @classmethod
    def traces(cls, tmp_path_factory):
        return tmp_path_factory.mktemp("traces")

    @pytest.fixture(autouse=True)
    def take(self, shared_engine, traces):
        self._shared, self._traces = shared_engine, traces

    async def make_engine(self, config):
        return await load_backend("offbeat.rollout", "vllm").create(config)

    @asynccontextmanager
    async def open_engine(self, folder):
        config = RolloutEngineConfig(
            model_path=str(folder),
            device="cpu",
            max_model_len=512,
            max_running=16,
            options=self.options,
            trace_folder=str(self._traces),
        )
        async with self._shared.lend(config) as engine:
            yield engine

    def test_each_trace_is_of_what_vllm_ran_in_it(self, model_folder):
        """Of its workers, wherever they are; and nothing else is left in the folder."""

        async def check(engine):
            assert engine.capabilities.traces
            for num_samples in (1, 3):
                await engine.begin_trace()
                params = SamplingParams(max_tokens=4, ignore_eos=True)
                await engine.generate(
                    GenerateRequest(request_id="t", prompt_ids=PROMPT, num_samples=num_samples, params=params)
                )
                (path,) = await engine.end_trace()
                assert list(self._traces.iterdir()) == [path]
                names = {str(event.get("name")) for event in json.loads(path.read_text())["traceEvents"]}
                path.unlink()
                assert f"execute_context_0(0)_generation_{num_samples}({num_samples})" in names

        self.run(model_folder, check)


@pytest.mark.nightly
class TestInProcess(Vllm):
    options: ClassVar = {"form": "in_process"}

    test_close_aborts_what_is_in_flight = RolloutConformance.test_close_aborts_what_is_in_flight


class TestAsync(Vllm):
    """In child processes, where a start costs most: so one that takes images and adapters too."""

    options: ClassVar = {"form": "async", "enable_lora": True}

    @pytest.fixture(scope="class")
    @classmethod
    def model_folder(cls, tmp_path_factory):
        return tiny_vision_model(tmp_path_factory.mktemp("conformance") / "model")

    @pytest.mark.parametrize("check", [check_numbers_of_images, check_refusals, check_adapter])
    def test_images(self, model_folder, check):
        trainer = Trainer(model_folder)
        self.run(model_folder, lambda engine: check(engine, trainer))

    def test_adapters(self, model_folder, reference):
        async def check(engine):
            tensors = draw_adapter(reference, seed=2, layers=(".self_attn.q_proj", ".mlp.down_proj"))
            stream = FakeWeightStream(list(tensors.items()), 5)
            assert await engine.update_weights(stream, 5, adapter=POET) == stream.expected()
            params = SamplingParams(max_tokens=24, ignore_eos=True)
            request = GenerateRequest(request_id="a", prompt_ids=PROMPT, params=params, adapter="poet")
            (completion,) = await engine.generate(request)
            assert completion.oldest_version == 5
            with merged(reference, tensors, POET.scale):
                self.assert_logprobs(reference, completion)

        self.run(model_folder, check)

    test_close_aborts_what_is_in_flight = RolloutConformance.test_close_aborts_what_is_in_flight


def test_the_entry_point_is_the_engine():
    assert load_backend("offbeat.rollout", "vllm") is VllmRolloutEngine
