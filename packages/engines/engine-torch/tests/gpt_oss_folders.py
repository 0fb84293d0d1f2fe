"""Folders of tiny random gpt-oss models: every layer kind, and no weight of a value that a fault could leave it."""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file
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


def write_model(folder, **changes):
    """Write one in float32: biases of experts, which a new model has at zero, and sinks are random too."""
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**SMALL | changes))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.add_(torch.randn_like(tensor) * (1.0 if name.endswith("sinks") else 0.2))
    model.save_pretrained(folder)
    return folder


def write_mxfp4(folder, **changes):
    """Write one whose experts are in mxfp4, blocks and scales random; return their weights in float64, by name."""
    write_model(folder, **changes)
    path, draw = folder / "model.safetensors", np.random.default_rng(0)
    tensors, decoded = load_file(path), {}
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, rows, columns = tensors.pop(name).shape
        blocks = draw.integers(0, 256, (experts, columns, rows // 32, 16)).astype(np.uint8)
        scales = draw.integers(127 - 6, 127 - 2, blocks.shape[:-1]).astype(np.uint8)
        decoded[name] = torch.from_numpy(decode(blocks, scales))
        tensors |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    published = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": published}))
    return decoded


def decode(blocks, scales):
    """[experts, rows, columns] float64 of blocks [experts, columns, groups, 16], a number after the other.

    A number has a sign, an exponent of two bits and one bit of fraction; the lower half of a byte comes first. Source:
    Open Compute Project, "Microscaling Formats (MX) Specification" 1.0, section 5.3.3 (E2M1) and 5.4.1 (E8M0).
    """
    experts, columns, groups, _ = blocks.shape
    found = np.zeros((experts, columns, groups * 32))
    for (expert, column, group, byte), value in np.ndenumerate(blocks):
        for half, code in enumerate((int(value) & 15, int(value) >> 4)):
            sign, exponent, fraction = code >> 3, (code >> 1) & 3, code & 1
            size = (1 + fraction / 2) * 2.0 ** (exponent - 1) if exponent else fraction / 2
            scale = 2.0 ** (int(scales[expert, column, group]) - 127)
            found[expert, column, group * 32 + 2 * byte + half] = (-1) ** sign * size * scale
    return found.swapaxes(1, 2).copy()
