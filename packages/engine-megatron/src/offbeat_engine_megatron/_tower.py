"""The vision tower of a Qwen-VL model: transformers' own module (transformers 5.19, qwen2_5_vl and qwen3_vl)."""

from typing import Any

import torch


def outline_tower(hf_config: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(Name within the tower, shape) of each parameter, in transformers' order; no memory is taken."""
    from transformers import AutoModel

    with torch.device("meta"):
        tower = AutoModel.from_config(hf_config.vision_config)
    return tuple((name, tuple(parameter.shape)) for name, parameter in tower.named_parameters())


def make_tower(hf_config: Any, dtype: torch.dtype, device: torch.device, *, trained: bool, recompute: bool) -> Any:
    """A tower without weights yet, the whole of it on every rank.

    Args:
        hf_config: of the model.
        dtype: of the weights.
        device: of this rank.
        trained: whether it learns.
        recompute: keep each block's input alone for the backward pass.
    """
    from transformers import AutoModel

    with torch.device(device):
        tower = AutoModel.from_config(hf_config.vision_config, dtype=dtype, attn_implementation="sdpa")
    if recompute:
        tower.gradient_checkpointing_enable({"use_reentrant": False})
    tower.requires_grad_(requires_grad=trained)
    for parameter in tower.parameters():
        # Ranks of tp compute the same gradient, up to the order in which a device adds up: their mean keeps them alike.
        parameter.average_gradients_across_tp_domain = True
    return tower
