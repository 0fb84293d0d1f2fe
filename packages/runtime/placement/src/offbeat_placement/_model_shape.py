"""A model's sizes and parameter count from its config.json alone: no weights, no torch.

Legend: d head width, V rows of the vocabulary. Source of every formula: the constructors in transformers 5.19,
`models/{llama,qwen2,qwen3,qwen3_moe,qwen3_next,qwen3_5,olmo_hybrid}/modeling_*.py`; tests count the real models.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from offbeat_core import ModelError
from offbeat_placement._vision_tower import count_vision


@dataclass(frozen=True)
class _Family:
    """Facts of a family that its config.json does not give.

    Args:
        biased_qkv: projections to queries, keys and values have biases.
        normed: norms of queries and keys: of each head, or of all heads together ("width"); "" for none.
        head_dim: d where the config gives none; None: an equal part of the hidden size.
        gates_attention: the projection to queries makes as many gates, which multiply the output of attention.
        has_shared_expert: beside experts there is one that every token passes, times a gate of its own.
        rule_inputs: linear layers that read the residual stream in a layer with the gated delta rule; 0: the family has
            no such layers.
    """

    biased_qkv: bool = False
    normed: str = ""
    head_dim: int | None = None
    gates_attention: bool = False
    has_shared_expert: bool = False
    rule_inputs: int = 0


_PLAIN: Final = _Family()
_QWEN2: Final = _Family(biased_qkv=True)
_QWEN3: Final = _Family(normed="head", head_dim=128)
_QWEN3_5: Final = _Family(normed="head", head_dim=256, gates_attention=True, has_shared_expert=True, rule_inputs=4)
_FAMILIES: Final = {
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "olmo_hybrid": _Family(normed="width", rule_inputs=6),
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_moe": _QWEN3,
    "qwen3_next": _Family(normed="head", head_dim=256, gates_attention=True, has_shared_expert=True, rule_inputs=2),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
}


@dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """Sizes of a layer with the gated delta rule and its short convolution. Source: arXiv:2412.06464.

    Args:
        num_key_heads: heads of queries and of keys; each serves several heads of values.
        num_value_heads: heads of values, each with a state of [key_dim, value_dim].
        key_dim: width of a head of queries or keys.
        value_dim: width of a head of values.
        window: tokens that the convolution reads at a time.
        state_bytes: of one number of a state that is kept between tokens, where the config.json says so; 0 otherwise.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    window: int
    state_bytes: int = 0

    @property
    def value_width(self) -> int:
        """Width of the values of one token, and of the output and its gate."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.value_width

    @property
    def state_size(self) -> int:
        """Numbers in the states of one sequence."""
        return self.num_value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes that memory depends on.

    Args:
        family: `model_type` of its config.
        num_parameters: all, tied ones once, vision tower included.
        decoder_parameters: of all decoder blocks.
        num_vision_parameters: of the vision tower; 0 without one.
        expert_parameters: of all experts that tokens are routed to, without their routers; 0 for a dense model.
        adapted_width: inputs and outputs of all linear layers of the blocks, added up. Experts are no linear layers.
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
        gates_attention: each number of the output of attention is multiplied by a gate.
        rule: sizes of the layers with the gated delta rule; None for a model of attention alone.
        num_rule_layers: how many of the blocks have the rule in place of attention.
    """

    family: str
    num_parameters: int
    decoder_parameters: int
    num_vision_parameters: int
    expert_parameters: int
    adapted_width: int
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
    gates_attention: bool = False
    rule: DeltaRule | None = None
    num_rule_layers: int = 0

    @property
    def kv_width(self) -> int:
        """Width of the keys of one token in one layer; the values' too."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_attention_layers(self) -> int:
        """Blocks that keep keys and values of every token."""
        return self.num_layers - self.num_rule_layers

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
_RULE_SIZES: Final = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "window": "linear_conv_kernel_dim",
}
_SIZES: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
_STATE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_FULL_ATTENTION_INTERVAL: Final = 4
"""One block of so many has attention where the config names no types of layers: the default of these families."""


@dataclass(frozen=True)
class _Count:
    """Parameters of a part of a model, and inputs and outputs of its linear layers, added up."""

    parameters: int = 0
    width: int = 0

    def __add__(self, other: "_Count") -> "_Count":
        return _Count(self.parameters + other.parameters, self.width + other.width)


def _linear(num_in: int, num_out: int, *, biased: bool = False) -> _Count:
    return _Count(num_in * num_out + num_out * biased, num_in + num_out)


def _read(cls: type[ModelShape], family: str, config: Mapping[str, Any]) -> ModelShape:
    traits, text = _FAMILIES[family], config.get("text_config") or config
    for key in (*_SIZES, *_RULE_SIZES.values()):
        if key in text and not (type(text[key]) is int and 0 < text[key] <= _MOST_OF[key]):
            raise ModelError(f"{key} must be a whole number from 1 to {_MOST_OF[key]}, got {text[key]!r:.40}")
    hidden, num_layers, num_heads = text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"]
    head_dim = text.get("head_dim") or traits.head_dim or hidden // num_heads
    num_kv_heads = text.get("num_key_value_heads") or num_heads
    rule_layers = _rule_layers(text, num_layers) if traits.rule_inputs else set()
    rule = _read_rule(text) if rule_layers else None
    attention = _count_attention(text, traits, num_heads, num_kv_heads, head_dim)
    mixers = [
        _count_rule(rule, traits, hidden) if rule and layer in rule_layers else attention for layer in range(num_layers)
    ]
    mlps = [_count_mlp(text, traits, layer) for layer in range(num_layers)]
    blocks = [mixer + mlp + _Count(2 * hidden) for mixer, mlp in zip(mixers, mlps, strict=True)]
    decoder_parameters = sum(block.parameters for block in blocks)
    is_tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    embeddings = text["vocab_size"] * hidden * (1 if is_tied else 2)
    vision = count_vision(family, config["vision_config"], hidden) if config.get("vision_config") else 0
    return cls(
        family=family,
        num_parameters=decoder_parameters + hidden + embeddings + vision,
        decoder_parameters=decoder_parameters,
        num_vision_parameters=vision,
        expert_parameters=sum(_count_experts(text, layer).parameters for layer in range(num_layers)),
        adapted_width=sum(block.width for block in blocks),
        num_layers=num_layers,
        block_parameters=max(block.parameters for block in blocks),
        vocabulary=text["vocab_size"],
        is_tied=bool(is_tied),
        hidden=hidden,
        query_width=num_heads * head_dim,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_width=max(_mlp_width(text, traits, layer) for layer in range(num_layers)),
        num_experts_per_token=text.get("num_experts_per_tok", 0) if _num_experts(text) else 0,
        norms_heads=bool(traits.normed),
        gates_attention=traits.gates_attention,
        rule=rule,
        num_rule_layers=len(rule_layers),
    )


def _rule_layers(text: Mapping[str, Any], num_layers: int) -> set[int]:
    """Numbers of the blocks that have the gated delta rule in place of attention."""
    interval = text.get("full_attention_interval", _FULL_ATTENTION_INTERVAL)
    kinds = text.get("layer_types")
    if not kinds:
        return {layer for layer in range(num_layers) if (layer + 1) % interval}
    if len(kinds) != num_layers:
        raise ModelError(f"layer_types must name {num_layers} layers, as num_hidden_layers does, got {len(kinds)}")
    return {layer for layer, kind in enumerate(kinds) if kind == "linear_attention"}


def _read_rule(text: Mapping[str, Any]) -> DeltaRule:
    return DeltaRule(
        **{name: text[key] for name, key in _RULE_SIZES.items()},
        state_bytes=_STATE_BYTES.get(str(text.get("mamba_ssm_dtype")), 0),
    )


def _count_rule(rule: DeltaRule, traits: _Family, hidden: int) -> _Count:
    """Projections, convolution, decay and step of each head, and the norm of the output."""
    outputs = rule.num_channels + rule.value_width + 2 * rule.num_value_heads
    inner = rule.num_channels * rule.window + 2 * rule.num_value_heads + rule.value_dim
    into = _Count(hidden * outputs, traits.rule_inputs * hidden + outputs)
    return into + _Count(inner) + _linear(rule.value_width, hidden)


def _count_attention(
    text: Mapping[str, Any], traits: _Family, num_heads: int, num_kv_heads: int, head_dim: int
) -> _Count:
    """Four projections, and the norms of queries and keys."""
    hidden, query_width, kv_width = text["hidden_size"], num_heads * head_dim, num_kv_heads * head_dim
    biased = not traits.biased_qkv and bool(text.get("attention_bias", False))
    into = [query_width * (2 if traits.gates_attention else 1), kv_width, kv_width]
    norms = {"": 0, "head": 2 * head_dim, "width": query_width + kv_width}[traits.normed]
    count = _Count(norms) + _linear(query_width, hidden, biased=biased)
    return sum((_linear(hidden, width, biased=biased or traits.biased_qkv) for width in into), count)


def _num_experts(text: Mapping[str, Any]) -> int:
    return int(text.get("num_experts") or text.get("num_local_experts") or 0)


def _is_sparse(text: Mapping[str, Any], layer: int) -> bool:
    return bool(
        _num_experts(text)
        and layer not in (text.get("mlp_only_layers") or [])
        and (layer + 1) % text.get("decoder_sparse_step", 1) == 0
    )


def _count_experts(text: Mapping[str, Any], layer: int) -> _Count:
    """Experts of a block to which tokens are routed."""
    if not _is_sparse(text, layer):
        return _Count()
    return _Count(_num_experts(text) * 3 * text["hidden_size"] * text["moe_intermediate_size"])


def _count_mlp(text: Mapping[str, Any], traits: _Family, layer: int) -> _Count:
    """Feed-forward part of a block."""
    hidden, biased = text["hidden_size"], bool(text.get("mlp_bias", False))
    if not _is_sparse(text, layer):
        return _gated(hidden, text["intermediate_size"], biased=biased)
    routed = _count_experts(text, layer) + _Count(_num_experts(text) * hidden)  # each has its row of the router
    if not traits.has_shared_expert:
        return routed
    return routed + _gated(hidden, text["shared_expert_intermediate_size"]) + _linear(hidden, 1)


def _gated(hidden: int, inner: int, *, biased: bool = False) -> _Count:
    into = _linear(hidden, inner, biased=biased)
    return into + into + _linear(inner, hidden, biased=biased)


def _mlp_width(text: Mapping[str, Any], traits: _Family, layer: int) -> int:
    """Inner width of the feed-forward part of a block that one token passes."""
    if not _is_sparse(text, layer):
        return int(text["intermediate_size"])
    shared = text["shared_expert_intermediate_size"] if traits.has_shared_expert else 0
    return int(text["moe_intermediate_size"] * text["num_experts_per_tok"] + shared)
