"""Context parallel ranks, which share the tokens of a pack, train as one process does."""

import pytest
from gpt_oss_folders import write_model
from test_engine_torch_ranks import assert_same, config, three_steps, weighted
from transformers import AutoConfig

from offbeat_core import ConfigError
from offbeat_engine_torch import TorchTrainEngine
from offbeat_engine_torch._layers.exchange import times_to_repeat
from offbeat_engine_torch._layout import check_context_parallel
from offbeat_mesh import Group, Mesh
from offbeat_testing import tiny_model

HEAD_SIZE = 32
SWAPS, REPEATS_KEYS, GATHERS = {}, {"num_heads": 4, "num_kv_heads": 1}, {"num_heads": 3, "num_kv_heads": 3}
"""Heads that two ranks divide; key heads that they do not; query heads that they do not."""
MODELS = {
    "heads are swapped": ("qwen3", SWAPS),
    "key heads are repeated": ("llama", REPEATS_KEYS),
    "keys are gathered": ("qwen2", GATHERS),
    "experts": ("qwen3_moe", SWAPS),
    "sinks": ("gpt_oss", SWAPS),
    "windows": ("qwen2", {"config": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}}),
    "windows on gathered keys": (
        "qwen2",
        {**GATHERS, "config": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}},
    ),
}


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    family, settings = MODELS[request.param]
    if family == "gpt_oss":
        return write_model(tmp_path_factory.mktemp("context"))
    width = 8 * settings.get("num_heads", 4)
    return tiny_model(tmp_path_factory.mktemp("context") / family, family, hidden_size=width, **settings)


@pytest.mark.mesh(cp=2)
@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_ranks_that_share_tokens_train_as_one_process(model, mesh, make_groups):
    one, many = (TorchTrainEngine.create(config(model), each) for each in (None, mesh))
    assert_same(three_steps(many, make_groups, weighted), three_steps(one, make_groups, weighted))


@pytest.mark.mesh(dp=2, cp=2, compare=False)
def test_the_option_arranges_the_ranks_and_any_ranks_read_the_checkpoint(model_folder, mesh, make_groups, tmp_path):
    saved = tmp_path / "saved"
    settings = config(model_folder, options={"context_parallel": 2})
    layout = TorchTrainEngine.plan(settings, 4)
    assert (layout.dp, layout.cp, layout.tp) == (2, 2, 1)
    engine = TorchTrainEngine.create(settings, Mesh(dp=4))
    engine.forward_backward(make_groups(), weighted)
    engine.step()
    engine.save(saved)
    other = TorchTrainEngine.create(config(model_folder), mesh)
    other.load(saved)
    alone = TorchTrainEngine.create(config(model_folder))
    alone.load(saved)
    assert_same(*(three_steps(each, make_groups, weighted) for each in (other, alone)))


@pytest.mark.mesh(cp=2, compare=False)
def test_a_layer_exchanges_each_activation_once(model_folder, mesh, make_groups, monkeypatch):
    calls = []
    swap = Group.all_to_all_rows

    def counted(self, rows, **settings):
        calls.append(rows.numel())
        return swap(self, rows, **settings)

    monkeypatch.setattr(Group, "all_to_all_rows", counted)
    engine = TorchTrainEngine.create(config(model_folder, max_tokens_per_microbatch=4096), mesh)
    calls.clear()
    metrics = engine.forward_backward(make_groups(), weighted)
    assert metrics["num_microbatches"].value == 1
    tokens = -(-int(metrics["packed_tokens"].value) // 2)
    # Of two layers, forward and backward: queries, keys, values and the output, of 4, 2, 2 and 4 heads.
    wanted = sorted(2 * 2 * [tokens * heads * HEAD_SIZE for heads in (4, 2, 2, 4)])
    assert sorted(calls) == wanted


def test_ranks_that_the_options_do_not_divide_are_refused(model_folder):
    settings = config(model_folder, options={"context_parallel": 2, "tensor_parallel": 2})
    wanted = "tensor_parallel = 2 times context_parallel = 2 must divide the ranks: got 6"
    with pytest.raises(ConfigError, match=wanted):
        TorchTrainEngine.plan(settings, 6)


def test_heads_of_models_with_images_must_divide():
    check_context_parallel(AutoConfig.for_model("qwen3_vl"), 2)
    with pytest.raises(ConfigError, match=r"num_attention_heads \(32\) must be a multiple of cp"):
        check_context_parallel(AutoConfig.for_model("qwen3_vl"), 3)


def test_key_heads_are_repeated_as_often_as_ranks_need():
    assert times_to_repeat(8, 4) == times_to_repeat(2, 2) == 1
    assert times_to_repeat(2, 4) == 2
    assert times_to_repeat(6, 4) == 2
    assert times_to_repeat(1, 8) == 8
