"""The rollout contract, on the adapter over the stand-in engine: as a server in another process, and in this one."""

import asyncio
import functools
import sys

import numpy as np
import pytest
import trtllm_standin
from trtllm_peers import EngineProcess, open_in

from offbeat_core import GenerateRequest, RolloutEngineConfig, load_backend
from offbeat_rollout_trtllm import TrtllmRolloutEngine
from offbeat_rollout_trtllm._local_link import LocalLink
from offbeat_testing import RolloutConformance


class Trtllm(RolloutConformance):
    @pytest.fixture(autouse=True)
    def folder_for_handles(self, tmp_path):
        self.open_handles = functools.partial(open_in, tmp_path)


class TestServer(Trtllm):
    @pytest.fixture(autouse=True)
    def engine_process(self, model_folder):
        self.process = EngineProcess(str(model_folder), num_workers=2)
        yield
        self.process.stop()

    async def make_engine(self, config):
        config = RolloutEngineConfig(
            model_path=config.model_path,
            device=config.device,
            max_model_len=config.max_model_len,
            max_running=config.max_running,
            options={"server": self.process.address, "bucket_bytes": 1 << 16, "call_deadline_s": 30.0},
        )
        return await TrtllmRolloutEngine.create(config, open_handles=self.open_handles)


class TestInThisProcess(Trtllm):
    family = "llama"

    @pytest.fixture(autouse=True)
    def standin(self):
        before = set(sys.modules)
        trtllm_standin.install()
        yield
        for name in [
            each for each in sys.modules if each not in before and each.startswith(("tensorrt_llm", "uvicorn"))
        ]:
            del sys.modules[name]
        sys.modules.pop("offbeat_rollout_trtllm.worker", None)

    async def make_engine(self, config):
        return await TrtllmRolloutEngine.create(config, open_handles=self.open_handles)

    def test_a_cancelled_call_ends_at_the_engine(self, model_folder):
        async def check(engine):
            llm = engine._link.llm
            llm.faults.token_delay_s = 0.05
            request = GenerateRequest(request_id="r", prompt_ids=np.array([10, 44], np.int32), num_samples=2)
            task = asyncio.create_task(engine.generate(request))
            while llm.num_running < 2:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            # 256 tokens each would take 12 s.
            async with asyncio.timeout(5):
                while llm.num_running:
                    await asyncio.sleep(0.005)

        self.run(model_folder, check)


def test_the_entry_point_is_the_engine():
    assert load_backend("offbeat.rollout", "trtllm") is TrtllmRolloutEngine
    assert LocalLink.__module__ == "offbeat_rollout_trtllm._local_link"
