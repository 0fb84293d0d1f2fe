"""Activation checkpointing of a model that stays in evaluation mode, and layers' inputs that wait in main memory.

forward    layer 0     layer 1     layer 2     layer 3
out                    0 leaves    1 leaves    2 leaves     copies, beside what computes
backward   layer 3     layer 2     layer 1     layer 0
in         2 comes     1 comes     0 comes
"""

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from offbeat_core import ConfigError
from offbeat_device import Device

_LEAVING: Final = 2
"""Inputs that are still on the device: that of the layer that computes, and one on its way out."""


def recompute_layers(whole: nn.Module, inputs: "OffloadedInputs | None" = None) -> None:
    """Let the layers of a transformers model keep their inputs alone, and compute the rest again in the backward pass.

    Not by `gradient_checkpointing_enable`: transformers checkpoints in training mode alone, and that mode also turns on
    dropout that a family calls as a function and the jitter of a router, so that the policy that is trained would not
    be the policy that was sampled.

    Args:
        whole: the model.
        inputs: takes the inputs to main memory; None keeps them on the device.

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
        layer.forward = _recomputed(layer.forward, inputs)


def _recomputed(forward: Callable[..., Any], inputs: "OffloadedInputs | None") -> Callable[..., Any]:
    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Nothing in a layer is random, so copying the generators' states from the device is not needed.
        with inputs.hooks() if inputs else nullcontext():
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return checkpointed


class OffloadedInputs:
    """Inputs of layers that wait in main memory for the backward pass, and come back one layer before they are used.

    Memory that the copies go to is pinned where the platform can, and used again by the next micro-batch.

    Args:
        device: that the layers compute on.
    """

    def __init__(self, device: Device) -> None:
        self.torch_device = device.torch_device
        self._device, self._lane = device, device.copy_lane()
        self._free: list[Tensor] = []
        self._leaving: deque[Callable[[], _Input | None]] = deque()

    def hooks(self) -> saved_tensors_hooks:
        """Return the context in which what is kept for the backward pass is taken to main memory."""
        return saved_tensors_hooks(self._keep, lambda kept: kept.take() if isinstance(kept, _Input) else kept)

    def _keep(self, tensor: Tensor) -> "_Input | Tensor":
        if not tensor.numel():  # torch 2.11 keeps one beside the input of each layer, 2.13 does not
            return tensor.detach()
        before = self._leaving[-1]() if self._leaving else None
        if before is not None and before.used:  # of a micro-batch whose backward pass has run
            before = None
        kept = _Input(self, tensor.detach(), before)
        self._leaving.append(ref(kept))
        while len(self._leaving) > _LEAVING:
            if leaving := self._leaving.popleft()():
                leaving.let_go()
        return kept

    def memory(self, num_bytes: int) -> Tensor:
        """Return [num_bytes] uint8 of main memory, that of earlier inputs where one is large enough."""
        place = next((place for place, each in enumerate(self._free) if len(each) >= num_bytes), None)
        held = self._device.pinned_memory(num_bytes) if place is None else self._free.pop(place)
        if place is None and self._free:
            self._free.pop()  # too small for a longer micro-batch
        return held

    def copy(self, to: Tensor, source: Tensor) -> Callable[[], None]:
        """Queue a copy, after those before it."""
        return self._lane.copy(to, source)

    def give_back(self, memory: Tensor) -> None:
        """Take memory for the next input. A copy from it that is still queued precedes the next one to it."""
        self._free.append(memory)


class _Input:
    """One tensor, on the device, in main memory, or on the way.

    Attributes:
        used: the backward pass has asked for it.
    """

    def __init__(self, owner: OffloadedInputs, tensor: Tensor, before: "_Input | None") -> None:
        self._owner, self._before, self.used = owner, before, False
        self._here: Tensor | None = tensor.contiguous()
        self._like = torch.empty_like(self._here, device="meta")
        self._memory = owner.memory(self._here.nbytes)
        self._wait = owner.copy(self._values(), self._here)

    def let_go(self) -> None:
        """Free its memory on the device; what is queued from here on may write to it."""
        if not self.used:
            self._wait()
            self._here = None

    def take(self) -> Tensor:
        """Return it on the device, and begin to bring the one before it."""
        self._bring()
        assert self._here is not None
        self._wait()
        tensor, self._here, self.used = self._here, None, True
        if self._before is not None:
            self._before._bring()
            self._before = None
        return tensor

    def _bring(self) -> None:
        if self._here is None:
            self._here = torch.empty_like(self._like, device=self._owner.torch_device)
            self._wait = self._owner.copy(self._here, self._values())

    def _values(self) -> Tensor:
        return self._memory[: self._like.nbytes].view(self._like.dtype).view(self._like.shape)

    def __del__(self) -> None:
        if self._here is not None:  # with a copy from it, or to it, that may be under way
            self._wait()
        self._owner.give_back(self._memory)
