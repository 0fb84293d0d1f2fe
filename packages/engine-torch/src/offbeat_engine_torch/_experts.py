"""Products of fused experts, registered with transformers under `EXPERTS_NAME`, in the number format of autocast.

Expected: under autocast to bfloat16 experts compute in bfloat16, as every other linear layer. Happens: torch's grouped
product is not among the operations that autocast knows, and computes in the float32 of the weights. Upstream:
https://github.com/pytorch/pytorch/issues/174763. Can go when autocast covers `torch.nn.functional.grouped_mm`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

EXPERTS_NAME = "offbeat_grouped"


def register_experts() -> None:
    """Make the products known to transformers; doing it twice changes nothing."""
    ExpertsInterface.register(EXPERTS_NAME, grouped_experts)


def grouped_experts(experts: Any, hidden_TE: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """The sum of each token's experts: transformers' experts interface.

    Args:
        experts: a layer that holds the weights of all its experts in one tensor per projection.
        hidden_TE: T tokens.
        expert_TK: int64, the K experts of each.
        weight_TK: what each counts.

    Returns:
        [T, E] in the format of `hidden_TE`.
    """
    kind = hidden_TE.device.type
    asked: Any = _Cast(experts, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else experts
    summed: Tensor = grouped_mm_experts_forward(asked, hidden_TE, expert_TK, weight_TK)
    return summed


class _Cast:
    """A layer seen through another number format; gradients arrive at the weights themselves."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        self._layer, self._dtype = layer, dtype

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._layer, name)
        return found.to(self._dtype) if isinstance(found, Tensor) else found
