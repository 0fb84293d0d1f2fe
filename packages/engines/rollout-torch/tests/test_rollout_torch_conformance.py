from dataclasses import replace

import pytest

from offbeat_core import load_backend
from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_testing import RolloutConformance


class Torch(RolloutConformance):
    async def make_engine(self, config):
        return await load_backend("offbeat.rollout", "torch").create(config)


class TestQwen3(Torch):
    family = "qwen3"


class TestStaticRows(Torch):
    """As on a device that records work, but for the recording."""

    family = "qwen3"

    async def make_engine(self, config):
        return await super().make_engine(replace(config, options={**config.options, "static_rows": True}))


class TestQwen3Moe(Torch):
    family = "qwen3_moe"


class TestQwen3Point5(Torch):
    """Layers with the gated delta rule between layers of attention."""

    family = "qwen3_5_text"


@pytest.mark.nightly
class TestQwen2(Torch):
    family = "qwen2"


@pytest.mark.nightly
class TestLlama(Torch):
    family = "llama"


def test_the_entry_point_is_the_engine():
    assert load_backend("offbeat.rollout", "torch") is TorchRolloutEngine
