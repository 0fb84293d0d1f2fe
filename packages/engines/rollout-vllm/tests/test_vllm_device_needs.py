"""What a kind of device asks for is what vLLM starts with; here vLLM is installed in name only."""

import os
import sys

import pytest

from offbeat_core import RolloutEngineConfig
from offbeat_rollout_vllm import VllmRolloutEngine
from offbeat_rollout_vllm._options import environment
from offbeat_rollout_vllm._setup import Setup
from offbeat_testing import tiny_model

KIND = """
from offbeat_core import EngineNeeds

class Demanding:
    @classmethod
    def engine_needs(cls, library, devices, options, releases):
        return EngineNeeds(
            variables={"OFFBEAT_LAYOUT": "plain"},
            options={"additional_config": {**options.get("additional_config", {}), "refresh": True}},
            notice=f"{library} {' '.join(releases)} is too new for {list(devices)}",
        )
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    metadata = tmp_path / "demanding_device-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: demanding-device\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[offbeat.device]\ndemanding = demanding_device:Demanding\n")
    (tmp_path / "demanding_device.py").write_text(KIND)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("offbeat_rollout_vllm._setup.installed_engine", lambda: ("vllm", "0.32.1"))
    folder = tiny_model(tmp_path / "model")
    yield RolloutEngineConfig(model_path=str(folder), device="demanding:1", tensor_parallel=2)
    sys.modules.pop("demanding_device", None)


@pytest.mark.parametrize("form", ["in_process", "async"])
def test_vllm_starts_with_what_the_device_asks_for(config, form, monkeypatch):
    config.options.update(form=form, additional_config={"layer": 3, "refresh": False})
    made = Setup(config)
    assert made.form._arguments["additional_config"] == {"layer": 3, "refresh": True}
    assert made.notices == ["vllm 0.32 is too new for [1, 2]"]
    monkeypatch.setenv("OFFBEAT_LAYOUT", "blocks")  # a user's choice that would spoil updates
    with environment(made.form._variables, made.form._required):
        assert os.environ["OFFBEAT_LAYOUT"] == "plain"
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == ("1" if form == "async" else "0")


def test_a_plan_is_told_of_the_releases_that_this_package_takes(config):
    assert VllmRolloutEngine.notices_of(config) == ["vllm 0.32 is too new for [1, 2]"]
    assert VllmRolloutEngine.notices_of(RolloutEngineConfig(model_path="m", device="cpu")) == []
