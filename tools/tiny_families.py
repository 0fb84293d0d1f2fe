"""Tiny random models of every family of transformers, for comparisons of engines with transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY: Final = 128
MAX_PARAMETERS: Final = 60_000_000
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dim_ff", "feed_forward_size", "ffn_hidden_size"), 128),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "qk_head_dim": 32,
    "head_dim": 16,
    "kv_channels": 16,
    "max_position_embeddings": 256,
    "n_positions": 256,
    # Shorter than the sequences, and longer than what the check at load lowers windows to.
    **dict.fromkeys(("sliding_window", "attention_window_size"), 16),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "logits_scaling": 4.0,
    "logit_scale": 0.5,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "rotary_dim": 8,
    "hidden_size_global": 64,
    "attention_multiplier": 0.3,
    "routed_scaling_factor": 1.5,
    "hidden_size_per_layer_input": 16,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
WITH_STATES = {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2}
BOTH_KINDS = ["sliding_attention", "full_attention"] * 2
OF_A_FAMILY: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "layer_types": BOTH_KINDS,
        "rope_parameters": {key: {**ROPE, "mrope_section": [2, 3, 3]} for key in BOTH_KINDS},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},  # published, and read by vLLM alone
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3": {
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        "mm_tokens_per_image": 4,
    },
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": BOTH_KINDS},
    "gemma4_text": {"layer_types": BOTH_KINDS, "num_kv_shared_layers": 0},
    "gemma4_unified_text": {"layer_types": BOTH_KINDS, "num_kv_shared_layers": 0},
    "gemma4": {"vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "position_embedding_size": 64}},
    "gemma4_unified": {"vision_config": {}},
    "glm4_moe": {"head_dim": 32},  # vLLM reads what transformers computes where it is missing
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "nemotron": {"num_key_value_heads": 2},
    "prophetnet": {"num_hidden_layers": ..., "num_encoder_layers": 2, "num_decoder_layers": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 64,
        "ple_embed_dim": 8,
        "hc_lowrank": 8,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (32, 32)},
    "xlnet": {"max_position_embeddings": ...},
    "xmod": {"default_language": "en_XX"},
    "zamba": WITH_STATES,
    "zamba2": WITH_STATES,
    "zaya": {"num_experts_per_tok": 1},
}
"""Sizes that `SIZES` lacks, or (...) says wrongly, for one family."""


def tiny_config(family: str, **sizes: Any) -> PretrainedConfig:
    """Make the family's own config class, with sizes of a few dozen wherever it has a size; `sizes` precede `SIZES`."""
    return _shrink(CONFIG_MAPPING[family], SIZES | sizes)


def _shrink(kind: type[PretrainedConfig], sizes: dict[str, Any]) -> PretrainedConfig:
    usual = kind()
    found = {name: value for name, value in sizes.items() if _is_size(kind, usual, name)}
    if "kv_lora_rank" in found and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    for name in getattr(kind, "sub_configs", None) or {}:
        if isinstance(part := getattr(usual, name, None), PretrainedConfig):
            found[name] = _shrink(type(part), sizes)
    found |= OF_A_FAMILY.get(kind.model_type, {})
    return kind(**{name: value for name, value in found.items() if value is not ...})


def _is_size(kind: type[PretrainedConfig], usual: PretrainedConfig, name: str) -> bool:
    if isinstance(of_class := getattr(kind, name, None), property) and of_class.fset is None:
        return False
    try:
        value = getattr(usual, name)
    except (AttributeError, AmbiguousGlobalPerLayerAttributeError):
        return name == "head_dim" and hasattr(kind, "head_dim")
    return name == "head_dim" or (isinstance(value, int | float) and not isinstance(value, bool))


def write_tiny_family(family: str, folder: Path, settings: Mapping[str, Any] | None = None, **sizes: Any) -> None:
    """Write a random model in which no weight is zero, one, or the value of a fresh model.

    Args:
        family: `model_type` of transformers.
        folder: to write into.
        settings: of its config, whatever their kind, after the sizes.
        **sizes: see `tiny_config`.
    """
    config = tiny_config(family, **sizes)
    for name, value in (settings or {}).items():
        setattr(config, name, value)
    with torch.device("meta"):
        size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    assert size < MAX_PARAMETERS, f"{family} has {size} parameters: SIZES lacks one of its names"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.1)
        # A family is not to be refused for what its tiny configuration lacks.
        model.eval()(torch.tensor([[5, 9, 7]]), use_cache=False)
    model.save_pretrained(folder)
