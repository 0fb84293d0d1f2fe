"""Contents of a model folder: an architecture, by a table of families and how they differ; tokenizer, end of sequence.

Source: the modelling files of Qwen3, Qwen3.5, Qwen2 and Llama in huggingface/transformers.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from offbeat_core import ModelError, read_eos_ids, read_model_json


@dataclass(frozen=True, kw_only=True)
class DecoderFamily:
    """Differences of a family from the plain pre-norm decoder with grouped queries, rotary positions and SwiGLU.

    Args:
        qk_norm: queries and keys are normalised per head.
        qkv_bias: query, key and value projections have a bias; None: as config.attention_bias says, the output's too.
        sections: of a vision-language family, where its config says nothing: how many pairs of a head are turned by
            position in time, height and width. Empty of a family for text.
        interleaved: the three take pairs in turn, and not one run of pairs each.
        has_experts: each layer's feed-forward is a mixture of experts.
        has_rule: some layers have the gated delta rule in the place of attention; those with attention gate its output,
            and norms hold what their weight is above 1.
    """

    qk_norm: bool = False
    qkv_bias: bool | None = None
    sections: tuple[int, ...] = ()
    interleaved: bool = False
    has_experts: bool = False
    has_rule: bool = False


FAMILIES: Final = {
    "qwen3": DecoderFamily(qk_norm=True),
    "qwen3_moe": DecoderFamily(qk_norm=True, has_experts=True),
    "qwen3_5": DecoderFamily(qk_norm=True, has_rule=True, sections=(11, 11, 10), interleaved=True),
    "qwen3_5_text": DecoderFamily(qk_norm=True, has_rule=True),
    "qwen2": DecoderFamily(qkv_bias=True),
    "llama": DecoderFamily(),
    "qwen3_vl": DecoderFamily(qk_norm=True, sections=(24, 20, 20), interleaved=True),
    "qwen2_5_vl": DecoderFamily(qkv_bias=True, sections=(16, 24, 24)),
}


@dataclass(frozen=True, kw_only=True)
class RuleShape:
    """Sizes of layers with the gated delta rule; `window` counts the tokens that the convolution reads for one.

    `is_in_layer` says of each layer of the model whether it is one of them.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    window: int
    is_in_layer: tuple[bool, ...]

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution, which is over queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def state_size(self) -> int:
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def held_size(self) -> int:
        """Numbers that a sample holds of one layer: the state, and what the convolution reads again."""
        return self.state_size + self.num_channels * (self.window - 1)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The shape of one model. Sizes are counts of elements; `rope` holds the rotary parameters of the config.

    `axes` names, for each pair of a head, the axis of a position that turns it (0 time, 1 height, 2 width); it is empty
    where a position is one number. `vision` is the folder of a vision-language model; its decoder's names begin with
    `prefix`. `num_experts` is 0 for a dense model; the weights of a token's experts may be normalised to a sum of 1.
    `rotary_dim` elements of a head are turned, 0: all. `rule` is None where all layers have attention.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    rope: dict[str, Any]
    max_positions: int
    axes: tuple[int, ...] = ()
    vision: Path | None = None
    prefix: str = "model."
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalises_experts: bool = False
    rotary_dim: int = 0
    rule: RuleShape | None = None

    @property
    def num_rule_layers(self) -> int:
        return sum(self.rule.is_in_layer) if self.rule else 0

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - self.num_rule_layers

    @property
    def held_size(self) -> int:
        """Numbers that a sample holds of all layers with the rule, however long it is."""
        return self.num_rule_layers * self.rule.held_size if self.rule else 0


def read_architecture(folder: Path) -> Architecture:
    if not folder.is_dir():
        raise ModelError(f"no model folder {folder}; give a folder with config.json, safetensors and a tokenizer")
    config = read_model_json(folder / "config.json")
    name = config.get("model_type")
    if name not in FAMILIES:
        raise ModelError(f"model family {name!r} is not supported by rollout-torch; supported: {', '.join(FAMILIES)}")
    has_vision = bool(FAMILIES[name].sections)
    if has_vision:  # older folders have the decoder's keys beside vision_config, newer ones in text_config
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = {**config, **config.get("text_config", {}), **tied}
    _refuse_variants(config)
    try:
        return _architecture(name, config, folder if has_vision else None)
    except KeyError as error:
        raise ModelError(f"{folder / 'config.json'} lacks the key {error}") from error


def _architecture(name: str, config: dict[str, Any], vision: Path | None = None) -> Architecture:
    family, heads = FAMILIES[name], config["num_attention_heads"]
    head_dim, rope = config.get("head_dim") or config["hidden_size"] // heads, _rope_parameters(config)
    attention_bias = bool(config.get("attention_bias", False))
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 0.25)) if family.has_rule else 0
    return Architecture(
        family=name,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=family.qk_norm,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias and family.qkv_bias is None,
        mlp_bias=bool(config.get("mlp_bias", False)),
        rope=rope,
        max_positions=config.get("max_position_embeddings", 2048),
        axes=_axes(family, rope, (rotary_dim or head_dim) // 2) if vision else (),
        vision=vision,
        prefix="model.language_model." if vision else "model.",
        **(_experts(config) if family.has_experts else {}),
        rotary_dim=rotary_dim,
        rule=_rule(config) if family.has_rule else None,
    )


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ModelError("rollout-torch needs experts in every layer: mlp_only_layers = [], decoder_sparse_step = 1")
    return {
        "num_experts": config.get("num_experts") or config["num_local_experts"],  # as transformers 5 writes it
        "experts_per_token": config["num_experts_per_tok"],
        "expert_size": config["moe_intermediate_size"],
        "normalises_experts": bool(config.get("norm_topk_prob", False)),
    }


def _rule(config: dict[str, Any]) -> RuleShape:
    if not config.get("attn_output_gate", True):
        raise ModelError("rollout-torch needs attn_output_gate = true in a model with the gated delta rule")
    num_layers, every = config["num_hidden_layers"], config.get("full_attention_interval", 4)
    kinds = config.get("layer_types") or [
        "full_attention" if index % every == 0 else "linear_attention" for index in range(1, num_layers + 1)
    ]
    if len(kinds) != num_layers or set(kinds) - {"linear_attention", "full_attention"}:
        raise ModelError(f"layer_types must say linear_attention or full_attention of {num_layers} layers: {kinds}")
    return RuleShape(
        num_key_heads=config["linear_num_key_heads"],
        num_value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        window=config["linear_conv_kernel_dim"],
        is_in_layer=tuple(kind == "linear_attention" for kind in kinds),
    )


def _axes(family: DecoderFamily, rope: dict[str, Any], num_pairs: int) -> tuple[int, ...]:
    """Return which axis turns each pair. Source: transformers, recomposition_frequencies of Qwen3-VL and Qwen2.5-VL."""
    sections = tuple(rope.get("mrope_section") or family.sections)
    if len(sections) != 3 or sum(sections) != num_pairs:
        raise ModelError(f"mrope_section must share out {num_pairs} pairs over three axes, got {list(sections)}")
    if not family.interleaved:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    axes = [0] * num_pairs
    for axis in (1, 2):
        for pair in range(axis, 3 * sections[axis], 3):
            axes[pair] = axis
    return tuple(axes)


def _refuse_variants(config: dict[str, Any]) -> None:
    """Refuse what would decode to something else without a word."""
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"rollout-torch needs hidden_act silu, got {config['hidden_act']!r}")
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise ModelError("rollout-torch has no sliding-window attention; set use_sliding_window to false")
    if config.get("quantization_config"):
        raise ModelError("rollout-torch reads unquantised weights; save the model in bfloat16 or float32")
    kind = _rope_parameters(config)["rope_type"]
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"rope type {kind!r} is not supported by rollout-torch; supported: default, linear, llama3")


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters of a config, of the form of transformers 5 or of the older two keys."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] == "mrope":  # older folders; `_axes` reads what it means
        rope["rope_type"] = "default"
    return rope


def rotations(architecture: Architecture, num_positions: int) -> Tensor:
    """[num_positions, rotary_dim / 2, 2] float32: cosine and sine that turn pair i of a query or key at a position.

    Source: RoFormer, arXiv 2104.09864; the llama3 scaling is that of the Llama 3.1 release.
    """
    rope, dim = architecture.rope, architecture.rotary_dim or architecture.head_dim
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope["rope_type"] == "linear":
        frequencies = frequencies / rope["factor"]
    if rope["rope_type"] == "llama3":
        frequencies = _llama3_scaled(frequencies, rope)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()), -1)


def _llama3_scaled(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """Slow the long waves down by `factor`, leave the short ones, and blend in between."""
    # In transformers' order of operations: exact numerics need the trainer's bits.
    names = "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
    low, high, context = (rope[name] for name in names)
    waves = 2 * math.pi / frequencies
    is_long, is_short = waves > context / low, waves < context / high
    scaled = torch.where(is_long, frequencies / rope["factor"], frequencies)
    keep = (context / waves - low) / (high - low)
    blended = (1 - keep) * scaled / rope["factor"] + keep * scaled
    return torch.where(is_long | is_short, scaled, blended)


def load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json; save the tokenizer into the model folder")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot parse
        raise ModelError(f"{path} cannot be read ({error}); save the tokenizer again") from error


def eos_ids_of(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """End-of-sequence ids: of the model's configuration, else of tokenizer_config.json; else none."""
    if named := read_eos_ids(folder):
        return named
    path = folder / "tokenizer_config.json"
    token = read_model_json(path).get("eos_token") if path.is_file() else None
    text = token.get("content") if isinstance(token, dict) else token
    found = tokenizer.token_to_id(text) if text else None
    return frozenset() if found is None else frozenset([found])
