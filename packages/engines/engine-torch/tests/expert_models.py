"""Folders of tiny random mixtures of experts: eight experts, two of a token, and no weight that a fault could leave."""

import torch
from gpt_oss_folders import SMALL as GPT_OSS
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "hidden_size": 32,
    "vocab_size": 300,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
EIGHT = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8) | {"num_experts_per_tok": 2}
RULE = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4}
RULE |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 3}
MODELS = {
    "qwen3_moe": {},
    "qwen3_5_moe_text": RULE,
    "glm4_moe": GROUPS,
    "deepseek_v3": {**LATENT, **GROUPS, "num_key_value_heads": 4},
    "minimax_m2": {"intermediate_size": 16},
    "gpt_oss": {**GPT_OSS, "num_experts_per_tok": 3},
}
"""Settings by family: some have a shared expert, dense layers, correction biases, groups of experts, or biases."""


def write_experts(folder, family, **settings):
    """Write one in float32; biases of experts and of routers, which a new model has at zero, are random too."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **EIGHT, **MODELS[family], **settings})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(each for name, each in model.named_buffers() if "bias" in name)):
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)
    return folder
