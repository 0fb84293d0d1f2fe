"""Parameters of the vision towers of Qwen-VL, Qwen3.5, Gemma 3 and Gemma 4 from their config.json.

Source of every formula: the constructors in transformers 5.19, `models/{qwen2_vl,qwen2_5_vl,qwen3_vl,qwen3_5,siglip,
gemma3,gemma4}/modeling_*.py`; tests count the real models.
"""

from collections.abc import Mapping
from typing import Any


def count_vision(family: str, vision: Mapping[str, Any], hidden: int) -> int:
    """Parameters of a vision tower that feeds a language model of width `hidden`; KeyError where a size is missing."""
    counters = {
        "qwen2_vl": _count_qwen2_vl,
        "qwen2_5_vl": _count_qwen2_5_vl,
        "gemma3": _count_gemma3,
        "gemma4": _count_gemma4,
    }
    return counters.get(family, _count_qwen3_vl)(vision, hidden)


def _count_qwen2_vl(vision: Mapping[str, Any], hidden: int) -> int:
    width = int(vision["embed_dim"])
    inner, depth = int(width * vision.get("mlp_ratio", 4)), int(vision["depth"])
    block = 2 * (2 * width) + _biased(width, 3 * width) + _biased(width, width)
    block += _biased(width, inner) + _biased(inner, width)
    return _patches(vision, width) + depth * block + 2 * width + _merger(vision, width, hidden)


def _count_qwen2_5_vl(vision: Mapping[str, Any], hidden: int) -> int:
    width, inner, depth = int(vision["hidden_size"]), int(vision["intermediate_size"]), int(vision["depth"])
    block = 2 * width + _biased(width, 3 * width) + _biased(width, width)
    block += 2 * _biased(width, inner) + _biased(inner, width)
    out = int(vision.get("out_hidden_size", hidden))
    return _patches(vision, width) + depth * block + width + _merger(vision, width, out)


def _count_qwen3_vl(vision: Mapping[str, Any], hidden: int) -> int:
    width, inner, depth = int(vision["hidden_size"]), int(vision["intermediate_size"]), int(vision["depth"])
    block = 2 * (2 * width) + _biased(width, 3 * width) + _biased(width, width)
    block += _biased(width, inner) + _biased(inner, width)
    merged = width * int(vision.get("spatial_merge_size", 2)) ** 2
    out = int(vision.get("out_hidden_size", hidden))
    deep = len(vision.get("deepstack_visual_indexes", ()))
    positions = int(vision["num_position_embeddings"]) * width
    norms = 2 * width + deep * 2 * merged  # the deep mergers normalise after merging
    return (
        _patches(vision, width) + width + positions + depth * block + (1 + deep) * _merger(vision, width, out) + norms
    )


def _count_gemma3(vision: Mapping[str, Any], hidden: int) -> int:
    """SigLIP, and the projector behind it."""
    width, inner, depth = (int(vision[key]) for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    patch = int(vision["patch_size"])
    block = 2 * (2 * width) + 4 * _biased(width, width) + _biased(width, inner) + _biased(inner, width)
    head = width + 4 * _biased(width, width) + 2 * width + _biased(width, inner) + _biased(inner, width)
    ends = _biased(3 * patch**2, width) + (int(vision["image_size"]) // patch) ** 2 * width + 2 * width
    return ends + depth * block + (head if vision.get("vision_use_head", True) else 0) + width * hidden + width


def _count_gemma4(vision: Mapping[str, Any], hidden: int) -> int:
    """Tower without biases, and the projection behind it."""
    width, inner, depth = (int(vision[key]) for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads, kv_heads, size = (int(vision[key]) for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    block = 2 * width * (heads + kv_heads) * size + 2 * size + 3 * width * inner + 4 * width
    ends = 3 * int(vision["patch_size"]) ** 2 * width + 2 * int(vision["position_embedding_size"]) * width
    return ends + depth * block + width * hidden


def _biased(num_in: int, num_out: int) -> int:
    return num_in * num_out + num_out


def _patches(vision: Mapping[str, Any], width: int) -> int:
    """Return the convolution over patches, without its bias."""
    patch = vision.get("patch_size", 14) ** 2 * vision.get("temporal_patch_size", 2)
    return int(vision.get("in_channels", vision.get("in_chans", 3)) * patch * width)


def _merger(vision: Mapping[str, Any], width: int, out: int) -> int:
    """Two biased layers over merged patches, without the norm before them."""
    merged = width * int(vision.get("spatial_merge_size", 2)) ** 2
    return _biased(merged, merged) + _biased(merged, out)
