"""Each family's configuration as it is read, and the places of its tensors. Needs no megatron-core."""

import pytest
import torch
from tiny_families import tiny_config, write_tiny_family

from offbeat_core import ConfigError, ModelError, TrainEngineConfig
from offbeat_engine_megatron._layout import Parallel, check_model_fits, plan_engine, plan_layout
from offbeat_engine_megatron._shape import FAMILIES, VISION_FAMILIES, rotary_frequencies, shape_of
from offbeat_engine_megatron._slots import list_slots

MIXTURES = ("qwen2_moe", "qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "dots1")
FITTING = {"mistral": {"sliding_window": None}, "dots1": {"sliding_window": None, "norm_topk_prob": True}}
"""Settings without which a tiny configuration of the family is refused."""


def config_of(family, **settings):
    config = tiny_config(family)
    for name, value in {**FITTING.get(family, {}), **settings}.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in VISION_FAMILIES])
def test_every_tensor_of_a_family_has_its_place_and_shape(family, tmp_path):
    """Names and shapes are those of the files that transformers writes."""
    from safetensors.torch import load_file

    write_tiny_family(family, tmp_path, FITTING.get(family, {}))
    wanted = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    shape = shape_of(config_of(family))
    slots = list(list_slots(shape, Parallel(pp=2)))
    assert {slot.name: slot.shape for slot in slots} == wanted
    assert {slot.place.stage for slot in slots} == {0, 1}
    biases = [slot.name for slot in slots if slot.frozen]
    assert biases == [slot.name for slot in slots[len(slots) - len(biases) :]], "buckets of one format are long"
    assert len(biases) == (sum(shape.sparse_layers) if shape.sigmoid_router else 0)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "dots1"])
def test_the_first_layers_are_dense(family):
    assert shape_of(config_of(family, first_k_dense_replace=3)).sparse_layers == (False, False, False, True)


def test_layers_are_sparse_where_a_list_says_so():
    kinds = ["sparse", "dense", "dense", "sparse"]
    assert shape_of(config_of("glm4_moe_lite", mlp_layer_types=kinds)).sparse_layers == (True, False, False, True)


def test_shared_experts_are_as_wide_as_they_are_together():
    found = shape_of(config_of("glm4_moe", n_shared_experts=3, moe_intermediate_size=20))
    assert (found.shared_size, found.shared_gate) == (60, False)
    found = shape_of(config_of("qwen2_moe", shared_expert_intermediate_size=44))
    assert (found.shared_size, found.shared_gate) == (44, True)
    with pytest.raises(ConfigError, match="width of the shared experts = 44: got 8"):
        check_model_fits(found.__class__(**{**vars(found), "num_heads": 8, "num_groups": 8}), Parallel(tp=8, sp=True))


GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4}


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_groups_count_where_a_token_may_not_choose_from_all(family):
    assert shape_of(config_of(family, **GROUPS, topk_group=2)).expert_groups == (4, 2)
    assert shape_of(config_of(family, **GROUPS, topk_group=4)).expert_groups is None
    assert shape_of(config_of(family)).expert_groups is None


def test_half_of_a_head_turns_where_the_family_says_so():
    config = config_of("glm4_moe", head_dim=32)
    wanted = config.rope_parameters["rope_theta"] ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(rotary_frequencies(config), wanted)


REFUSED = {
    "weights that do not add up": ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob = false in routers with"),
    "one expert": ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 1}, "one expert for each token"),
    "groups by their best four": ("deepseek_v3", {**GROUPS, "topk_group": 1}, "their best two"),
    "no shared experts": ("dots1", {"n_shared_experts": None}, "no shared experts"),
    "halves instead of pairs": ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = false"),
    "biases of latent attention": ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
    "a window": ("mistral", {"sliding_window": 16}, "sliding_window"),
    "experts beside images": ("qwen3_vl_moe", {}, "the megatron engine trains llama"),
    "a sparse index": ("deepseek_v32", {}, "the megatron engine trains llama"),
}


@pytest.mark.parametrize(("family", "settings", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_computed_in_another_way_is_refused(family, settings, message):
    with pytest.raises(ModelError, match=message):
        shape_of(config_of(family, **settings))


def test_adapters_beside_whole_projections_are_refused(tmp_path):
    write_tiny_family("deepseek_v3", tmp_path)
    config = TrainEngineConfig(model_path=str(tmp_path), device="cpu", lora_rank=4)
    with pytest.raises(ConfigError, match="lora_rank with multi-latent attention"):
        plan_engine(config)


@pytest.mark.parametrize("settings", [{}, {"q_lora_rank": None}])
def test_a_plan_counts_what_ranks_of_tensor_parallel_do_not_share(tmp_path, settings):
    write_tiny_family("deepseek_v3", tmp_path, settings)
    config = TrainEngineConfig(model_path=str(tmp_path), device="cpu", options={"tensor_parallel": 2})
    slots = list(list_slots(shape_of(config_of("deepseek_v3", **settings)), Parallel(tp=2, sp=True)))
    whole = [slot for slot in slots if slot.tp_dim is None and slot.name.endswith(("q_a_proj.weight", "mqa.weight"))]
    assert plan_layout(config, 2).whole_parameters == sum(slot.num_elements for slot in whole) > 0
