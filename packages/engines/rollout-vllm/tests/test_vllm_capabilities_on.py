"""Capabilities of vLLM on an accelerator, asked before there is an engine; it is installed in name only."""

import json
import sys
from dataclasses import replace

import pytest

from offbeat_core import BackendError, ConfigError, EngineNeeds, ModelError, RolloutEngineConfig
from offbeat_rollout_vllm import VllmRolloutEngine
from offbeat_rollout_vllm._families import served_architecture
from offbeat_testing import tiny_model

REGISTRY = """
_TEXT_GENERATION_MODELS = {"Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM")}
_EMBEDDING_MODELS = {"BertModel": ("bert", "BertModel")}
"""
ask = VllmRolloutEngine.capabilities_on


@pytest.fixture
def config(tmp_path, monkeypatch):
    package = tmp_path / "installed" / "vllm"
    (package / "model_executor" / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('vLLM was imported')")
    (package / "model_executor" / "models" / "registry.py").write_text(REGISTRY)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr("offbeat_rollout_vllm._setup.installed_engine", lambda: ("vllm", "0.32.0"))
    return RolloutEngineConfig(model_path=str(tiny_model(tmp_path / "model")), dtype="bfloat16")


def test_it_says_what_serves_the_model_and_what_an_engine_could_do(config):
    capabilities, about = ask(config, "GPU")
    assert about == "vllm 0.32.0 serves Qwen3ForCausalLM"
    assert (capabilities.scores, capabilities.whole_logprobs, capabilities.lora) == (True, False, False)
    assert capabilities.sleep_levels == ()
    assert ask(replace(config, shares_device=True), "GPU")[0].sleep_levels == (1, 2)
    assert ask(replace(config, options={"enable_lora": True}), "GPU")[0].lora


def test_a_model_that_is_elsewhere_is_taken_to_be_served(config, tmp_path):
    assert ask(replace(config, model_path=str(tmp_path / "nowhere")), "GPU")[1] == "vllm 0.32.0"


def test_models_that_do_not_generate_are_not_served(config):
    with pytest.raises(ModelError, match="vLLM's table of models has no BertModel"):
        served_architecture({"architectures": ["BertModel"]})
    with pytest.raises(ModelError, match="no model without architectures"):
        served_architecture({})


def test_settings_that_cannot_be_are_refused(config):
    with pytest.raises(ConfigError, match="FP8 blocks in bfloat16 or float16"):
        ask(replace(config, weight_format="fp8", dtype="float32"), "GPU")


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        (EngineNeeds(notice="no plugin for vllm 0.32"), "no plugin for vllm 0.32"),
        (EngineNeeds(), "vllm 0.32.0 is not known to run on a SPARE"),
        (EngineNeeds(variables={"PLUGIN": "1"}), ""),
    ],
)
def test_another_accelerator_says_itself_whether_vllm_runs_on_it(config, needs, message, monkeypatch):
    asked = []

    def answer(library, settings, *, releases):
        asked.append((library, settings.device, releases))
        return needs

    monkeypatch.setattr("offbeat_rollout_vllm._setup.engine_needs", answer)
    if message:
        with pytest.raises(BackendError, match=message):
            ask(config, "SPARE")
    else:
        ask(config, "SPARE")
    assert asked == [("vllm", "spare", ("0.32",))]


def test_the_table_of_a_vllm_without_one_is_missed_by_name(config, tmp_path):
    (tmp_path / "installed" / "vllm" / "model_executor" / "models" / "registry.py").unlink()
    with pytest.raises(BackendError, match=r"table of models cannot be read .*registry.py"):
        ask(config, "GPU")


def test_the_architecture_is_that_of_the_folder(config, tmp_path):
    about = tmp_path / "model" / "config.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "architectures": ["OtherForCausalLM"]}))
    with pytest.raises(ModelError, match="no OtherForCausalLM"):
        ask(config, "GPU")
