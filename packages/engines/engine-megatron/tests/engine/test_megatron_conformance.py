import dataclasses

from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_testing import TrainEngineConformance


class TestQwen3(TrainEngineConformance):
    backend = MegatronTrainEngine


class TestQwen2(TestQwen3):
    family = "qwen2"


class TestLlamaComputedAgain(TestQwen3):
    """In the backward pass."""

    family = "llama"

    def make_engine(self, config):
        return MegatronTrainEngine.create(dataclasses.replace(config, activation_checkpointing=True))
