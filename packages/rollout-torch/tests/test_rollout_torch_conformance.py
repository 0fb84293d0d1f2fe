import pytest

from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_testing import RolloutConformance
from offbeat_types import load_backend


class Torch(RolloutConformance):
    async def make_engine(self, config):
        return await load_backend("offbeat.rollout", "torch").create(config)


class TestQwen3(Torch):
    family = "qwen3"


@pytest.mark.nightly
class TestQwen2(Torch):
    family = "qwen2"


@pytest.mark.nightly
class TestLlama(Torch):
    family = "llama"


def test_the_entry_point_is_the_engine():
    assert load_backend("offbeat.rollout", "torch") is TorchRolloutEngine
