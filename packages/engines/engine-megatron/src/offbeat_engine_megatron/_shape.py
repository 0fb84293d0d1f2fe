"""Shape of a model from its Hugging Face folder: family, sizes, rotary angles, and the tensors of its checkpoint.

Source: transformers' configuration and model classes of the families.

Shapes: T tokens of a pack, F frequencies, half of what is rotated of a head.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from offbeat_core import ModelError


def outline_tower(hf_config: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(Name within the tower, shape) of each parameter, in transformers' order; no memory is allocated."""
    from transformers import AutoModel

    with torch.device("meta"):
        tower = AutoModel.from_config(hf_config.vision_config)
    return tuple((name, tuple(parameter.shape)) for name, parameter in tower.named_parameters())


VISION_FAMILIES: Final = ("qwen2_5_vl", "qwen3_vl")
LATENT_FAMILIES: Final = ("deepseek_v3", "glm4_moe_lite")
SIGMOID_FAMILIES: Final = ("glm4_moe", "dots1", *LATENT_FAMILIES)
"""Families whose routers score experts by sigmoids, choose by scores plus a bias, and whose first layers are dense."""
FAMILIES: Final = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "qwen2_moe", *SIGMOID_FAMILIES, *VISION_FAMILIES)


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Sizes of multi-latent attention.

    Args:
        query_rank: numbers that queries are made of; None: of the hidden state.
        key_rank: numbers that keys and values are made of.
        plain_size: of a head, without positions.
        rotary_size: of a head, with positions.
        value_size: of a head.
        rope_factor: by which yarn stretches positions; 1 without.
        rope_mscale: of yarn, `mscale_all_dim`: scores grow with it and the factor.
    """

    query_rank: int | None
    key_rank: int
    plain_size: int
    rotary_size: int
    value_size: int
    rope_factor: float
    rope_mscale: float


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a causal language model.

    Args:
        family: one of `FAMILIES`.
        num_groups: key and value heads.
        ffn_size: width of the dense feed-forward layers.
        vocabulary: rows of the embedding.
        tied: the head is the embedding.
        padding_id: lookups of its row train nothing; None where no id is padding.
        qkv_bias: queries, keys and values have a bias.
        qk_norm: queries and keys are normalised per head.
        num_experts: of the sparse layers; 0 for a dense model.
        expert_size: width of an expert.
        normalise_experts: the chosen experts' weights add up to 1, before `expert_scale`.
        expert_scale: factor on the chosen experts' weights.
        sigmoid_router: experts are scored by sigmoids and chosen by scores plus a bias, which no gradient moves;
            otherwise both by softmax.
        expert_groups: (groups, groups that a token may choose from); None: from all experts.
        shared_size: width of the expert that all tokens take beside the chosen ones; 0 where there is none.
        shared_gate: what it adds is scaled by a gate of its own.
        sparse_layers: for each layer whether it has experts.
        mtp_layers: layers of multi-token prediction behind the model.
        latent: of multi-latent attention; None where queries, keys and values are projected from the hidden state.
        tower: (name, shape) of each parameter of the vision tower; none of a model for text.
        deepstack: layers, from the first on, behind which something of the tower is added.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_groups: int
    head_size: int
    ffn_size: int
    vocabulary: int
    norm_eps: float
    tied: bool
    padding_id: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalise_experts: bool = True
    expert_scale: float = 1.0
    sigmoid_router: bool = False
    expert_groups: tuple[int, int] | None = None
    shared_size: int = 0
    shared_gate: bool = False
    sparse_layers: tuple[bool, ...] = ()
    mtp_layers: int = 0
    latent: LatentShape | None = None
    tower: tuple[tuple[str, tuple[int, ...]], ...] = ()
    deepstack: int = 0

    @property
    def stem(self) -> str:
        """Return what Hugging Face names of the language model's tensors begin with."""
        return "model.language_model" if self.tower else "model"


def read_model(folder: str, *, trust_remote_code: bool = False) -> tuple[Any, ModelShape]:
    """Return the Hugging Face config of a folder, and what of it the engine needs.

    Raises:
        ModelError: there is no such folder, its config cannot be read, or asks for what is not supported.
    """
    path = Path(folder).expanduser()
    if not (path / "config.json").is_file():
        raise ModelError(f"model_path must be a Hugging Face model folder: {path} has no config.json; check the path")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path / 'config.json'} cannot be read: {error}") from error
    return config, shape_of(config)


def shape_of(config: Any) -> ModelShape:
    """Read a Hugging Face config; ModelError for another family, or a feature that the engine does not compute."""
    family = str(config.model_type)
    if family not in FAMILIES:
        raise ModelError(
            f"the megatron engine trains {', '.join(FAMILIES)}: got {family!r}; use another engine.backend"
        )
    whole, config = config, config.get_text_config()
    refused = {
        "attention_bias": getattr(config, "attention_bias", False) and family != "glm4_moe",
        "mlp_bias": getattr(config, "mlp_bias", False),
        "use_sliding_window": getattr(config, "use_sliding_window", False),
        "sliding_window": family == "mistral" and config.sliding_window,
        "layer_types other than full_attention": set(getattr(config, "layer_types", None) or ()) - {"full_attention"},
        "attention_dropout": getattr(config, "attention_dropout", 0.0),
        "hidden_act other than silu": config.hidden_act != "silu",
        "rope_interleave = false": family in LATENT_FAMILIES and not config.rope_interleave,
    }
    experts = _experts(config) if hasattr(config, "moe_intermediate_size") else {}
    refused |= _refused_routers(experts)
    found = [name for name, value in refused.items() if value]
    if found:
        raise ModelError(f"the megatron engine does not compute {family} models with {', '.join(found)}")
    rotary_frequencies(config)  # raises for kinds that depend on the length of a pack
    latent = _latent_sizes(config) if family in LATENT_FAMILIES else None
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelShape(
        family=family,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_groups=config.num_key_value_heads,
        head_size=latent.plain_size + latent.rotary_size if latent else head_size,
        ffn_size=config.intermediate_size,
        vocabulary=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        tied=bool(whole.tie_word_embeddings),
        padding_id=_padding_id(config),
        qkv_bias=family in ("qwen2", "qwen2_5_vl") or _has_qkv_bias(config),
        qk_norm=family.startswith(("qwen3", "dots1")) or getattr(config, "use_qk_norm", False),
        mtp_layers=getattr(config, "num_nextn_predict_layers", 0) or 0,
        latent=latent,
        **experts,
        **(_vision_sizes(whole) if family in VISION_FAMILIES else {}),
    )


def _latent_sizes(config: Any) -> LatentShape:
    return LatentShape(
        query_rank=config.q_lora_rank,
        key_rank=config.kv_lora_rank,
        plain_size=config.qk_nope_head_dim,
        rotary_size=config.qk_rope_head_dim,
        value_size=config.v_head_dim,
        rope_factor=float(config.rope_parameters.get("factor", 1.0)),
        rope_mscale=float(config.rope_parameters.get("mscale_all_dim", 0.0)),
    )


def _has_qkv_bias(config: Any) -> bool:
    return bool(getattr(config, "qkv_bias", getattr(config, "attention_bias", False)))


def _padding_id(config: Any) -> int | None:
    found: int | None = getattr(config, "pad_token_id", None)
    return None if found is None else found % int(config.vocab_size)  # torch counts a negative one from the end


def _vision_sizes(config: Any) -> dict[str, Any]:
    deepstack = getattr(config.vision_config, "deepstack_visual_indexes", None) or ()
    return {"tower": outline_tower(config), "deepstack": len(deepstack)}


def _experts(config: Any) -> dict[str, Any]:
    found = {
        "experts_per_token": config.num_experts_per_tok,
        "expert_size": config.moe_intermediate_size,
        "normalise_experts": bool(config.norm_topk_prob),
    }
    if config.model_type not in SIGMOID_FAMILIES:
        shared_size = getattr(config, "shared_expert_intermediate_size", 0)
        return found | {
            "num_experts": config.num_experts,
            "shared_size": shared_size,
            "shared_gate": bool(shared_size),
            "sparse_layers": tuple(
                layer not in config.mlp_only_layers
                and config.num_experts > 0
                and (layer + 1) % config.decoder_sparse_step == 0
                for layer in range(config.num_hidden_layers)
            ),
        }
    groups = (config.n_group, config.topk_group)
    return found | {
        "num_experts": config.n_routed_experts,
        "expert_scale": float(config.routed_scaling_factor),
        "sigmoid_router": True,
        "expert_groups": groups if groups[1] < groups[0] else None,
        "shared_size": config.moe_intermediate_size * (config.n_shared_experts or 0),
        "sparse_layers": tuple(_is_sparse(config, layer) for layer in range(config.num_hidden_layers)),
    }


def _is_sparse(config: Any, layer: int) -> bool:
    kinds = getattr(config, "mlp_layer_types", None)
    return bool(layer >= config.first_k_dense_replace if kinds is None else kinds[layer] == "sparse")


def _refused_routers(experts: dict[str, Any]) -> dict[str, bool]:
    """Return what megatron-core's router computes in another way than transformers', by its name in words."""
    if not experts:
        return {}
    chosen, normalised = experts["experts_per_token"], experts["normalise_experts"]
    sigmoid, groups = experts.get("sigmoid_router", False), experts.get("expert_groups")
    return {
        "norm_topk_prob = true and one expert for each token": normalised and chosen == 1,
        "norm_topk_prob = false in routers with sigmoids": sigmoid and not normalised,
        "groups of experts that are not scored by their best two (num_experts_per_tok // topk_group = 2)": bool(
            groups and chosen // groups[1] != 2
        ),
        "no shared experts": sigmoid and not experts["shared_size"],
    }


def rotary_frequencies(hf_config: Any, device: torch.device | None = None) -> Tensor:
    """[F] float32 of a language model, as transformers computes them; ModelError for kinds that do more than turn."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = hf_config.rope_parameters
    kind = parameters.get("rope_type", "default")
    size = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    if hf_config.model_type == "glm4_moe":
        size = int(size * parameters.get("partial_rotary_factor", 1.0))
    if kind == "default":
        found = 1.0 / (parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
        factor = 1.0
    else:
        found, factor = ROPE_INIT_FUNCTIONS[kind](hf_config, device)
    if factor != 1.0 or kind in ("dynamic", "longrope") or len(found) != size // 2:
        raise ModelError(f"the megatron engine does not compute rotary embeddings of type {kind!r}")
    frequencies: Tensor = found if device is None else found.to(device)
    return frequencies


def rotary_axes(hf_config: Any, device: torch.device) -> Tensor:
    """[F] int64: which of time, height and width turns each frequency of a Qwen-VL model.

    Qwen2.5-VL has them in three runs. Qwen3-VL has them alternate, and where height and width end only time is left.
    Source: `recomposition_frequencies` in transformers 5.19, models/qwen2_5_vl and models/qwen3_vl.
    """
    runs: list[int] = list(hf_config.get_text_config().rope_parameters["mrope_section"])
    axes_F = np.repeat(np.arange(len(runs)) % 3, runs)
    if hf_config.model_type == "qwen3_vl":
        axes_F = np.zeros(sum(runs), np.int64)
        for axis in (1, 2):
            axes_F[axis : 3 * runs[axis] : 3] = axis
    return torch.from_numpy(axes_F).to(device)


def angles_of(positions_3T: Tensor, axes_F: Tensor, frequencies_F: Tensor) -> Tensor:
    """[T, 1, 1, 2 F] float32: of every token of a pack, as megatron-core takes them.

    megatron/core/models/common/embeddings/rotary_pos_embedding.py (0.16.1) has the runs of Qwen2.5-VL, and not the
    alternation of Qwen3-VL; rope_utils.py takes angles of as many tokens as the pack has for those of each token, and
    finds in them what a context parallel rank holds.
    """
    angles_TF = positions_3T[axes_F].T * frequencies_F
    return torch.cat([angles_TF, angles_TF], -1)[:, None, None]
