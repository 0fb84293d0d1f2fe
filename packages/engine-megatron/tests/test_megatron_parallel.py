"""What is refused before anything starts, and what a layout means. Needs no megatron-core."""

from importlib.util import find_spec

import pytest

from offbeat_engine_megatron import MegatronEngineOptions, MegatronTrainEngine
from offbeat_engine_megatron._options import read_options
from offbeat_engine_megatron._parallel import Parallel, check_model_fits, choose_parallel
from offbeat_engine_megatron._shape import ModelShape
from offbeat_testing import tiny_model
from offbeat_types import BackendError, ConfigError, ModelError, TrainEngineConfig, installed_backends

ALONE = {"dp": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}


def shape(**changes):
    sizes = {
        "family": "qwen3",
        "num_layers": 4,
        "hidden_size": 32,
        "num_heads": 8,
        "num_groups": 4,
        "head_size": 8,
        "ffn_size": 64,
        "vocabulary": 320,
        "norm_eps": 1e-6,
        "tied": True,
    }
    return ModelShape(**(sizes | changes))


def test_the_ranks_that_are_left_over_are_data_parallel():
    options = read_options({"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2})
    assert choose_parallel(ALONE | {"dp": 8}, options) == Parallel(dp=2, tp=2, pp=2, vpp=2, sp=True)


def test_a_mesh_with_axes_of_its_own_says_it_all():
    options = MegatronEngineOptions()
    assert choose_parallel(ALONE | {"tp": 2, "cp": 2}, options) == Parallel(tp=2, cp=2, sp=True)
    assert choose_parallel(ALONE | {"tp": 2}, read_options({"tensor_parallel": 2})) == Parallel(tp=2, sp=True)


LAYOUTS = {
    "ranks that the product does not divide": (6, {"tensor_parallel": 4}, "must divide the ranks: got 6"),
    "experts over more than a stage": (4, {"expert_parallel": 3}, "choose one of 1, 2, 4"),
    "tokens sent to experts twice": (
        4,
        {"tensor_parallel": 2, "expert_parallel": 2, "sequence_parallel": False},
        "sequence_parallel = true",
    ),
    "interleaving without a pipeline": (2, {"virtual_pipeline": 2}, "pipeline_parallel is 1"),
    "interleaving two stages in batches": (
        2,
        {"pipeline_parallel": 2, "virtual_pipeline": 2, "batch_p2p": True},
        "wrong results",
    ),
    "overlap without interleaving": (2, {"pipeline_parallel": 2, "overlap_p2p": True}, "overlap_p2p needs"),
    "gathering late without reducing early": (2, {"overlap_param_gather": True}, "overlap_param_gather needs"),
}


@pytest.mark.parametrize(("num_ranks", "options", "told"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_is_refused(num_ranks, options, told):
    with pytest.raises(ConfigError, match=told):
        choose_parallel(ALONE | {"dp": num_ranks}, read_options(options))


def test_a_mesh_and_options_that_differ_are_refused():
    with pytest.raises(ConfigError, match="say it once"):
        choose_parallel(ALONE | {"tp": 2}, read_options({"tensor_parallel": 4}))


MODELS = {
    "heads": (Parallel(tp=3, sp=True), {}, "num_attention_heads = 8"),
    "key heads": (Parallel(tp=8, sp=True), {}, "num_key_value_heads = 4"),
    "feed-forward": (Parallel(tp=4, sp=True), {"ffn_size": 66}, "intermediate_size = 66"),
    "vocabulary": (Parallel(tp=4, sp=True), {"vocabulary": 321}, "vocab_size = 321"),
    "layers": (Parallel(pp=3), {}, "num_hidden_layers = 4"),
    "layers of parts": (Parallel(pp=2, vpp=4), {}, "num_hidden_layers = 4"),
    "experts": (
        Parallel(dp=4, ep=4),
        {"num_experts": 6, "experts_per_token": 2, "sparse_layers": (True,) * 4},
        "num_experts = 6",
    ),
    "no experts": (Parallel(dp=2, ep=2), {}, "has no experts"),
}


@pytest.mark.parametrize(("parallel", "changes", "told"), MODELS.values(), ids=MODELS)
def test_a_model_that_does_not_divide_is_refused(parallel, changes, told):
    with pytest.raises(ConfigError, match=told):
        check_model_fits(shape(**changes), parallel)


OPTIONS = {
    "unknown": ({"tensor_paralel": 2}, "did you mean tensor_parallel"),
    "far off": ({"zzz": 2}, "it has"),
    "of the wrong type": ({"tensor_parallel": 2.0}, "must be int"),
    "a number for a switch": ({"sequence_parallel": 1}, "must be bool"),
    "out of bounds": ({"temperature": 0}, "must be a number > 0"),
}


@pytest.mark.parametrize(("options", "told"), OPTIONS.values(), ids=OPTIONS)
def test_an_option_is_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        read_options(options)


def create(folder, **settings):
    return MegatronTrainEngine.create(TrainEngineConfig(model_path=str(folder), device="cpu", **settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("megatron") / "qwen3")


@pytest.mark.skipif(find_spec("megatron") is not None, reason="megatron-core is installed here")
def test_without_megatron_core_the_install_line_is_told(folder):
    with pytest.raises(BackendError, match=r'pip install "offbeat-engine-megatron\[engine\]"'):
        create(folder)


def test_it_is_registered():
    assert "megatron" in installed_backends("offbeat.engine")


SETTINGS = {
    "lora": ({"lora_rank": 4}, "lora_rank"),
    "bfloat16": ({"dtype": "bfloat16"}, "float32"),
    "more ranks than there are": ({"options": {"tensor_parallel": 2}}, "must divide the ranks: got 1"),
}


@pytest.mark.parametrize(("settings", "told"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_is_refused(folder, settings, told):
    with pytest.raises(ConfigError, match=told):
        create(folder, **settings)


FEATURES = {
    "another family": ({"model_type": "gpt2"}, "trains llama, qwen2, qwen3, qwen3_moe"),
    "bias": ({"attention_bias": True}, "attention_bias"),
    "window": ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
}


@pytest.mark.parametrize(("changes", "told"), FEATURES.values(), ids=FEATURES)
def test_a_model_is_refused(tmp_path, changes, told):
    import json

    folder = tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=told):
        create(folder)


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        create(tmp_path)
