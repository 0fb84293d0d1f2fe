"""Configurations of models: tiny ones of every family, and some of published sizes."""

import json

from offbeat_placement import ModelShape

TEXT = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
QWEN3 = {**TEXT, "head_dim": 16}
MOE = {**QWEN3, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
QWEN2_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 4, "patch_size": 14, "mlp_ratio": 4}
QWEN2_5_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_heads": 4,
    "out_hidden_size": 48,
    "fullatt_block_indexes": [1],
}
QWEN3_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_heads": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 2],
}


def with_vision(text, vision):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    top = {"tie_word_embeddings": text["tie_word_embeddings"]}
    return {"text_config": {**text, "rope_parameters": rope}, "vision_config": vision, **top}


NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
RULE = {
    **QWEN3,
    "num_hidden_layers": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    **NO_TOKENS,
}
GLM = {**QWEN3, **NO_TOKENS, "attention_bias": False}
MOE_ALONE = {key: value for key, value in MOE.items() if key not in {"num_experts", "mlp_only_layers"}}
SHARING = {
    **TEXT,
    **NO_TOKENS,
    "n_routed_experts": 5,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
OTHERWISE_SHARING = {key: value for key, value in SHARING.items() if not key.startswith("n_")}
OTHERWISE_SHARING |= {"num_experts": 5, "num_shared_experts": 1}
SHARING_IN_ALL = {key: value for key, value in SHARING.items() if key != "first_k_dense_replace"} | {"head_dim": 16}
OLMOE = {**TEXT, **NO_TOKENS, "num_experts": 5, "num_experts_per_tok": 2}
SPARSE_RULE = {**RULE, **MOE, "num_hidden_layers": 5, "mlp_only_layers": [], "shared_expert_intermediate_size": 20}
QWEN3_5_MOE = {key: value for key, value in SPARSE_RULE.items() if key not in {"intermediate_size", "mlp_only_layers"}}
QWEN3_5_VISION = {key: value for key, value in QWEN3_VISION.items() if key != "deepstack_visual_indexes"}
KINDS = ["linear_attention", "full_attention"]
KINDS_OF_WINDOW = ["sliding_attention", "full_attention"]

GEMMA4 = {
    **QWEN3,
    "pad_token_id": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
}
GEMMA4_LARGE = {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_SHARING = {**GEMMA4, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
GEMMA4_SHARING["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention", *KINDS_OF_WINDOW]
GEMMA4_SPARSE = {**GEMMA4, "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24}
GEMMA4_TOWER = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
GEMMA4_TOWER |= {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 64}
SIGLIP = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
SIGLIP |= {"image_size": 16, "patch_size": 4, "vision_use_head": False}

LATENT = {**TEXT, **NO_TOKENS, "num_key_value_heads": 6, "num_hidden_layers": 3}
LATENT |= {"q_lora_rank": 20, "kv_lora_rank": 14, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
PLAIN_QUERIES = {"q_lora_rank": None, "v_head_dim": 12}
LATENT_SHARING = {**SHARING, **LATENT}
LATENT_IN_LAST = {key: value for key, value in LATENT_SHARING.items() if key != "first_k_dense_replace"}
LONGCAT = {key: value for key, value in LATENT.items() if key not in {"intermediate_size", "num_hidden_layers"}}
LONGCAT |= {"num_layers": 3, "ffn_hidden_size": 80, "expert_ffn_hidden_size": 24, "n_routed_experts": 5}
LONGCAT |= {"moe_topk": 2, "zero_expert_num": 3, "head_dim": 8}
ERNIE = {
    **TEXT,
    **NO_TOKENS,
    "moe_intermediate_size": 24,
    "moe_num_experts": 5,
    "moe_k": 2,
    "moe_num_shared_experts": 2,
}
GPT_OSS = {**QWEN3, "num_local_experts": 5, "num_experts_per_tok": 2}


def with_tower(text, vision, **more):
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": text["tie_word_embeddings"], **more}


MODELS = {
    "llama": TEXT,
    "llama, tied": {**TEXT, "tie_word_embeddings": True},
    "llama, biased": {**TEXT, "attention_bias": True, "mlp_bias": True},
    "mistral": {**TEXT, "head_dim": 8},
    "qwen2": TEXT,
    "qwen2, tied": {**TEXT, "tie_word_embeddings": True},
    "qwen3": QWEN3,
    "qwen3, biased": {**QWEN3, "attention_bias": True},
    "qwen3_moe": MOE,
    "qwen3_moe, every second": {**MOE, "decoder_sparse_step": 2, "mlp_only_layers": []},
    "qwen2_vl": with_vision(TEXT, QWEN2_VISION),
    "qwen2_5_vl": with_vision(TEXT, QWEN2_5_VISION),
    "qwen3_vl": with_vision(QWEN3, QWEN3_VISION),
    "qwen3_vl, tied": with_vision({**QWEN3, "tie_word_embeddings": True}, QWEN3_VISION),
    "qwen3_vl_moe": with_vision({**MOE, "mlp_only_layers": []}, QWEN3_VISION),
    "qwen3_5_text": RULE,
    "qwen3_5_text, tied": {**RULE, "tie_word_embeddings": True, "layer_types": KINDS + KINDS[:1] * 3},
    "qwen3_5_text, biased": {**RULE, "attention_bias": True},
    "qwen3_5": with_vision(RULE, QWEN3_5_VISION),
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_5_moe": with_vision(QWEN3_5_MOE, QWEN3_5_VISION),
    "qwen3_next": SPARSE_RULE,
    "qwen3_next, every second": {**SPARSE_RULE, "decoder_sparse_step": 2, "linear_conv_kernel_dim": 3},
    "olmo_hybrid": RULE,
    "afmoe": {**OTHERWISE_SHARING, "head_dim": 16, "num_dense_layers": 1, "global_attn_every_n_layers": 2},
    "apertus": TEXT,
    "arcee": {**TEXT, "head_dim": 8},
    "arcee, biased": {**TEXT, "attention_bias": True, "mlp_bias": True},
    "bitnet": {**TEXT, **NO_TOKENS},
    "cohere": {**TEXT, **NO_TOKENS},
    "cohere, normed": {**TEXT, **NO_TOKENS, "use_qk_norm": True, "tie_word_embeddings": True},
    "cohere2": {**TEXT, **NO_TOKENS, "attention_bias": True},
    "cwm": {**TEXT, "head_dim": 8},
    "axk1": LATENT_SHARING,
    "deepseek_v2": LATENT_SHARING,
    "deepseek_v2, biased": {**LATENT_SHARING, **PLAIN_QUERIES, "attention_bias": True, "mlp_bias": True},
    "deepseek_v3": LATENT_SHARING,
    "deepseek_v3, plain queries": {**LATENT_SHARING, **PLAIN_QUERIES},
    "dots1": SHARING,
    "ernie4_5": {**TEXT, "head_dim": 8},
    "ernie4_5, biased": {**TEXT, "head_dim": 8, "use_bias": True},
    "ernie4_5_moe": ERNIE,
    "ernie4_5_moe, biased": {**ERNIE, "use_bias": True, "moe_layer_start_index": 2},
    "exaone4": TEXT,
    "exaone_moe": OTHERWISE_SHARING,
    "flex_olmo": OLMOE,
    "gemma": QWEN3,
    "gemma, biased": {**QWEN3, "attention_bias": True, "tie_word_embeddings": True},
    "gemma3_text": QWEN3,
    "gemma3": with_tower(QWEN3, SIGLIP, mm_tokens_per_image=4),
    "gemma3, with a head": with_tower(QWEN3, {**SIGLIP, "vision_use_head": True}, mm_tokens_per_image=4),
    "gemma4": with_tower(GEMMA4, GEMMA4_TOWER),
    "gemma4_text": GEMMA4,
    "gemma4_text, one projection": {**GEMMA4_LARGE, "hidden_size_per_layer_input": 0},
    "gemma4_text, sharing": GEMMA4_SHARING,
    "gemma4_text, experts": GEMMA4_SPARSE,
    "gemma4_unified_text": {**GEMMA4, "hidden_size_per_layer_input": 0},
    "glm": GLM,
    "glm, biased": {**GLM, "attention_bias": True},
    "glm4": GLM,
    "glm4_moe": {**SHARING, "use_qk_norm": True, "head_dim": 16},
    "glm4_moe, biased": {**SHARING, "use_qk_norm": False, "attention_bias": True, "head_dim": 16},
    "glm4_moe_lite": LATENT_IN_LAST,
    "gpt_oss": GPT_OSS,
    "gpt_oss, unbiased": {**GPT_OSS, "attention_bias": False},
    "granite": TEXT,
    "granite, biased": {**TEXT, "attention_bias": True, "mlp_bias": True},
    "granite_swa": {**TEXT, "tie_word_embeddings": True},
    "granitemoe": {**TEXT, "num_local_experts": 5},
    "granitemoe_swa": {**TEXT, "num_local_experts": 5, "shared_intermediate_size": 20},
    "granitemoeshared": {**TEXT, "num_local_experts": 5, "shared_intermediate_size": 20, "attention_bias": True},
    "helium": {**TEXT, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "hunyuan_v1_dense": QWEN3,
    "hunyuan_v1_dense, biased": {**QWEN3, "attention_bias": True},
    "hunyuan_v1_moe": {**QWEN3, "num_experts": 5, "moe_topk": 2},
    "hy_v3": {**OTHERWISE_SHARING, "head_dim": 16},
    "longcat_flash": LONGCAT,
    "longcat_flash, biased": {**LONGCAT, "attention_bias": True, "router_bias": True, "v_head_dim": 12},
    "mellum": {**MOE_ALONE, "num_local_experts": 5},
    "minicpm3": LATENT,
    "minicpm3, biased": {**LATENT, **PLAIN_QUERIES, "attention_bias": True, "mlp_bias": True},
    "minimax_m2": {**OLMOE, "head_dim": 16, "num_local_experts": 5},
    "ministral": QWEN3,
    "ministral3": QWEN3,
    "mixtral": {**OLMOE, "head_dim": 16, "num_local_experts": 5},
    "nanochat": TEXT,
    "olmo": TEXT,
    "olmo2": TEXT,
    "olmo3": TEXT,
    "olmoe": OLMOE,
    "phi3": {**TEXT, **NO_TOKENS},
    "qwen2_moe": {**MOE_ALONE, "num_experts": 5, "shared_expert_intermediate_size": 20},
    "qwen2_moe, unbiased": {**MOE, "shared_expert_intermediate_size": 20, "qkv_bias": False},
    "seed_oss": {**QWEN3, "attention_bias": True},
    "seed_oss, biased": {**QWEN3, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    "smollm3": {**TEXT, **NO_TOKENS},
    "smollm3, biased": {**TEXT, **NO_TOKENS, "attention_bias": True, "mlp_bias": True},
    "solar_open": SHARING_IN_ALL,
    "starcoder2": TEXT,
    "starcoder2, unbiased": {**TEXT, "use_bias": False},
    "youtu": LATENT,
    "youtu, plain queries": {**LATENT, **PLAIN_QUERIES, "tie_word_embeddings": True},
    # The defaults of these are sizes of published models.
    "qwen3_5_text, 9B": {},
    "qwen3_5, 9B": {},
    "qwen3_5_moe_text, 35B-A3B": {},
    "qwen3_5_moe, 35B-A3B": {},
    "qwen3_next, 80B-A3B": {},
    "olmo_hybrid, 7B": {},
    "deepseek_v3, 671B": {},
    "glm4_moe_lite, 30B-A3B": {},
    "gpt_oss, 120B": {},
    "longcat_flash, 560B": {},
    "minicpm3, 4B": {},
}


def build(name, folder, device="meta"):
    """The model, and its config.json as transformers writes it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    family = name.partition(",")[0]
    config = AutoConfig.for_model(family, **MODELS[name])
    config.save_pretrained(folder)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device(device):
        model = kind.from_config(config)
    model.tie_weights()
    return json.loads((folder / "config.json").read_text()), model


def shape_of(name, tmp_path):
    return ModelShape.from_config({"model_type": name.partition(",")[0], **MODELS[name]})
