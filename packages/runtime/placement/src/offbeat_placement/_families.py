"""Families of models whose sizes can be read from a config.json, and what that file does not say of them.

Source: the constructors in transformers 5.19, `models/FAMILY/modeling_*.py`.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Family:
    """Facts of a family that its config.json does not give.

    Args:
        biased_head: the vocabulary head has a bias where other linear layers have one.
        biased_qkv: projections to queries, keys and values have biases.
        biased_out: `attention_bias` gives the output projection a bias too.
        normed: norms of queries and keys: of each head, with one weight for all ("head"), with its own ("heads") or
            with none ("bare"), or of all heads together ("width"); "" for none.
        num_norms: of a block, each of the hidden size.
        norm_vectors: a norm has a weight, none (0), or a bias too (2).
        normed_inner: what the output projection of attention and the last of a feed-forward part read is normalised.
        head_dim: d where the config gives none; None: an equal part of the hidden size.
        fused_qkv: queries, keys and values come from one linear layer.
        fused_mlp: gate and up come from one linear layer.
        mlp: numbers that a feed-forward part keeps for the backward pass, of each of its inner width: 4 with gates,
            fewer without, and 7 where gates and what they multiply are clamped.
        gates_mlp: a feed-forward part has gates, and so three linear layers, not two.
        activation_weights: of each feed-forward part.
        gates_attention: as many gates as there are queries multiply the output of attention: of the projection to
            queries ("fused"), or of one of their own ("own"); "" for none.
        shares_expert: beside experts there are some that every token passes: "gated", one times a gate of its own, or
            "plain", or "sized", one whose width the config names, or "wide", as wide as a feed-forward part without
            experts, or "beside", that and with norms of its own; "" for none.
        routes_linearly: routers are linear layers.
        biases_routes: experts have biases of a router that are chosen with, and are no buffers.
        wide_experts: an expert is as wide as a feed-forward part without experts.
        is_tied: embedding and head are one matrix where the config does not say.
        differ: layers with a window and those without have heads of their own, and some read keys and values of others.
        rule_inputs: linear layers that read the residual stream in a layer with the gated delta rule; 0: the family has
            no such layers.
        latent: keys and values, and mostly queries, come from compressed ones, which engines keep ("kept"), or of which
            they keep the keys and values of all heads ("expanded"); "" for none.
        has_sinks: each query head has a weight that takes a share of the softmax.
        biased_experts: experts and routers have biases.
        norms_experts: the output of a feed-forward part with experts is normalised.
        num_parts: attentions of a block, and feed-forward parts; 2: beside them it has experts, some of which compute
            nothing.
    """

    biased_head: bool = False
    biased_qkv: bool = False
    biased_out: bool = True
    normed: str = ""
    num_norms: int = 2
    norm_vectors: int = 1
    normed_inner: bool = False
    head_dim: int | None = None
    fused_qkv: bool = False
    fused_mlp: bool = False
    mlp: int = 4
    gates_mlp: bool = True
    activation_weights: int = 0
    gates_attention: str = ""
    shares_expert: str = ""
    routes_linearly: bool = False
    biases_routes: bool = False
    wide_experts: bool = False
    is_tied: bool = False
    differ: bool = False
    rule_inputs: int = 0
    latent: str = ""
    has_sinks: bool = False
    biased_experts: bool = False
    norms_experts: bool = False
    num_parts: int = 1


_PLAIN: Final = Family()
_QWEN2: Final = Family(biased_qkv=True)
_QWEN3: Final = Family(normed="head", head_dim=128)
_QWEN3_5: Final = Family(normed="head", head_dim=256, gates_attention="fused", shares_expert="gated", rule_inputs=4)
_NORMED: Final = Family(normed="head")
_OLMO2: Final = Family(normed="width")
_OLMOE: Final = Family(normed="width", wide_experts=True)
_NORMED_SHARING: Final = Family(normed="head", shares_expert="plain")
_GEMMA3: Final = Family(normed="head", num_norms=4, head_dim=256, is_tied=True)
_GEMMA4: Final = Family(normed="head", num_norms=4, head_dim=256, is_tied=True, shares_expert="beside", differ=True)
_LATENT_SHARING: Final = Family(latent="kept", shares_expert="plain")
FAMILIES: Final = {
    "afmoe": Family(
        normed="head",
        num_norms=4,
        head_dim=128,
        gates_attention="own",
        shares_expert="plain",
        routes_linearly=True,
        biases_routes=True,
    ),
    "apertus": Family(normed="head", gates_mlp=False, mlp=5, activation_weights=2),
    "arcee": Family(gates_mlp=False, mlp=2),
    "axk1": Family(latent="kept", shares_expert="plain", norms_experts=True),
    "bitnet": Family(normed_inner=True),
    "cohere": Family(normed="heads", num_norms=1, is_tied=True),
    "cohere2": Family(num_norms=1, is_tied=True),
    "cwm": _PLAIN,
    "deepseek_v2": _LATENT_SHARING,
    "deepseek_v3": _LATENT_SHARING,
    "dots1": _NORMED_SHARING,
    "ernie4_5": Family(is_tied=True),
    "ernie4_5_moe": Family(is_tied=True, shares_expert="plain", biases_routes=True, biased_head=True),
    "exaone4": _NORMED,
    "exaone_moe": _NORMED_SHARING,
    "flex_olmo": _OLMOE,
    "gemma": Family(head_dim=256, is_tied=True),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "glm": Family(biased_out=False, head_dim=128, fused_mlp=True),
    "glm4": Family(biased_out=False, num_norms=4, head_dim=128, fused_mlp=True),
    "glm4_moe": Family(biased_out=False, normed="head", head_dim=128, shares_expert="plain"),
    "glm4_moe_lite": _LATENT_SHARING,
    "gpt_oss": Family(wide_experts=True, has_sinks=True, biased_experts=True, mlp=7),
    "granite": _PLAIN,
    "granite_swa": Family(has_sinks=True, is_tied=True),
    "granitemoe": Family(wide_experts=True),
    "granitemoe_swa": Family(wide_experts=True, shares_expert="sized", fused_mlp=True, has_sinks=True),
    "granitemoeshared": Family(wide_experts=True, shares_expert="sized", fused_mlp=True),
    "helium": Family(biased_out=False, head_dim=128),
    "hunyuan_v1_dense": _NORMED,
    "hunyuan_v1_moe": Family(normed="head", wide_experts=True, shares_expert="wide", routes_linearly=True),
    "hy_v3": _NORMED_SHARING,
    "llama": _PLAIN,
    "longcat_flash": Family(latent="kept", num_norms=4, num_parts=2, routes_linearly=True),
    "mellum": _NORMED,
    "minicpm3": Family(latent="expanded", is_tied=True),
    "minimax_m2": _OLMOE,
    "ministral": _PLAIN,
    "ministral3": _PLAIN,
    "mistral": _PLAIN,
    "mixtral": Family(wide_experts=True),
    "nanochat": Family(normed="bare", norm_vectors=0, gates_mlp=False, mlp=2),
    "olmo": Family(norm_vectors=0),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmo_hybrid": Family(normed="width", rule_inputs=6),
    "olmoe": _OLMOE,
    "phi3": Family(fused_qkv=True, fused_mlp=True),
    "qwen2": _QWEN2,
    "qwen2_moe": Family(biased_qkv=True, shares_expert="gated"),
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_moe": _QWEN3,
    "qwen3_next": Family(normed="head", head_dim=256, gates_attention="fused", shares_expert="gated", rule_inputs=2),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "seed_oss": Family(biased_out=False),
    "smollm3": Family(is_tied=True),
    "solar_open": Family(biased_out=False, shares_expert="plain"),
    "starcoder2": Family(norm_vectors=2, gates_mlp=False, mlp=2, is_tied=True),
    "youtu": Family(latent="kept", is_tied=True),
}
