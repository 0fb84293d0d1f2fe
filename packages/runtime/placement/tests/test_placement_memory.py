"""Parameter counts, against the models that transformers builds, and the memory that follows from them."""

import json
from dataclasses import replace

import pytest
from placement_models import MODELS, MOE, RULE, TEXT, build, shape_of

from offbeat_core import ModelError, TrainEngineSettings, TrainLayout
from offbeat_placement import (
    ClassifierMemory,
    MemoryEstimate,
    ModelShape,
    RolloutMemory,
    TrainMemory,
    read_shape,
    train_advice,
    train_memory,
)
from offbeat_placement._families import FAMILIES
from offbeat_placement._memory import block_activations


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_real_model(name, tmp_path):
    config, model = build(name, tmp_path)
    shape = ModelShape.from_config(config)
    assert shape.num_parameters == sum(weight.numel() for weight in model.parameters())
    blocks = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
    assert shape.num_layers == len(blocks)
    assert shape.block_parameters == max(sum(weight.numel() for weight in block.parameters()) for block in blocks)
    assert shape.decoder_parameters == sum(weight.numel() for block in blocks for weight in block.parameters())
    towers = (".visual.", ".vision_tower.", ".multi_modal_projector.", ".embed_vision.")
    vision = [weight for key, weight in model.named_parameters() if any(name in key for name in towers)]
    assert shape.num_vision_parameters == sum(weight.numel() for weight in vision)
    linear = [layer for block in blocks for layer in block.modules() if type(layer).__name__ == "Linear"]
    assert shape.adapted_width == sum(layer.in_features + layer.out_features for layer in linear)
    recurrent = [block for block in blocks if hasattr(block, "linear_attn")]
    assert shape.num_rule_layers == len(recurrent)


def test_parameters_of_every_family_are_counted():
    assert {name.partition(",")[0] for name in MODELS} == set(FAMILIES)


SMALL_HEADS = {"num_attention_heads": 28, "num_key_value_heads": 4}
QWEN2_5_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "tie_word_embeddings": False,
    **SMALL_HEADS,
}
PUBLISHED = {
    "Llama-3.1-8B": (
        8_030_261_248,
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "SmolLM2-135M": (
        134_515_008,
        {
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen2.5-7B": (7_615_616_512, {"model_type": "qwen2", **QWEN2_5_7B}),
    "Qwen2.5-VL-7B": (
        8_292_166_656,
        {
            "model_type": "qwen2_5_vl",
            **QWEN2_5_7B,
            "vision_config": {
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "out_hidden_size": 3584,
                "patch_size": 14,
                "in_chans": 3,
            },
        },
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        {
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_published_checkpoints(name):
    # Source: the totals that the checkpoints' own safetensors files add up to.
    num_parameters, config = PUBLISHED[name]
    assert ModelShape.from_config(config).num_parameters == num_parameters


def test_sharding_divides_what_its_stage_says(tmp_path):
    shape = shape_of("llama", tmp_path)
    alone = TrainMemory(tokens=1).estimate(shape).parts
    n = shape.num_parameters
    assert (alone["weights"], alone["gradients"], alone["optimizer"]) == (4 * n, 4 * n, 8 * n)
    expected = {0: (1, 1, 1), 1: (1, 1, 4), 2: (1, 4, 4), 3: (4, 4, 4)}
    for stage, shares in expected.items():
        parts = TrainMemory(tokens=1, data_parallel=4, zero_stage=stage).estimate(shape).parts
        assert tuple(alone[name] // parts[name] for name in ("weights", "gradients", "optimizer")) == shares, stage
        assert ("gathered" in parts) == (stage == 3)
    assert "gathered" not in alone
    # 2 bytes of weight and of gradient, 12 of optimizer, over 64 ranks: the figures of the ZeRO paper's first figure.
    mixed = {"weight_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 12, "data_parallel": 64}
    big = ModelShape(**{**vars(shape), "num_parameters": 7_500_000_000})
    for stage, gigabytes in {0: 120, 1: 31.4, 2: 16.6, 3: 1.9}.items():
        parts = TrainMemory(**mixed, zero_stage=stage).estimate(big).parts
        states = parts["weights"] + parts["gradients"] + parts["optimizer"]
        assert states / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_adapters_are_what_is_trained_and_are_shared_out_as_weights_are(tmp_path):
    """A of [rank, in] and B of [out, rank] on each of the seven matrices of a block, and their moments."""
    shape = shape_of("qwen3", tmp_path)
    ends = [(shape.hidden, shape.query_width)] * 2 + [(shape.hidden, shape.kv_width)] * 2
    ends += [(shape.hidden, shape.mlp_width)] * 3
    weights = 4 * shape.num_layers * sum(map(sum, ends))
    alone = TrainMemory(lora_rank=4).estimate(shape).parts
    assert (alone["gradients"], alone["optimizer"]) == (4 * weights, 8 * weights)
    assert alone["weights"] == 4 * (shape.num_parameters + weights)
    shared = TrainMemory(lora_rank=4, data_parallel=4).estimate(shape).parts
    assert (shared["gradients"], shared["optimizer"]) == (weights, 2 * weights)
    moments = TrainMemory(lora_rank=4, data_parallel=4, zero_stage=1).estimate(shape).parts
    assert (moments["gradients"], moments["optimizer"]) == (4 * weights, 2 * weights)


def test_weights_under_adapters_are_counted_as_they_are_held(tmp_path):
    """Embedding and head in a format of their own; without adapters the layout's narrower format says nothing."""
    shape = shape_of("qwen3", tmp_path)
    layout = TrainLayout(dp=2, zero_stage=3, frozen_weight_bytes=2, vocabulary_bytes=3)
    adapted, whole = (
        train_memory(TrainEngineSettings(lora_rank=rank), layout, shape, on_cpu=True).estimate(shape).parts
        for rank in (4, 0)
    )
    matrices = 2 * shape.vocabulary * shape.hidden
    wide_bytes = TrainMemory(lora_rank=4, data_parallel=2).estimate(shape).parts["weights"]
    assert wide_bytes - adapted["weights"] == (2 * (shape.num_parameters - matrices) + 1 * matrices) // 2
    assert whole["weights"] == 4 * shape.num_parameters // 2


def test_weights_that_ranks_do_not_share_are_counted_on_each_of_them(tmp_path):
    """Two ranks of tp hold a tenth of a model whole, and the rest cut; the optimizer's state of all is cut over dp."""
    shape = shape_of("qwen3", tmp_path)
    whole = shape.num_parameters // 10
    layout = TrainLayout(tp=2, dp=4, zero_stage=1, whole_parameters=whole)
    found = train_memory(TrainEngineSettings(), layout, shape, on_cpu=True).estimate(shape).parts
    held = (shape.num_parameters - whole) / 2 + whole
    assert (found["weights"], found["optimizer"]) == (int(4 * held), int(8 * held / 4))


def test_gradients_that_are_kept_whole_are_those_of_all_weights_that_train(tmp_path):
    shape = shape_of("qwen3", tmp_path)
    whole = TrainMemory(whole_gradient_bytes=4, data_parallel=4).estimate(shape).parts
    assert whole["whole gradients"] == 4 * shape.num_parameters
    assert whole["gradients"] == shape.num_parameters, "a quarter of their sums"
    adapters = TrainMemory(whole_gradient_bytes=4, data_parallel=4, lora_rank=4).estimate(shape).parts
    assert adapters["whole gradients"] == 4 * adapters["gradients"]
    halved = TrainMemory(whole_gradient_bytes=4, tensor_parallel=2).estimate(shape).parts
    assert halved["whole gradients"] == 2 * shape.num_parameters
    assert "whole gradients" not in TrainMemory(data_parallel=4).estimate(shape).parts


def test_a_pipelines_first_rank_holds_a_micro_batch_for_each_stage(tmp_path):
    shape = shape_of("qwen3", tmp_path)
    one, two = (TrainMemory(pipeline_parallel=stages).estimate(shape).parts for stages in (1, 2))
    assert two["activations"] == one["activations"]
    assert two["weights"] == pytest.approx(one["weights"] / 2, abs=4)


def test_a_first_policy_that_is_kept_takes_the_weights_again(tmp_path):
    shape = shape_of("qwen3", tmp_path)
    parts = TrainMemory(keeps_reference=True, data_parallel=2).estimate(shape).parts
    assert parts["reference"] == parts["weights"] > 0
    assert "reference" not in TrainMemory(data_parallel=2).estimate(shape).parts


def test_checkpointing_keeps_one_block_and_the_inputs_of_the_others(tmp_path):
    shape = shape_of("qwen3", tmp_path)
    whole = TrainMemory(tokens=100).estimate(shape).parts["activations"]
    cut = TrainMemory(tokens=100, recomputes=True).estimate(shape).parts["activations"]
    assert whole == 3 * 100 * 4 * block_activations(shape)
    assert cut == 100 * 4 * (3 * shape.hidden + block_activations(shape))


def test_logits_and_their_gradient_exist_for_a_chunk_and_what_is_kept_of_all_is_bounded(tmp_path):
    shape = shape_of("llama", tmp_path)

    def logits(**settings):
        return TrainMemory(tokens=100, compute_bytes=2, **settings).estimate(shape).parts["logits"]

    vocabulary = shape.vocabulary
    assert logits() == 2 * 4 * 100 * vocabulary
    assert logits(head_tokens=200) == 2 * 4 * 100 * vocabulary, "no more than there are"
    assert logits(head_tokens=16) == 2 * 4 * 16 * vocabulary
    assert logits(head_tokens=16, kept_bytes=50) == 2 * 4 * 16 * vocabulary + 50
    assert logits(head_tokens=16, kept_bytes=2**30) == 2 * 4 * 16 * vocabulary + 2 * 100 * vocabulary
    assert logits(tensor_parallel=2) == logits() // 2


def test_what_sharded_ranks_gather_is_a_block_and_the_vocabulary_with_their_gradients(tmp_path):
    """Weights in bfloat16 (a block's) and float32 (the vocabulary's); see the orders in `TrainMemory._gathered`."""
    shape = shape_of("llama", tmp_path)
    assert not shape.is_tied
    tied = ModelShape(**{**vars(shape), "is_tied": True})
    block, matrix = shape.block_parameters, shape.vocabulary * shape.hidden

    def gathered(shape, **settings):
        return TrainMemory(tokens=1, compute_bytes=2, data_parallel=4, **settings).estimate(shape).parts["gathered"]

    assert gathered(tied) == (2 * 2 + 2 + 4) * block + (4 + 2 * 4) * matrix
    assert gathered(shape) == gathered(tied) + (4 + 4) * matrix, "the embedding, and its gradient"
    assert gathered(tied, vocabulary_bytes=2) == (2 * 2 + 2 + 4) * block + (2 + 2 + 4) * matrix, "summed in float32"
    assert gathered(shape, vocabulary_bytes=2) == gathered(tied, vocabulary_bytes=2) + (2 + 2) * matrix
    assert gathered(shape, lora_rank=8) == 2 * 2 * block + 2 * 4 * matrix, "frozen weights have no gradients"
    assert gathered(shape, tensor_parallel=2) == gathered(shape) // 2


@pytest.mark.parametrize(
    ("on_cpu", "head_bytes", "kept_bytes"), [(True, 64 * 2**20, 256 * 2**20), (False, 512 * 2**20, 2 * 2**30)]
)
def test_a_trainer_s_memory_is_that_of_its_settings_and_its_layout(on_cpu, head_bytes, kept_bytes):
    _, config = PUBLISHED["Llama-3.1-8B"]
    shape = ModelShape.from_config(config)
    engine = TrainEngineSettings(dtype="bfloat16", max_tokens_per_microbatch=4096, activation_checkpointing=True)
    layout = TrainLayout(
        dp=3,
        cp=4,
        tp=2,
        pp=5,
        ep=6,
        zero_stage=1,
        weight_bytes=2,
        gradient_bytes=3,
        optimizer_bytes=12,
        whole_gradient_bytes=5,
        vocabulary_bytes=7,
        fuses_recurrence=True,
    )
    found = train_memory(engine, layout, shape, on_cpu=on_cpu, keeps_reference=True)
    assert found == TrainMemory(
        weight_bytes=2,
        adapter_bytes=2,
        gradient_bytes=3,
        optimizer_bytes=12,
        whole_gradient_bytes=5,
        vocabulary_bytes=7,
        compute_bytes=2,
        data_parallel=3 * 4,
        tensor_parallel=2,
        pipeline_parallel=5,
        expert_parallel=6,
        zero_stage=1,
        tokens=4096 // 4,
        recomputes=True,
        keeps_reference=True,
        head_tokens=head_bytes // (4 * shape.vocabulary),
        kept_bytes=kept_bytes,
        fuses_recurrence=not on_cpu,
    )
    adapters = train_memory(TrainEngineSettings(lora_rank=8), layout, shape, on_cpu=on_cpu, keeps_reference=True)
    assert (adapters.lora_rank, adapters.compute_bytes) == (8, 4)
    assert not adapters.keeps_reference, "without the adapters the model is the first policy"


@pytest.mark.parametrize(
    ("parts", "settings", "advice"),
    [
        ({"weights": 3, "optimizer": 4, "activations": 6}, {}, "more engine.num_ranks, or adapters alone"),
        ({"weights": 5, "reference": 5, "logits": 6}, {"lora_rank": 8}, "more engine.num_ranks"),
        ({"weights": 3, "gradients": 3, "activations": 7}, {}, "engine.activation_checkpointing = true, or fewer"),
        ({"weights": 3, "whole gradients": 4, "logits": 7}, {}, 'engine.options.reduce_once = "auto"'),
        ({"weights": 3, "logits": 7}, {"activation_checkpointing": True}, "fewer engine.max_tokens_per_microbatch"),
    ],
)
def test_what_takes_the_most_is_what_to_change(parts, settings, advice):
    said = train_advice(TrainEngineSettings(**settings), MemoryEstimate(parts))
    assert said.startswith(advice)
    assert ("adapters" in said) == ("adapters" in advice)


def test_the_kv_cache_is_what_is_set_aside_and_holds_one_sample_of_the_longest(tmp_path):
    shape = shape_of("qwen3", tmp_path)
    longest = 7 * RolloutMemory().kv_bytes_per_token(shape)

    def cache(cache_bytes):
        held = {"weights", "weight sync"}
        memory = RolloutMemory(max_running=5, max_model_len=7, cache_bytes=cache_bytes, sync_bytes=11)
        parts = memory.estimate(shape).parts
        assert (parts["weights"], parts["weight sync"]) == (2 * shape.num_parameters, 11)
        return {name: size for name, size in parts.items() if name not in held}

    assert cache(None) == {"KV cache": 5 * longest}
    assert cache(10**6) == {"KV cache": 10**6}
    assert cache(10) == {"KV cache": longest}
    assert cache(0) == {"KV cache of one sample": longest}


def test_weights_of_the_blocks_may_be_held_in_another_format_than_the_rest(tmp_path):
    shape = shape_of("qwen3", tmp_path)
    in_blocks = 3 * shape.block_parameters
    held = [RolloutMemory(weight_bytes=4, matrix_bytes=size).held_weights(shape) for size in (0, 4, 1)]
    assert held == [4 * shape.num_parameters, 4 * shape.num_parameters, 4 * shape.num_parameters - 3 * in_blocks]


def test_the_kv_cache_is_cut_by_heads_until_there_is_one_a_rank(tmp_path):
    shape = shape_of("qwen3", tmp_path)  # 2 heads of keys and values, of width 16, in 3 layers
    sizes = [RolloutMemory(tensor_parallel=tp).kv_bytes_per_token(shape) for tp in (1, 2, 4)]
    assert sizes == [2 * 2 * 16 * 3 * 2, 2 * 16 * 3 * 2, 2 * 16 * 3 * 2]
    parts = RolloutMemory(max_running=5, max_model_len=7).estimate(shape).parts
    assert parts["KV cache"] == 5 * 7 * sizes[0]


def test_compressed_keys_and_values_are_kept_whole_on_every_rank():
    """14 numbers of both and 8 of the part of keys that knows its position, in each attention of three blocks."""
    for name, num_attentions in {"deepseek_v3": 3, "longcat_flash": 6}.items():
        sizes = [RolloutMemory(tensor_parallel=tp).kv_bytes_per_token(shape_of(name, None)) for tp in (1, 4)]
        assert sizes == [(14 + 8) * num_attentions * 2] * 2
    expanded = [RolloutMemory(tensor_parallel=tp).kv_bytes_per_token(shape_of("minicpm3", None)) for tp in (1, 2)]
    assert expanded == [2 * 6 * 16 * 3 * 2, 2 * 3 * 16 * 3 * 2], "vLLM keeps those of the heads, values as wide as keys"


def test_a_sample_has_keys_of_its_tokens_in_layers_with_attention_and_states_in_the_others():
    shape = shape_of("qwen3_5_text", None)  # one layer with attention, with 2 heads of width 16, and four with the rule
    memory = RolloutMemory(max_running=5, max_model_len=7)
    assert memory.kv_bytes_per_token(shape) == 2 * 2 * 16 * 2
    window, state = 3 * (2 * 2 * 32 + 4 * 24), 4 * 32 * 24
    assert memory.state_bytes_per_sample(shape) == 4 * (2 * window + 2 * state)
    assert replace(memory, tensor_parallel=2).state_bytes_per_sample(shape) == 2 * (2 * window + 2 * state)
    assert replace(memory, state_bytes=4).state_bytes_per_sample(shape) == 4 * (2 * window + 4 * state)
    assert replace(memory, states_per_sample=2).state_bytes_per_sample(shape) == 8 * (2 * window + 2 * state)
    in_float32 = ModelShape.from_config({**RULE, "model_type": "qwen3_5_text", "mamba_ssm_dtype": "float32"})
    assert memory.state_bytes_per_sample(in_float32) == 4 * (2 * window + 4 * state)
    longest = 7 * memory.kv_bytes_per_token(shape) + memory.state_bytes_per_sample(shape)
    assert memory.estimate(shape).parts["KV cache and states"] == 5 * longest
    assert replace(memory, cache_bytes=10).estimate(shape).parts["KV cache and states"] == longest
    assert replace(memory, cache_bytes=0).estimate(shape).parts["KV cache and states of one sample"] == longest


def test_a_classifier_has_no_row_for_each_token(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**TEXT, "model_type": "llama"}))
    whole, shape = read_shape(str(tmp_path)), read_shape(str(tmp_path), has_head=False)
    assert whole.num_parameters - shape.num_parameters == 97 * 48
    one, two = (ClassifierMemory(weight_bytes=2, tokens=tokens).estimate(shape).parts for tokens in (10, 20))
    assert one["weights"] == two["weights"] == 2 * shape.num_parameters
    assert 2 * one["activations"] == two["activations"] == 2 * 20 * block_activations(shape)


def test_a_family_that_is_not_known_is_refused_by_name():
    with pytest.raises(ModelError, match="'gpt2' is not known: known families are afmoe"):
        ModelShape.from_config({"model_type": "gpt2"})
    with pytest.raises(ModelError, match="lacks 'intermediate_size'"):
        ModelShape.from_config({"model_type": "llama", **{k: v for k, v in TEXT.items() if k != "intermediate_size"}})


def test_experts_are_held_by_those_that_share_them():
    shape = ModelShape.from_config({**MOE, "model_type": "qwen3_moe"})
    sparse, dense = shape.expert_parameters, shape.num_parameters - shape.expert_parameters
    assert sparse == 2 * 5 * 3 * 48 * 24, "two of the three blocks have five experts of three matrices"
    whole = {"weight_bytes": 2, "optimizer_bytes": 12, "tokens": 16, "zero_stage": 1}
    parts = TrainMemory(**whole, data_parallel=4, tensor_parallel=2, expert_parallel=4).estimate(shape).parts
    assert parts["weights"] == (dense // 2 + sparse // 4) * 2
    assert parts["gradients"] == (dense // 2 + sparse // 4) * 4
    assert parts["optimizer"] == (dense / 2 / 4 + sparse / 4 / 2) * 12, "eight ranks hold four kinds of experts twice"
    assert parts["exchange"] == 2 * 16 * shape.num_experts_per_token * shape.hidden * 4, "there and back"
    gathered = [
        TrainMemory(tokens=16, data_parallel=8, expert_parallel=ep).estimate(shape).parts["gathered"] for ep in (1, 4)
    ]
    bytes_of_block = 2 * 4 + 4 + 4
    assert gathered[0] - gathered[1] == sparse // 2 * 3 // 4 * bytes_of_block, "three of four ranks' experts stay there"
    together = TrainMemory(**whole, data_parallel=4, tensor_parallel=2).estimate(shape).parts
    assert "exchange" not in together
    assert together["weights"] == shape.num_parameters // 2 * 2, "without a split of their own, like everything else"
