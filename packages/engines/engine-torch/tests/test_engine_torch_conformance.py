import dataclasses

import pytest

from offbeat_core import load_backend
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import TrainEngineConformance


class TestQwen3(TrainEngineConformance):
    backend = TorchTrainEngine


class TestQwen2(TestQwen3):
    family = "qwen2"


class TestLlama(TestQwen3):
    family = "llama"


class TestActivationCheckpointing(TrainEngineConformance):
    backend = TorchTrainEngine

    def make_engine(self, config):
        return TorchTrainEngine.create(dataclasses.replace(config, activation_checkpointing=True))


@pytest.mark.parametrize("name", ["torch"])
def test_the_engine_is_found_by_entry_point(name):
    assert load_backend("offbeat.engine", name) is TorchTrainEngine
