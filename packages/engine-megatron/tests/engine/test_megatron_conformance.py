import dataclasses

from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_testing import TrainEngineConformance


class TestQwen3(TrainEngineConformance):
    backend = MegatronTrainEngine


class TestQwen2(TestQwen3):
    family = "qwen2"


class TestLlama(TestQwen3):
    family = "llama"


class TestActivationCheckpointing(TrainEngineConformance):
    backend = MegatronTrainEngine

    def make_engine(self, config):
        return MegatronTrainEngine.create(dataclasses.replace(config, activation_checkpointing=True))
