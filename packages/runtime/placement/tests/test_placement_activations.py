"""Activations that blocks keep for the backward pass, against what torch keeps of models that transformers builds."""

from weakref import WeakSet

import pytest
from placement_models import KINDS, MODELS, TEXT, build, shape_of

from offbeat_core import TrainEngineSettings, TrainLayout
from offbeat_placement import ModelShape, train_memory
from offbeat_placement._memory import block_activations, block_bytes

OF_BLOCKS = [
    *("cwm", "ernie4_5", "exaone4", "gemma", "gemma3_text", "glm", "glm4", "granite", "helium", "hunyuan_v1_dense"),
    *("llama", "ministral", "ministral3", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3"),
    *("dots1", "exaone_moe", "flex_olmo", "glm4_moe", "hy_v3", "mellum", "minimax_m2", "mixtral", "olmoe"),
    *("qwen2_moe", "solar_open"),
    *("afmoe", "apertus", "arcee", "bitnet", "cohere", "cohere, normed", "cohere2", "ernie4_5_moe", "granite_swa"),
    *("granitemoe", "granitemoe_swa", "granitemoeshared", "hunyuan_v1_moe", "nanochat", "olmo", "starcoder2"),
    *("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu", "gpt_oss"),
]
"""Models of text whose last two blocks are alike."""


@pytest.mark.parametrize("name", OF_BLOCKS)
def test_activations_are_those_that_torch_keeps(name, tmp_path):
    config, model = build(name, tmp_path, "cpu")
    per_block = (count_kept(model, 3) - count_kept(model, 1)) / 2
    estimated = 4 * TOKENS * block_activations(ModelShape.from_config(config))
    assert estimated == pytest.approx(per_block, rel=0.15)


TOKENS = 128
"""Two rows of one chunk of the gated delta rule each."""


class Saved:
    """A tensor for as long as the graph keeps it."""

    def __init__(self, tensor):
        self.tensor = tensor


def count_kept(model, num_layers):
    """Bytes that torch keeps of the first so many blocks for the backward pass."""
    import torch

    blocks, model.model.layers = model.model.layers, model.model.layers[:num_layers]
    model.eval().config._attn_implementation = "sdpa"  # as the engine: without dropout
    weights = {weight.data_ptr() for weight in model.parameters()}
    ids, kept = torch.arange(TOKENS).view(2, -1) % TEXT["vocab_size"], WeakSet()

    def save(tensor):
        kept.add(saved := Saved(tensor))
        return saved

    if not getattr(model.config, "hidden_size_per_layer_input", 0):  # by the number Gemma 4 cuts embeddings for layers
        attentions = 2 if model.config.model_type == "longcat_flash" else 1  # of a block: this is their number
        model.model.config.num_hidden_layers = num_layers * attentions
    with torch.autograd.graph.saved_tensors_hooks(save, lambda saved: saved.tensor):
        output = model.model(input_ids=ids, use_cache=False).last_hidden_state
    assert output.requires_grad
    model.model.layers = blocks
    storages = {storage.data_ptr(): storage.nbytes() for storage in (saved.tensor.untyped_storage() for saved in kept)}
    return sum(num_bytes for place, num_bytes in storages.items() if place not in weights)


WIDTHS = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


@pytest.fixture
def attends_at_any_width(monkeypatch):
    """Attention that keeps queries, keys, values and its output, as kernels do: torch's on a CPU needs equal widths."""
    import torch

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(context, query, key, value):
            output = query.new_zeros(*query.shape[:-1], value.shape[-1])
            context.save_for_backward(query, key, value, output)
            return output

    def attend(query, key, value, **_):
        return Attention.apply(query, key, value)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)


@pytest.mark.parametrize("name", ["deepseek_v3", "minicpm3"])
def test_each_width_of_compressed_attention_keeps_what_is_counted(name, tmp_path, monkeypatch, attends_at_any_width):
    """Each alone: together they may hide each other's errors."""

    def kept_and_counted(**changes):
        monkeypatch.setitem(MODELS, changed := f"{name}, changed", {**MODELS[name], **changes})
        config, model = build(changed, tmp_path, "cpu")
        kept = (count_kept(model, 3) - count_kept(model, 1)) / (2 * 4 * TOKENS)
        return kept, block_activations(ModelShape.from_config(config))

    before = kept_and_counted()
    for key in WIDTHS:
        after = kept_and_counted(**{key: MODELS[name][key] + 16})
        kept, counted = (more - less for more, less in zip(after, before, strict=True))
        assert counted == pytest.approx(kept, rel=0.01), key


@pytest.mark.parametrize("name", ["gemma4_text", "gemma4_text, one projection", "gemma4_text, experts"])
def test_activations_of_layers_that_differ_are_those_that_torch_keeps(name, tmp_path):
    """Two layers with a window, and one without."""
    config, model = build(name, tmp_path, "cpu")
    kept = [count_kept(model, num_layers) for num_layers in (1, 2, 3)]
    all_three = kept[2] - kept[1] + 2 * (kept[1] - kept[0])
    assert TOKENS * sum(block_bytes(ModelShape.from_config(config), 4)) == pytest.approx(all_three, rel=0.15)


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"])
def test_activations_of_both_kinds_of_blocks_are_those_that_torch_keeps(name, tmp_path):
    config, model = build(name, tmp_path, "cpu")
    assert config["layer_types"] == KINDS[:1] * 3 + KINDS[1:] + KINDS[:1]
    kept = [count_kept(model, num_layers) for num_layers in (1, 3, 4)]
    of_attention, *_, of_rule = block_bytes(ModelShape.from_config(config), 4)
    assert TOKENS * of_rule == pytest.approx((kept[1] - kept[0]) / 2, rel=0.15)
    assert TOKENS * of_attention == pytest.approx(kept[2] - kept[1], rel=0.15)


def test_kernels_of_the_rule_keep_its_inputs_and_are_not_for_processors():
    """Queries and keys of 4 heads of 32, values of 4 of 24, a row of a chunk; and one convolution's input less."""
    shape, engine = shape_of("qwen3_5_text", None), TrainEngineSettings(dtype="bfloat16")
    functions, kernels = (block_bytes(shape, 2, fuses_recurrence=fuses) for fuses in (False, True))
    assert functions[0] == kernels[0], "attention"
    torch_rule = 4 * (11 * 128 + 3 * 96 + 5 * 4 * 64 + 4 * 32 * 24 // 64) + 2 * (2 * 2 * 32 + 96)
    assert functions[-1] - kernels[-1] == torch_rule - 2 * (2 * 128 + 96 + 4 * 64)
    for on_cpu in (True, False):
        memory = train_memory(engine, TrainLayout(fuses_recurrence=True), shape, on_cpu=on_cpu)
        kept = functions if on_cpu else kernels
        assert memory.estimate(shape).parts["activations"] == memory.tokens * sum(kept)
