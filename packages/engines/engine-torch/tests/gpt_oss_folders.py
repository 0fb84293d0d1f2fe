"""Folders of tiny random gpt-oss models: every layer kind, and no weight of a value that a fault could leave it."""

import torch
from transformers import GptOssConfig, GptOssForCausalLM

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.5,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}


def write_model(folder):
    """Write one in float32: biases of experts, which a new model has at zero, and sinks are random too."""
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**SMALL))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.add_(torch.randn_like(tensor) * (1.0 if name.endswith("sinks") else 0.2))
    model.save_pretrained(folder)
    return folder
