"""A model's sizes and parameter count from its config.json alone: no weights, no torch.

Legend: d head width, V rows of the vocabulary. Source of every formula: the constructors in transformers 5.19,
`models/{llama,qwen2,qwen3,qwen3_moe,qwen2_vl,qwen2_5_vl,qwen3_vl}/modeling_*.py`; tests count the real models.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from offbeat_core import ModelError


@dataclass(frozen=True)
class _Family:
    """Facts of a family that its config.json does not give."""

    biased_qkv: bool = False
    norms_heads: bool = False
    head_dim: int | None = None


_PLAIN: Final = _Family()
_QWEN2: Final = _Family(biased_qkv=True)
_QWEN3: Final = _Family(norms_heads=True, head_dim=128)
_FAMILIES: Final = {
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes that memory depends on.

    Args:
        family: `model_type` of its config.
        num_parameters: all, tied ones once, vision tower included.
        decoder_parameters: of all decoder blocks.
        num_vision_parameters: of the vision tower; 0 without one.
        expert_parameters: of all experts, without their routers; 0 for a dense model.
        num_layers: decoder blocks.
        block_parameters: of the largest decoder block.
        vocabulary: V.
        is_tied: embedding and vocabulary head are one matrix.
        hidden: width of the residual stream.
        query_width: heads × d.
        num_kv_heads: heads of keys and values.
        head_dim: d.
        mlp_width: inner width of the feed-forward part that one token passes, its experts added up.
        num_experts_per_token: 0 for a dense model.
        norms_heads: queries and keys are normalised.
    """

    family: str
    num_parameters: int
    decoder_parameters: int
    num_vision_parameters: int
    expert_parameters: int
    num_layers: int
    block_parameters: int
    vocabulary: int
    is_tied: bool
    hidden: int
    query_width: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    num_experts_per_token: int
    norms_heads: bool

    @property
    def kv_width(self) -> int:
        """Width of the keys of one token in one layer; the values' too."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Read a Hugging Face config.json.

        Args:
            config: its object.

        Raises:
            ModelError: a family whose formulas are not known here, or a size that is missing.
        """
        family = str(config.get("model_type", ""))
        if family not in _FAMILIES:
            raise ModelError(
                f"memory of model_type {family!r} is not known: known families are {', '.join(sorted(_FAMILIES))}"
            )
        try:
            return _read(cls, family, config)
        except KeyError as error:
            raise ModelError(
                f"the model's config.json lacks {error.args[0]!r}, which the {family} family needs"
            ) from None


_MOST_OF: Final = defaultdict(lambda: 2**40, num_hidden_layers=100_000)
"""Sizes of a model beyond which its config.json is considered broken."""


def _read(cls: type[ModelShape], family: str, config: Mapping[str, Any]) -> ModelShape:
    traits, text = _FAMILIES[family], config.get("text_config") or config
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
        if key in text and not (type(text[key]) is int and 0 < text[key] <= _MOST_OF[key]):
            raise ModelError(f"{key} must be a whole number from 1 to {_MOST_OF[key]}, got {text[key]!r:.40}")
    hidden, num_layers, num_heads = text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"]
    head_dim = text.get("head_dim") or traits.head_dim or hidden // num_heads
    num_kv_heads = text.get("num_key_value_heads") or num_heads
    query_width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
    attention = _count_attention(text, traits, hidden, query_width, kv_width, head_dim)
    mlps = [_count_mlp(text, layer, hidden) for layer in range(num_layers)]
    blocks = [attention + mlp + 2 * hidden for mlp, _ in mlps]
    is_tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    embeddings = text["vocab_size"] * hidden * (1 if is_tied else 2)
    vision = _count_vision(family, config["vision_config"], hidden) if config.get("vision_config") else 0
    return cls(
        family=family,
        num_parameters=sum(blocks) + hidden + embeddings + vision,
        decoder_parameters=sum(blocks),
        num_vision_parameters=vision,
        expert_parameters=sum(_count_experts(text, layer, hidden) for layer in range(num_layers)),
        num_layers=num_layers,
        block_parameters=max(blocks),
        vocabulary=text["vocab_size"],
        is_tied=bool(is_tied),
        hidden=hidden,
        query_width=query_width,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_width=max(width for _, width in mlps),
        num_experts_per_token=text.get("num_experts_per_tok", 0) if _num_experts(text) else 0,
        norms_heads=traits.norms_heads,
    )


def _count_attention(
    text: Mapping[str, Any], traits: _Family, hidden: int, query_width: int, kv_width: int, head_dim: int
) -> int:
    """Parameters of the four projections, their biases, and the norms of queries and keys."""
    count = 2 * hidden * query_width + 2 * hidden * kv_width
    if traits.biased_qkv:
        count += query_width + 2 * kv_width
    elif text.get("attention_bias", False):
        count += query_width + 2 * kv_width + hidden
    return count + (2 * head_dim if traits.norms_heads else 0)


def _num_experts(text: Mapping[str, Any]) -> int:
    return int(text.get("num_experts") or text.get("num_local_experts") or 0)


def _is_sparse(text: Mapping[str, Any], layer: int) -> bool:
    return bool(
        _num_experts(text)
        and layer not in (text.get("mlp_only_layers") or [])
        and (layer + 1) % text.get("decoder_sparse_step", 1) == 0
    )


def _count_experts(text: Mapping[str, Any], layer: int, hidden: int) -> int:
    """Parameters of a block's experts."""
    return _num_experts(text) * prod((3, hidden, text["moe_intermediate_size"])) if _is_sparse(text, layer) else 0


def _count_mlp(text: Mapping[str, Any], layer: int, hidden: int) -> tuple[int, int]:
    """Parameters of a block's feed-forward part, and the inner width that one token passes."""
    if _is_sparse(text, layer):
        count = _count_experts(text, layer, hidden) + _num_experts(text) * hidden  # each has its row of the router
        return count, text["moe_intermediate_size"] * text["num_experts_per_tok"]
    inner = text["intermediate_size"]
    biases = 2 * inner + hidden if text.get("mlp_bias", False) else 0
    return 3 * hidden * inner + biases, inner


def _count_vision(family: str, vision: Mapping[str, Any], hidden: int) -> int:
    """Parameters of a vision tower that feeds a language model of width `hidden`; KeyError where a size is missing."""
    counters = {"qwen2_vl": _count_qwen2_vl, "qwen2_5_vl": _count_qwen2_5_vl}
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
