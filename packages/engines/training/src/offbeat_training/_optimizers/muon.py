"""Muon: the momentum of a matrix, made orthogonal, is its update.

Source: Jordan et al., kellerjordan.github.io/posts/muon; `torch.optim.Muon`, whose arithmetic this is. Its rate, which
lets a matrix have the rate and the decay of AdamW: arXiv:2502.16982, section 2.2 ("Matching update RMS of AdamW").

Shapes: E experts, each a matrix of its own; M rows and N columns of a matrix.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from offbeat_core import TrainEngineConfig
from offbeat_training._optimizers.moments import HeldMoments, chunks, draw_noise, rows_of
from offbeat_training._tensor_files import Box, slices

MOMENTUM: Final = 0.95
"""Decay of the momentum. Source: torch.optim.Muon, arXiv:2502.16982."""
MUON_MOMENTS: Final = ("momentum_buffer",)
_STEPS: Final = 5
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz iteration, and how often it runs. Source: torch.optim.Muon."""
_EPSILON: Final = 1e-7
_RMS: Final = 0.2
"""Root mean square of AdamW's updates, as measured in arXiv:2502.16982, section 2.2."""


class Muon:
    """Muon of matrices, and of stacks of experts, each of which is a matrix. A step is one of all ranks.

    The update needs the whole matrix. Where ranks share one, they gather its momentum in bfloat16, one matrix at a
    time, each orthogonalises it, and keeps its own part. All gather the same matrices in the same order: those of which
    any rank has a gradient, also where a rank has no row of one. Experts that a rank has whole are not gathered.

    Args:
        held: momentum of the parameters of which this rank has a part.
        places: shape of the whole of all matrices of all ranks, and this rank's box, in an order that all ranks share.
        shared: names of the matrices that are gathered, the same on all ranks.
        config: decay and the seed of what is rounded at random.
        gather: returns the whole of a matrix from its name and this rank's part, None for no rows; a call of all ranks.
        exchange: returns what all ranks have given; a call of all ranks.
    """

    def __init__(
        self,
        held: HeldMoments,
        places: Mapping[str, tuple[Sequence[int], Box]],
        shared: Collection[str],
        config: TrainEngineConfig,
        gather: Callable[[str, Tensor | None], Tensor],
        exchange: Callable[[list[str]], Sequence[list[str]]],
    ) -> None:
        self.held, self._places, self._shared, self._config = held, places, shared, config
        self._gather, self._exchange = gather, exchange

    def updates(self, name: str) -> bool:
        """Return whether a parameter is one of these matrices, on whichever rank it is."""
        return name in self._places

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update every matrix that has a gradient on any rank."""
        mine = [name for name, parameter in self.held.parameters.items() if parameter.grad is not None]
        wanted = set().union(*self._exchange(mine))
        for name in self.held.through([name for name in self._places if name in wanted]):
            shape, box = self._places[name]
            parameter = self.held.parameters.get(name)
            part = None if parameter is None else self._blend(name, parameter)
            whole = self._gather(name, part) if name in self._shared else part
            if parameter is None or whole is None:
                continue  # this rank has no part of it, and has taken part where others gather
            update = orthogonalize(whole)
            parameter.mul_(1 - rate * self._config.weight_decay)
            own = update[slices(box)] if name in self._shared else update
            parameter.add_(own, alpha=-rate * _RMS * math.sqrt(max(shape[-2:])))

    def _blend(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Add the gradient to the momentum; return Nesterov's update of this rank's part, bfloat16."""
        state = self.held.of(name)
        state.steps += 1
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        found = torch.empty(parameter.shape, dtype=torch.bfloat16, device=parameter.device)
        grads_RC, updates_RC, [form] = rows_of(grad.contiguous()), rows_of(found), state.formats
        for start, stop in chunks(grads_RC):
            [held], grad_RC = state.part(start, stop), grads_RC[start:stop]
            momentum_RC = form.read(held).lerp(grad_RC, 1 - MOMENTUM)
            updates_RC[start:stop] = grad_RC.lerp(momentum_RC, MOMENTUM)
            keys = state.noise.keys(self._config.seed, state.steps, start, stop) if form.rounds_randomly else None
            form.write(held, momentum_RC, draw_noise(*keys)[0] if keys else None)
        return found


def orthogonalize(update: Tensor) -> Tensor:
    """Return about U V^T of a matrix U S V^T, with singular values of about 0.7 to 1.2.

    Args:
        update: [M, N] or [E, M, N] bfloat16.
    """
    a, b, c = _COEFFICIENTS
    is_tall = update.shape[-2] > update.shape[-1]
    x = update.mT if is_tall else update
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    x = x / (x.norm() if x.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)).clamp(min=_EPSILON)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
