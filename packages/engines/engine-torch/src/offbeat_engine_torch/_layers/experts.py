"""Products of fused experts, in the format of autocast: of all experts here, or of those that ranks hold between them.

With expert parallel ranks each holds some experts whole, and tokens travel: a rank sends the hidden state of each token
to the ranks of the experts that its router chose, these compute, and the outputs come back to be weighed. Source:
GShard (arXiv:2006.16668, section 3.2); torchtitan, `ExpertParallel`.

All ranks come to the same three exchanges in each layer, whatever their tokens chose, a rank that no token chose too.

Shapes: T tokens here, E hidden size, K experts of a token, S = T K choices, X experts, P ranks, x = X / P experts here,
R choices of all ranks that are computed here.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from offbeat_engine_torch._layers.exchange import LayerRanks, here
from offbeat_engine_torch._layers.nf4 import Nf4Stack

EXPERTS_NAME: Final = "offbeat_grouped"


class ExpertParallel(LayerRanks):
    """The ranks that hold the experts of each layer between them, each of them whole."""


def register_experts() -> None:
    """Make the products of fused experts known to transformers; twice changes nothing.

    Expected: under autocast to bfloat16 experts compute in bfloat16, as every other linear layer. Happens: torch's
    grouped product is not among the operations that autocast knows, and computes in the float32 of the weights.
    Upstream: https://github.com/pytorch/pytorch/issues/174763. Can go when autocast covers
    `torch.nn.functional.grouped_mm`.
    """
    ExpertsInterface.register(EXPERTS_NAME, grouped_experts)


def grouped_experts(experts: Any, hidden_TE: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Return the sum of each token's experts, [T, E] in the format of `hidden_TE`: transformers' experts interface.

    Args:
        experts: the layer, with the weights of its experts in one tensor per projection, and perhaps `ranks` and a
            `watch` over their choices.
        hidden_TE: what experts read.
        expert_TK: int64, the experts that each token chose.
        weight_TK: of their outputs in the sum.
    """
    if watch := getattr(experts, "watch", None):
        weight_TK = watch.see(expert_TK, weight_TK)
    kind = hidden_TE.device.type
    is_cast = torch.is_autocast_enabled(kind) or "nf4" in experts.__dict__
    dtype = torch.get_autocast_dtype(kind) if is_cast else None
    ranks = ranks_of(experts)
    if ranks is not None:
        return _experts_of_ranks(experts, ranks, dtype, hidden_TE, expert_TK, weight_TK)
    seen: Any = _Seen(experts, dtype)
    summed: Tensor = grouped_mm_experts_forward(seen, hidden_TE, expert_TK, weight_TK)
    return summed


def ranks_of(experts: Any) -> ExpertParallel | None:
    """Return the ranks that hold the experts of a layer; None where all are here."""
    return getattr(experts, "ranks", None)


def _experts_of_ranks(
    experts: Any,
    ranks: ExpertParallel,
    dtype: torch.dtype | None,
    hidden_TE: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
) -> Tensor:
    num_tokens, num_choices = expert_TK.shape
    expert_S = expert_TK.flatten()
    order_S = expert_S.argsort(stable=True)  # by expert, and so by rank
    sent_Px = torch.bincount(expert_S, minlength=experts.num_experts).view(ranks.size, -1)
    coming_Px = ranks.group.all_to_all_rows(sent_Px)
    sent, coming = torch.stack([sent_Px.sum(1), coming_Px.sum(1)]).tolist()
    rows_SE = hidden_TE.to(dtype or hidden_TE.dtype)[order_S // num_choices]
    rows_RE: Tensor = _Travel.apply(rows_SE, ranks.name, sent, coming)  # type: ignore[no-untyped-call]
    outs_RE = _experts_here(_Seen(experts, dtype, num_experts=coming_Px.shape[1]), rows_RE, coming_Px)
    outs_SE: Tensor = _Travel.apply(outs_RE, ranks.name, coming, sent)  # type: ignore[no-untyped-call]
    place_S = torch.empty_like(order_S).index_copy_(0, order_S, torch.arange(len(order_S), device=order_S.device))
    outs_TKE = outs_SE[place_S].view(num_tokens, num_choices, -1)
    return (outs_TKE * weight_TK[..., None]).sum(1).to(hidden_TE.dtype)


def _experts_here(experts: Any, rows_RE: Tensor, coming_Px: Tensor) -> Tensor:
    """Return the outputs of the experts here, unweighed: rows of one rank after the other, each by expert."""
    num_ranks, num_experts = coming_Px.shape
    number_Px = torch.arange(num_experts, device=rows_RE.device).repeat(num_ranks)
    expert_R = number_Px.repeat_interleave(coming_Px.flatten(), output_size=len(rows_RE))
    if not len(rows_RE):
        # A row of padding: kernels take no empty tensors, and other ranks wait in the backward pass of this layer.
        expert_R = number_Px[:1]
        padded = functional.pad(rows_RE, (0, 0, 0, 1))
        return _grouped(experts, padded, expert_R)[:0]
    return _grouped(experts, rows_RE, expert_R)


def _grouped(experts: Any, rows_RE: Tensor, expert_R: Tensor) -> Tensor:
    once_R1 = torch.ones(len(rows_RE), 1, dtype=rows_RE.dtype, device=rows_RE.device)
    outs_RE: Tensor = grouped_mm_experts_forward(experts, rows_RE, expert_R[:, None], once_R1)
    return outs_RE


class _Seen:
    """Experts as this rank computes them: its part of their weights, in another number format.

    Gradients arrive at the weights themselves.
    """

    def __init__(self, experts: Any, dtype: torch.dtype | None, *, num_experts: int | None = None) -> None:
        self._experts, self._dtype = experts, dtype
        self.num_experts = experts.num_experts if num_experts is None else num_experts

    def __getattr__(self, name: str) -> Any:
        found = here(getattr(self._experts, name))
        if packed := self._experts.__dict__.get("nf4", {}).get(name):
            ranks = ranks_of(self._experts)
            return Nf4Stack(found, packed, first=ranks.rank * len(found) if ranks else 0)
        return found.to(self._dtype) if self._dtype and isinstance(found, Tensor) else found


def has_fused_experts(module: nn.Module) -> bool:
    """Return whether a module is a layer of experts whose products are those of `grouped_experts`."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None) == EXPERTS_NAME


class _Travel(torch.autograd.Function):
    """Rows sent to the ranks that compute with them, so many to each; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, name: str, sent: list[int], coming: list[int]) -> Tensor:
        ctx.name, ctx.sent, ctx.coming = name, sent, coming
        return LayerRanks.named(name).group.all_to_all_runs(rows, sent, coming)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        group = LayerRanks.named(ctx.name).group
        return group.all_to_all_runs(grads[0], ctx.coming, ctx.sent), None, None, None
