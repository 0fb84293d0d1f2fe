"""Angles by which positions turn queries and keys: their frequencies, and which axis of a position each belongs to.

Shapes: T tokens, F frequencies, half a head.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat_types import ModelError


def rotary_frequencies(hf_config: Any, device: torch.device) -> Tensor:
    """[F] float32, as transformers computes them.

    Args:
        hf_config: of the language model.
        device: where they go.

    Raises:
        ModelError: a kind of rotary embedding that also scales attention, or turns only part of a head.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = hf_config.rope_parameters
    kind = parameters.get("rope_type", "default")
    size = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    if kind == "default":
        found = 1.0 / (parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
        factor = 1.0
    else:
        found, factor = ROPE_INIT_FUNCTIONS[kind](hf_config, device)
    if factor != 1.0 or kind in ("dynamic", "longrope") or len(found) != size // 2:
        raise ModelError(f"the megatron engine does not compute rotary embeddings of type {kind!r}")
    frequencies: Tensor = found.to(device)
    return frequencies


def rotary_axes(hf_config: Any, device: torch.device) -> Tensor:
    """[F] int64: which of time, height and width turns each frequency of a Qwen-VL model.

    Qwen2.5-VL has them in three runs. Qwen3-VL has them alternate, and where height and width end only time is left.
    Source: `recomposition_frequencies` in transformers 5.19, models/qwen2_5_vl and models/qwen3_vl.

    Args:
        hf_config: of the whole model.
        device: where they go.
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
