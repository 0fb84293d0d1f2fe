"""RMS norms of float32 activations: on processors in half the passes over memory that autograd takes, on other devices
by the one kernel that torch has for them there.

Shapes: N tokens and heads of an activation, E its last dimension.
"""

import copy
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

_PROBED_TOKENS: Final = 4
_SAME: Final = 1e-6
"""Largest difference of two ways to compute a norm of a random activation, in float32."""


def fuse_norms(whole: nn.Module, last: nn.Module | None) -> None:
    """Let the norms of a transformers model compute as `rms_norm`, those that compute the same.

    What they give is rounded to the format of autocast, as each linear layer behind them would round it for itself.
    Not what `last` gives, from which log-probabilities are computed, nor what experts are chosen by.
    """
    has_experts = any(name.endswith(".experts") for name, _ in whole.named_modules())
    same: dict[type, bool] = {}
    for module in list(whole.modules()):
        family: Any = type(module)
        if not family.__name__.endswith("RMSNorm") or module._parameters.get("weight") is None:
            continue
        if family not in same:
            same[family] = _computes_the_same(module)
        if same[family]:
            module.__class__ = _fused(family, rounds=module is not last and not has_experts)


@cache
def _fused(family: Any, *, rounds: bool) -> Any:
    """Return a family's class of norms with another forward; its own where the activation is of another format.

    A class, and not a forward of each norm's own: `torch.compile` makes one graph for all layers of the same classes.
    """

    def forward(self: Any, x: Tensor) -> Any:
        weight = self.weight
        # Compiled, the family's own arithmetic is one kernel with what is before and behind it.
        if x.dtype != torch.float32 or type(weight) is not nn.Parameter or torch.compiler.is_compiling():
            return family.forward(self, x)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if rounds and torch.is_autocast_enabled(device) else x.dtype
        if x.is_cpu:
            return rms_norm(x, weight, _epsilon(self), dtype)
        # Ranks gather weights in bfloat16; torch has no kernel for an activation and a weight of different formats.
        return nn.functional.rms_norm(x, weight.shape, weight.to(x.dtype), _epsilon(self)).to(dtype)

    return type(f"Fused{family.__name__}", (family,), {"forward": forward})


def _epsilon(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or 0.0)


def _computes_the_same(module: nn.Module) -> bool:
    """Return whether a norm, given random weights and activations, gives what `rms_norm` gives of them."""
    if set(module._parameters) != {"weight"} or module._buffers or not _epsilon(module):
        return False
    size, draw = module._parameters["weight"].shape[-1], torch.Generator().manual_seed(0)  # type: ignore[union-attr]
    probe = copy.copy(module)
    probe._parameters = {"weight": nn.Parameter(torch.rand(size, generator=draw))}
    x = torch.randn(1, _PROBED_TOKENS, size, generator=draw)
    with torch.no_grad():
        found = probe(x)
    wanted = rms_norm(x, probe._parameters["weight"], _epsilon(module), x.dtype)  # type: ignore[arg-type]
    return bool(found.dtype == wanted.dtype and (found - wanted).abs().max() < _SAME)


def rms_norm(x_NE: Tensor, weight_E: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`weight * x / sqrt(mean(x²) + eps)`, computed in the format of x and rounded to `dtype`; [..., E] to [..., E].

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019.
    """
    y: Tensor = _RmsNorm.apply(x_NE, weight_E, eps, dtype)  # type: ignore[no-untyped-call]
    return y


class _RmsNorm(torch.autograd.Function):
    """Keeps the activation and one number for each token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        x, size = x.contiguous(), x.shape[-1]
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x, scale).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad, size = grads[0].contiguous(), x.shape[-1]
        # With s = scale: dy/dx = s w - x s^3 (x w) / E; both sums over the product of gradient and activation.
        product = torch.mul(grad, x).view(-1, size)
        flat_scale = scale.view(-1, 1)
        grad_weight = torch.mm(flat_scale.t(), product)[0] if ctx.needs_input_grad[1] else None
        shrink = torch.mm(product, weight.to(x.dtype)[:, None]).mul_(flat_scale.pow(3)).div_(size)
        grad_x = torch.mul(grad, weight, out=product.view(x.shape)).mul_(scale)
        grad_x.addcmul_(x, shrink.view(scale.shape), value=-1)
        return grad_x, grad_weight, None, None
