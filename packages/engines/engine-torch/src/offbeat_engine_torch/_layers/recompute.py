"""Activation checkpointing of a model that stays in evaluation mode."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from offbeat_core import ConfigError


def recompute_layers(whole: nn.Module) -> None:
    """Let the layers of a transformers model keep their inputs alone, and compute the rest again in the backward pass.

    Not by `gradient_checkpointing_enable`: transformers checkpoints in training mode alone, and that mode also turns on
    dropout that a family calls as a function and the jitter of a router, so that the policy that is trained would not
    be the policy that was sampled.

    Raises:
        ConfigError: the family does not say which of its modules are layers.
    """
    layers = [module for module in whole.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"activation_checkpointing needs layers that can be computed again, and {type(whole).__name__} marks none "
            "as such: set it to false"
        )
    for layer in layers:
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Nothing in a layer is random, so copying the generators' states from the device is not needed.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return checkpointed
