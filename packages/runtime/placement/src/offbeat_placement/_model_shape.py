"""A model's sizes and parameter count from its config.json alone: no weights, no torch.

Legend: d head width, V rows of the vocabulary. Source of every formula: the constructors in transformers 5.19,
`models/FAMILY/modeling_*.py` for each family below; tests count the real models.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from offbeat_core import ModelError
from offbeat_placement._families import FAMILIES, Family
from offbeat_placement._vision_tower import count_vision


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
class LatentAttention:
    """Sizes of attention whose keys and values are made from compressed ones. Source: arXiv:2405.04434, section 2.1.

    Args:
        query_rank: width of compressed queries; 0: queries are not compressed.
        kv_rank: width of what keys and values of all heads are made from.
        rope_dim: the part of a query or key that knows its position; all heads share that of keys.
        nope_dim: the other part.
        value_dim: width of a head of values.
        is_kept: engines keep what is compressed, and the shared part of keys, in place of keys and values.
    """

    query_rank: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    is_kept: bool


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
        block_experts: those of `expert_parameters` that are in it.
        vocabulary: V.
        is_tied: embedding and vocabulary head are one matrix.
        hidden: width of the residual stream.
        query_width: heads × d.
        num_kv_heads: heads of keys and values.
        head_dim: d; where layers differ, so large that it is right of all of them together.
        mlp_width: inner width of the feed-forward part that one token passes, its experts added up.
        num_experts_per_token: 0 for a dense model.
        norm_numbers: that the norms of a block keep for the backward pass, of each of the hidden size.
        mlp_numbers: that a feed-forward part keeps, of each of its inner width.
        head_norm_numbers: that norms of queries and keys keep for the backward pass, of each of their widths.
        gate_numbers: that gates of the output of attention keep, of each of the query width.
        rule: sizes of the layers with the gated delta rule; None for a model of attention alone.
        num_rule_layers: how many of the blocks have the rule in place of attention.
        latent: sizes of attention with compressed keys and values; None: they are not compressed.
        attentions_per_block: in blocks with attention, each with keys and values of its own.
    """

    family: str
    num_parameters: int
    decoder_parameters: int
    num_vision_parameters: int
    expert_parameters: int
    adapted_width: int
    num_layers: int
    block_parameters: int
    block_experts: int
    vocabulary: int
    is_tied: bool
    hidden: int
    query_width: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    num_experts_per_token: int
    norm_numbers: int = 6
    mlp_numbers: int = 4
    head_norm_numbers: int = 0
    gate_numbers: int = 0
    rule: DeltaRule | None = None
    num_rule_layers: int = 0
    latent: LatentAttention | None = None
    attentions_per_block: int = 1

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
        if family not in FAMILIES:
            raise ModelError(
                f"memory of model_type {family!r} is not known: known families are {', '.join(sorted(FAMILIES))}"
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
_OTHER_NAMES: Final = {
    "num_hidden_layers": ("num_layers",),
    "intermediate_size": ("ffn_hidden_size",),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "num_experts_per_tok": ("moe_topk", "moe_k"),
    "num_experts": ("moe_num_experts",),
    "num_shared_experts": ("moe_num_shared_experts",),
    "first_k_dense_replace": ("num_dense_layers", "moe_layer_start_index"),
}
"""Keys of LongCat-Flash, HunYuan, Ernie 4.5 and AFMoE for what other families call so."""
NUMBER_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_FULL_ATTENTION_INTERVAL: Final = 4
"""One block of so many has attention where the config names no types of layers: the default of these families."""


@dataclass(frozen=True)
class _Count:
    """Parameters of a part of a model, and inputs and outputs of its linear layers, added up."""

    parameters: int = 0
    width: int = 0

    def __add__(self, other: "_Count") -> "_Count":
        return _Count(self.parameters + other.parameters, self.width + other.width)

    def __mul__(self, times: int) -> "_Count":
        return _Count(self.parameters * times, self.width * times)


def _linear(num_in: int, num_out: int, *, biased: bool = False) -> _Count:
    return _linears(num_in, [num_out], biased=biased)


def _linears(num_in: int, outputs: Sequence[int], *, biased: bool = False, num_layers: int = 0) -> _Count:
    """Linear layers of one input, as many as outputs where `num_layers` is not given."""
    outs = sum(outputs)
    return _Count(num_in * outs + outs * biased, (num_layers or len(outputs)) * num_in + outs)


def _read(cls: type[ModelShape], family: str, config: Mapping[str, Any]) -> ModelShape:
    traits, text = FAMILIES[family], config.get("text_config") or config
    others = {usual: text[key] for usual, keys in _OTHER_NAMES.items() for key in keys if key in text}
    text = {**text, **{key: each[0] if isinstance(each, list) else each for key, each in others.items()}}
    for key in (*_SIZES, *_RULE_SIZES.values()):
        if key in text and not (type(text[key]) is int and 0 < text[key] <= _MOST_OF[key]):
            raise ModelError(f"{key} must be a whole number from 1 to {_MOST_OF[key]}, got {text[key]!r:.40}")
    hidden, num_layers, num_heads = text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"]
    latent = _read_latent(text, traits) if traits.latent else None
    if latent:
        text = {**text, "head_dim": latent.nope_dim + latent.rope_dim, "num_key_value_heads": num_heads}
    layers = [_of_layer(text, layer) if traits.differ else text for layer in range(num_layers)]
    head_dims = [each.get("head_dim") or traits.head_dim or hidden // num_heads for each in layers]
    kv_heads = [each.get("num_key_value_heads") or num_heads for each in layers]
    kv_widths = [heads * size for heads, size in zip(kv_heads, head_dims, strict=True)]
    rule_layers = _rule_layers(text, num_layers) if traits.rule_inputs else set()
    rule = _read_rule(text) if rule_layers else None
    mixers = [
        _count_rule(rule, traits, hidden)
        if rule and layer in rule_layers
        else _count_latent(text, latent) * traits.num_parts
        if latent
        else _count_attention(layers[layer], traits, num_heads, kv_heads[layer], head_dims[layer])
        for layer in range(num_layers)
    ]
    mlps = [_count_mlp(each, traits, layer) for layer, each in enumerate(layers)]
    norms, of_layers = _Count(traits.num_norms * traits.norm_vectors * hidden), _count_layer_inputs(text, traits)
    blocks = [mixer + mlp + norms + of_layers for mixer, mlp in zip(mixers, mlps, strict=True)]
    experts = [_count_experts(each, traits, layer).parameters for layer, each in enumerate(layers)]
    largest = max(range(num_layers), key=lambda layer: blocks[layer].parameters)
    decoder_parameters = sum(block.parameters for block in blocks)
    is_tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", traits.is_tied))
    embeddings = text["vocab_size"] * hidden * (1 if is_tied else 2) + _layer_embeddings(text, traits)
    embeddings += text["vocab_size"] * (traits.biased_head and _is_biased(text, "use_bias"))
    vision = count_vision(family, config["vision_config"], hidden) if config.get("vision_config") else 0
    return cls(
        family=family,
        num_parameters=decoder_parameters + traits.norm_vectors * hidden + embeddings + vision,
        decoder_parameters=decoder_parameters,
        num_vision_parameters=vision,
        expert_parameters=sum(experts),
        adapted_width=sum(block.width for block in blocks),
        num_layers=num_layers,
        block_parameters=blocks[largest].parameters,
        block_experts=experts[largest],
        vocabulary=text["vocab_size"],
        is_tied=bool(is_tied),
        hidden=hidden,
        query_width=num_heads * sum(head_dims) // num_layers,
        num_kv_heads=kv_heads[0],
        head_dim=sum(kv_widths) // (num_layers * kv_heads[0]),
        mlp_width=max(_mlp_width(each, traits, layer) for layer, each in enumerate(layers)),
        num_experts_per_token=layers[0].get("num_experts_per_tok", 0) if _num_experts(text) else 0,
        norm_numbers=(3 if traits.norm_vectors == 1 else 2) * _num_norms(text, traits),
        mlp_numbers=traits.mlp + 2 * traits.normed_inner,
        head_norm_numbers={"": 0, "bare": 1}.get(_normed(text, traits), 2),
        gate_numbers={"": 0, "own": 1, "fused": 3}[traits.gates_attention],
        rule=rule,
        num_rule_layers=len(rule_layers),
        latent=latent,
        attentions_per_block=traits.num_parts,
    )


def _of_layer(text: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Return a config with what is said of one layer of Gemma 4, and how many projections to keys and values it has.

    Source: transformers 5.19, models/gemma4 (Gemma4TextConfig, Gemma4TextAttention, Gemma4TextMLP).
    """
    kinds, first_shared = text.get("layer_types"), text["num_hidden_layers"] - text.get("num_kv_shared_layers", 0)
    is_last, is_shared = layer == text["num_hidden_layers"] - 1, layer >= first_shared > 0
    is_full = is_last or (kinds[layer] == "full_attention" if kinds else (layer + 1) % 6 == 0)
    made = {**text, "num_experts_per_tok": text.get("top_k_experts") or 0, "num_kv_projections": 2 * (not is_shared)}
    is_one = is_full and bool(text.get("attention_k_eq_v"))
    if is_one and not is_shared:
        made["num_kv_projections"] = 1
    if "per_layer_config" in text:  # as transformers writes what published files say of all layers without a window
        made |= text["per_layer_config"].get(str(layer), {})
    elif is_full:
        made["head_dim"] = text.get("global_head_dim", 512)
        made["num_key_value_heads"] = is_one * text.get("num_global_key_value_heads", 0) or text["num_key_value_heads"]
    if is_shared and text.get("use_double_wide_mlp"):
        made["intermediate_size"] *= 2
    return made


def _width_of_layer_inputs(text: Mapping[str, Any], traits: Family) -> int:
    return int(text.get("hidden_size_per_layer_input", 256)) if traits.differ else 0


def _num_norms(text: Mapping[str, Any], traits: Family) -> int:
    """Norms of a block, those of experts too: three around them, and of the block's own embedding another."""
    beside = traits.shares_expert == "beside" and _num_experts(text) > 0
    more = (_width_of_layer_inputs(text, traits) > 0) + 3 * beside + traits.norms_experts + traits.normed_inner
    return int(traits.num_norms + more)


def _count_layer_inputs(text: Mapping[str, Any], traits: Family) -> _Count:
    """Gate, projection and norm of a block's own embedding of each token."""
    hidden, width = text["hidden_size"], _width_of_layer_inputs(text, traits)
    return _linear(hidden, width) + _linear(width, hidden) + _Count(hidden) if width else _Count()


def _layer_embeddings(text: Mapping[str, Any], traits: Family) -> int:
    """Embeddings of tokens for all blocks, with projection and norm."""
    width = _width_of_layer_inputs(text, traits)
    rows = int(text.get("vocab_size_per_layer_input", 262144)) + text["hidden_size"]
    return int((rows * text["num_hidden_layers"] + 1) * width)


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
        state_bytes=NUMBER_BYTES.get(str(text.get("mamba_ssm_dtype")), 0),
    )


def _count_rule(rule: DeltaRule, traits: Family, hidden: int) -> _Count:
    """Projections, convolution, decay and step of each head, and the norm of the output."""
    outputs = [rule.num_channels, rule.value_width, rule.num_value_heads, rule.num_value_heads]
    inner = rule.num_channels * rule.window + 2 * rule.num_value_heads + rule.value_dim
    into = _linears(hidden, outputs, num_layers=traits.rule_inputs)
    return into + _Count(inner) + _linear(rule.value_width, hidden)


def _read_latent(text: Mapping[str, Any], traits: Family) -> LatentAttention:
    return LatentAttention(
        query_rank=text.get("q_lora_rank") or 0,
        kv_rank=text["kv_lora_rank"],
        rope_dim=text["qk_rope_head_dim"],
        nope_dim=text["qk_nope_head_dim"],
        value_dim=text.get("v_head_dim") or text["hidden_size"] // text["num_attention_heads"],
        is_kept=traits.latent == "kept",
    )


def _count_latent(text: Mapping[str, Any], latent: LatentAttention) -> _Count:
    """Projections to what is compressed and from it, with a norm between them, and to the output."""
    hidden, num_heads = text["hidden_size"], text["num_attention_heads"]
    biased, rank = _is_biased(text, "attention_bias"), latent.query_rank
    count = _linear(hidden, rank, biased=biased) + _Count(rank) if rank else _Count()
    count += _linear(rank or hidden, num_heads * (latent.nope_dim + latent.rope_dim))
    count += _linear(hidden, latent.kv_rank + latent.rope_dim, biased=biased) + _Count(latent.kv_rank)
    count += _linear(latent.kv_rank, num_heads * (latent.nope_dim + latent.value_dim))
    return count + _linear(num_heads * latent.value_dim, hidden, biased=biased)


def _normed(text: Mapping[str, Any], traits: Family) -> str:
    return traits.normed if text.get("use_qk_norm", True) else ""


def _count_attention(
    text: Mapping[str, Any], traits: Family, num_heads: int, num_kv_heads: int, head_dim: int
) -> _Count:
    """Four projections, and the norms of queries and keys."""
    hidden, query_width, kv_width = text["hidden_size"], num_heads * head_dim, num_kv_heads * head_dim
    biased = not traits.biased_qkv and _is_biased(text, "attention_bias")
    biased_qkv = biased or (traits.biased_qkv and text.get("qkv_bias", True))
    biased_out = (biased and traits.biased_out) or text.get("attention_out_bias", False)
    num_kv = text.get("num_kv_projections", 2)
    gates = {"": [], "fused": [], "own": [query_width]}[traits.gates_attention]
    outputs = [query_width * (2 if traits.gates_attention == "fused" else 1), *gates, *[kv_width] * num_kv]
    width = query_width + kv_width
    normed = {"": 0, "bare": 0, "head": (2 if num_kv else 1) * head_dim, "width": width, "heads": width}
    norms = normed[_normed(text, traits)] + hidden * traits.normed_inner
    into = _linears(hidden, outputs, biased=biased_qkv, num_layers=1 if traits.fused_qkv else 0)
    sinks = num_heads if traits.has_sinks else 0
    return into + _Count(norms + sinks) + _linear(query_width, hidden, biased=biased_out)


def _is_biased(text: Mapping[str, Any], key: str) -> bool:
    return bool(text.get(key, text.get("use_bias", False)))


def _num_experts(text: Mapping[str, Any]) -> int:
    return int(text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0)


def _is_sparse(text: Mapping[str, Any], layer: int) -> bool:
    if kinds := text.get("mlp_layer_types"):
        return bool(kinds[layer] == "sparse")
    return bool(
        _num_experts(text)
        and layer >= text.get("first_k_dense_replace", 0)
        and layer not in (text.get("mlp_only_layers") or [])
        and (layer + 1) % text.get("decoder_sparse_step", 1) == 0
    )


def _expert_width(text: Mapping[str, Any], traits: Family) -> int:
    return int(text["intermediate_size" if traits.wide_experts else "moe_intermediate_size"])


def _shared_width(text: Mapping[str, Any], traits: Family) -> int:
    """Inner width of the experts that every token passes."""
    if traits.shares_expert == "gated":
        return int(text["shared_expert_intermediate_size"])
    if traits.shares_expert == "sized":
        return int(text["shared_intermediate_size"])
    if traits.shares_expert in ("beside", "wide") or traits.num_parts == 2:
        return int(text["intermediate_size"])
    count = text.get("n_shared_experts") or text.get("num_shared_experts") or 0
    return count * _expert_width(text, traits) if traits.shares_expert else 0


def _count_experts(text: Mapping[str, Any], traits: Family, layer: int) -> _Count:
    """Experts of a block to which tokens are routed."""
    if not _is_sparse(text, layer):
        return _Count()
    number, hidden, width = _num_experts(text), text["hidden_size"], _expert_width(text, traits)
    biases = number * (2 * width + hidden) if traits.biased_experts else 0
    return _Count((3 * number + 2 * _num_idle(text)) * hidden * width + biases)


def _num_idle(text: Mapping[str, Any]) -> int:
    """Experts that return what they are given: LongCat-Flash's, which have weights of gates that are not used."""
    return int(text.get("zero_expert_num") or 0)


def _count_mlp(text: Mapping[str, Any], traits: Family, layer: int) -> _Count:
    """Feed-forward part of a block."""
    hidden, biased = text["hidden_size"], _is_biased(text, "mlp_bias")
    sparse = _is_sparse(text, layer)
    count = _Count()
    if sparse:
        routes = _num_experts(text) + _num_idle(text)
        count += _count_experts(text, traits, layer) + _Count(routes * hidden)  # each has a row of a router
        if (
            traits.shares_expert == "beside"
        ):  # the router is a linear layer, with scales; and there are three more norms
            count += _Count(4 * hidden + routes, hidden + routes)
        if traits.shares_expert == "gated":
            count += _linear(hidden, 1)
        if traits.routes_linearly:
            count += _Count(routes * bool(text.get("router_bias")), hidden + routes)
        count += _Count(routes * (traits.biased_experts or traits.biases_routes) + hidden * traits.norms_experts)
    if inner := _shared_width(text, traits) if sparse else text["intermediate_size"]:
        outputs = [inner] * (2 if traits.gates_mlp else 1)
        into = _linears(hidden, outputs, biased=biased, num_layers=traits.fused_mlp)
        of_activation = _Count(traits.activation_weights + inner * traits.normed_inner)
        count += (into + of_activation + _linear(inner, hidden, biased=biased)) * traits.num_parts
    return count


def _mlp_width(text: Mapping[str, Any], traits: Family, layer: int) -> int:
    """Inner width of the feed-forward part of a block that one token passes."""
    if not _is_sparse(text, layer):
        return int(text["intermediate_size"])
    routed = _expert_width(text, traits) * int(text["num_experts_per_tok"])
    return routed + _shared_width(text, traits) * traits.num_parts
