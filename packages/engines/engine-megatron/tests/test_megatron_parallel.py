"""What is refused before anything starts, and what a layout means. Needs no megatron-core."""

import json
from importlib.util import find_spec

import pytest

from offbeat_core import BackendError, ConfigError, ModelError, TrainEngineConfig, installed_backends
from offbeat_engine_megatron import MegatronEngineOptions, MegatronTrainEngine
from offbeat_engine_megatron._layout import Parallel, choose_parallel, plan_engine, plan_layout
from offbeat_engine_megatron._shape import ModelShape, read_model
from offbeat_engine_megatron._slots import list_adapted, list_adapter_slots, list_slots
from offbeat_testing import tiny_model

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
    options = MegatronEngineOptions.parse({"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2})
    assert choose_parallel(ALONE | {"dp": 8}, options) == Parallel(dp=2, tp=2, pp=2, vpp=2, sp=True)


def test_a_mesh_with_axes_of_its_own_says_it_all():
    options = MegatronEngineOptions()
    assert choose_parallel(ALONE | {"tp": 2, "cp": 2}, options) == Parallel(tp=2, cp=2, sp=True)
    assert choose_parallel(ALONE | {"tp": 2}, MegatronEngineOptions.parse({"tensor_parallel": 2})) == Parallel(
        tp=2, sp=True
    )


LAYOUTS = {
    "ranks that the product does not divide": (6, {"tensor_parallel": 4}, "must divide the ranks: got 6"),
    "experts over more than a stage": (4, {"expert_parallel": 3}, "choose one of 1, 2, 4"),
    "experts over several stages": (4, {"pipeline_parallel": 2, "expert_parallel": 4}, "the 2 ranks of a pipeline"),
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


@pytest.mark.parametrize(("num_ranks", "options", "message"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_is_refused(num_ranks, options, message):
    with pytest.raises(ConfigError, match=message):
        choose_parallel(ALONE | {"dp": num_ranks}, MegatronEngineOptions.parse(options))


@pytest.mark.parametrize(
    ("parallel", "sequence", "pack"),
    [
        (Parallel(dp=4), 1, 1),
        (Parallel(cp=2), 4, 4),
        (Parallel(tp=4, sp=True), 1, 4),
        (Parallel(tp=4), 1, 1),
        (Parallel(tp=2, cp=3, sp=True), 6, 12),
    ],
)
def test_packs_divide_among_the_ranks_that_share_them(parallel, sequence, pack):
    assert (parallel.sequence_multiple, parallel.pack_multiple) == (sequence, pack)


def test_a_mesh_and_options_that_differ_are_refused():
    with pytest.raises(ConfigError, match="say it once"):
        choose_parallel(ALONE | {"tp": 2}, MegatronEngineOptions.parse({"tensor_parallel": 4}))


OPTIONS = {
    "unknown": ({"tensor_paralel": 2}, "did you mean tensor_parallel"),
    "far off": ({"zzz": 2}, "it has"),
    "of the wrong type": ({"tensor_parallel": 2.0}, "must be int"),
    "a number for a switch": ({"sequence_parallel": 1}, "must be bool"),
    "out of bounds": ({"temperature": 0}, "must be a number > 0"),
}


@pytest.mark.parametrize(("options", "message"), OPTIONS.values(), ids=OPTIONS)
def test_an_option_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        MegatronEngineOptions.parse(options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model folder whose config says otherwise here and there; made once for each."""
    known = {}

    def get(**changes):
        key = json.dumps(changes)
        if key not in known:
            known[key] = tiny_model(tmp_path_factory.mktemp("megatron") / "qwen3", num_layers=4, num_kv_heads=4)
            config = json.loads((known[key] / "config.json").read_text())
            (known[key] / "config.json").write_text(json.dumps(config | changes))
        return known[key]

    return get


def config_of(folder, **settings):
    return TrainEngineConfig(model_path=str(folder), device="cpu", **settings)


@pytest.mark.skipif(find_spec("megatron") is not None, reason="megatron-core is installed here")
@pytest.mark.parametrize("ask", [MegatronTrainEngine.create, MegatronTrainEngine.plan], ids=["create", "plan"])
def test_without_megatron_core_the_install_line_is_told(folders, ask):
    line = r'pip install "offbeat-engine-megatron\[engine\]"'
    with pytest.raises(BackendError, match=line):
        ask(config_of(folders()))
    with pytest.raises(BackendError, match=line):
        MegatronTrainEngine.check_installed()


def test_it_is_registered():
    assert "megatron" in installed_backends("offbeat.engine")


MOE = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS = {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True}
REFUSED = {
    "heads": (3, {"tensor_parallel": 3}, {}, "num_attention_heads = 4: got 3; choose one of 1, 2, 4"),
    "key heads": (4, {"tensor_parallel": 4}, {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
    "feed-forward": (4, {"tensor_parallel": 4}, {"intermediate_size": 126}, "intermediate_size = 126"),
    "vocabulary": (2, {"tensor_parallel": 2}, {"vocab_size": 321}, "vocab_size = 321"),
    "layers": (3, {"pipeline_parallel": 3}, {}, "num_hidden_layers = 4: got 3; choose one of 1, 2, 4"),
    "layers of parts": (2, {"pipeline_parallel": 2, "virtual_pipeline": 4}, {}, "num_hidden_layers = 4: got 8"),
    "experts": (4, {"expert_parallel": 4}, MOE | EXPERTS, "num_experts = 6: got 4"),
    "experts of a dense model": (2, {"expert_parallel": 2}, {}, "has no experts"),
    "fewer ranks than asked for": (1, {"context_parallel": 2}, {}, "must divide the ranks: got 1"),
}


@pytest.mark.parametrize(("num_ranks", "options", "changes", "text"), REFUSED.values(), ids=REFUSED)
def test_ranks_that_cannot_share_a_model_are_refused_before_anything_starts(folders, num_ranks, options, changes, text):
    """The whole table without megatron-core, a process or a group: what `create` and `plan` ask first."""
    with pytest.raises(ConfigError, match=text):
        plan_engine(config_of(folders(**changes), options=options), ALONE | {"dp": num_ranks})


SETTINGS = {
    "a number format": ({"dtype": "float16"}, "float32 or bfloat16: got dtype = float16"),
    "a score head": ({"head": "score"}, "the megatron engine trains no score head"),
    "later tokens with adapters": ({"lora_rank": 4, "options": {"mtp_layers": 1}}, "set one of them to 0"),
    "a schedule without an end": ({"schedule": "cosine"}, "total_steps above warmup_steps"),
}


@pytest.mark.parametrize(("settings", "message"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_is_refused(folders, settings, message):
    with pytest.raises(ConfigError, match=message):
        plan_engine(config_of(folders(), **settings))


def test_layers_have_experts_where_the_step_and_the_list_of_dense_ones_say(folders):
    _, found = read_model(str(folders(**MOE | EXPERTS | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})))
    assert found.sparse_layers == (False, True, False, False)


@pytest.mark.parametrize("adds_up", [True, False])
def test_weights_of_the_chosen_experts_add_up_to_1_where_the_model_says_so(folders, adds_up):
    _, found = read_model(str(folders(**MOE | EXPERTS | {"norm_topk_prob": adds_up})))
    assert found.normalise_experts is adds_up


ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
LONGROPE = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
FEATURES = {
    "another family": ({"model_type": "gpt2"}, "trains llama, qwen2, qwen3, qwen3_moe"),
    "bias": ({"attention_bias": True}, "attention_bias"),
    "window": ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
    "layers with a window": ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
    "frequencies by length": ({"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0}}, "type 'dynamic'"),
    "frequencies of long texts": (
        {"rope_parameters": {**ROPE, "rope_type": "longrope", "factor": 4.0, **LONGROPE}},
        "type 'longrope'",
    ),
    "frequencies that scale attention": ({"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout"),
}


@pytest.mark.parametrize(("changes", "message"), FEATURES.values(), ids=FEATURES)
def test_a_model_is_refused(folders, changes, message):
    with pytest.raises(ModelError, match=message):
        plan_engine(config_of(folders(**changes)))


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        plan_engine(config_of(tmp_path))


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ({"dtype": "bfloat16"}, (1, 2, 12)),
        ({"dtype": "bfloat16", "options": {"distributed_optimizer": False}}, (0, 2, 12)),
        ({"dtype": "float32"}, (1, 4, 8)),
    ],
)
def test_a_plan_says_what_a_rank_holds_of_each_number(folders, settings, held):
    """In bfloat16 the optimizer has two moments and a copy of the weights in float32."""
    layout = plan_layout(config_of(folders(), **settings), 4)
    assert (layout.dp, layout.zero_stage, layout.weight_bytes, layout.optimizer_bytes) == (4, *held)


@pytest.mark.parametrize("tied", [True, False])
def test_interleaved_stages_hold_every_other_part_of_the_model(tied):
    slots = {slot.name: slot for slot in list_slots(shape(num_layers=8, tied=tied), Parallel(pp=2, vpp=2))}
    places = [slots[f"model.layers.{number}.input_layernorm.weight"].place for number in range(8)]
    assert [place[:2] for place in places] == [(0, 0)] * 2 + [(1, 0)] * 2 + [(0, 1)] * 2 + [(1, 1)] * 2
    assert [place.path.split(".")[2] for place in places] == ["0", "1"] * 4
    assert slots["model.norm.weight"].place[:2] == (1, 1)
    copies = slots["model.embed_tokens.weight"].copies
    assert copies == (((1, 1, "output_layer.weight"),) if tied else ()), "the last stage has a tied head of its own"


def test_adapters_lie_beside_the_weights_that_they_change():
    """The side that meets the dimension which ranks share is cut with it; experts and head have none."""
    parallel = Parallel(tp=2, pp=2, sp=True)
    weights = list_slots(shape(), parallel)
    found = {side.name: side for weight in list_adapted(weights) for side in list_adapter_slots(weight, 3)}
    assert len(found) == 4 * 7 * 2
    layer = "model.layers.2.self_attn"
    up, down = found[f"{layer}.k_proj.lora_B"], found[f"{layer}.o_proj.lora_A"]
    assert (up.shape, up.tp_dim, up.place.stage) == ((32, 3), 0, 1)
    assert (down.shape, down.tp_dim) == ((3, 64), 1)
    assert found[f"{layer}.k_proj.lora_A"].tp_dim is found[f"{layer}.o_proj.lora_B"].tp_dim is None
    assert up.place.path == "decoder.layers.0.self_attention.linear_qkv.adapter.k_B"
