import dataclasses

from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_testing import TrainEngineConformance


class TestQwen3(TrainEngineConformance):
    def make_engine(self, config):
        return MegatronTrainEngine.create(config)


class TestQwen2(TestQwen3):
    family = "qwen2"


class TestLlama(TestQwen3):
    family = "llama"


class TestActivationCheckpointing(TrainEngineConformance):
    def make_engine(self, config):
        return MegatronTrainEngine.create(dataclasses.replace(config, activation_checkpointing=True))
