"""A mixture of experts in the place of a layer's feed-forward: its router, its experts, their weights by name.

Shapes: N tokens of a pass, H hidden size, E experts, I width of an expert, K experts of a token.
"""

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from offbeat_rollout_torch._families import Architecture
from offbeat_rollout_torch._parameters import Arena, Parameter


class Experts:
    """Router and experts of one layer. The experts of a projection are one tensor.

    Args:
        architecture: of a model with experts.
        like: format and device of the weights.
    """

    def __init__(self, architecture: Architecture, like: Tensor | Arena) -> None:
        a = architecture
        self._top_k, self._normalises = a.experts_per_token, a.normalises_experts
        self.router = like.new_empty(a.num_experts, a.hidden_size)
        self.gate_up = like.new_empty(a.num_experts, 2 * a.expert_size, a.hidden_size)
        self.down = like.new_empty(a.num_experts, a.hidden_size, a.expert_size)

    def __call__(self, h_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a token's experts make of it together, [N, H], and which they are, [N, K] int64.

        Source: transformers 5.19, Qwen3MoeTopKRouter and Qwen3MoeExperts.
        """
        scores_NE = F.linear(h_NH, self.router).softmax(-1, dtype=torch.float32)
        weights_NK, chosen_NK = scores_NE.topk(self._top_k)
        if self._normalises:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        order = chosen_NK.flatten().argsort(stable=True)
        token = order // self._top_k
        counts = chosen_NK.flatten().bincount(minlength=len(self.router)).tolist()
        rows = torch.split(h_NH.index_select(0, token), counts)
        parts = [self._expert(expert, part) for expert, part in enumerate(rows) if len(part)]
        weighed = torch.cat(parts) * weights_NK.to(h_NH.dtype).flatten()[order, None]
        return torch.zeros_like(h_NH).index_add_(0, token, weighed), chosen_NK

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up[expert]).chunk(2, -1)
        return F.linear(F.silu(gate).mul_(up), self.down[expert])

    def parameters(self) -> dict[str, Parameter]:
        """Tensors by the names of folders, without the layer's prefix: each expert's by itself."""
        (num_experts, hidden), wide = self.router.shape, self.down.shape[-1]
        found = {"mlp.gate.weight": Parameter(lambda: self.router, slice(None), (num_experts, hidden))}
        for expert in range(num_experts):
            gate_up, down = (partial(stack.__getitem__, expert) for stack in (self.gate_up, self.down))
            places = {
                "gate": Parameter(gate_up, slice(0, wide), (wide, hidden)),
                "up": Parameter(gate_up, slice(wide, 2 * wide), (wide, hidden)),
                "down": Parameter(down, slice(None), (hidden, wide)),
            }
            found |= {f"mlp.experts.{expert}.{name}_proj.weight": place for name, place in places.items()}
        return found

    def stacks(self) -> dict[str, Parameter]:
        """Tensors by the names of transformers' models, in which all experts are one."""
        return {
            "mlp.experts.gate_up_proj": Parameter(lambda: self.gate_up, slice(None), tuple(self.gate_up.shape)),
            "mlp.experts.down_proj": Parameter(lambda: self.down, slice(None), tuple(self.down.shape)),
        }
