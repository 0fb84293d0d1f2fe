"""AdamW whose moments are held in fewer bytes than they are computed in, a few rows of a parameter at a time.

Shapes: R rows of one parameter, its last dimension but all others flattened; C columns.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from offbeat_core import TrainEngineConfig
from offbeat_device import compiled
from offbeat_training._optimizers.moments import (
    Held,
    HeldMoments,
    MomentFormat,
    MomentState,
    chunks,
    draw_noise,
    rows_of,
)


class NarrowAdamW:
    """AdamW of matrices with moments in bfloat16 or 8 bits. Updates are computed in float32 before moments are rounded.

    Args:
        held: moments of the parameters, two each.
        config: betas, epsilon, decay and the seed of what is rounded at random.
        fused: compile the update of a few rows to one or two kernels, see `offbeat_device.compiled`.
    """

    def __init__(self, held: HeldMoments, config: TrainEngineConfig, *, fused: bool) -> None:
        self.held, self._config, self._fused = held, config, fused

    def step(self, rate: float) -> None:
        """Update every parameter that has a gradient."""
        numbers: dict[tuple[int, torch.device], Tensor] = {}
        for name, parameter in self.held.with_gradients():
            assert parameter.grad is not None
            state = self.held.of(name)
            state.steps += 1
            key = (state.steps, parameter.device)
            if key not in numbers:  # one copy to the device for all parameters
                numbers[key] = self._numbers(rate, state.steps).to(parameter.device)
            self._update(parameter, parameter.grad, state, numbers[key])

    def _numbers(self, rate: float, steps: int) -> Tensor:
        """Return what depends on the step, as a tensor, for compiled code would hold numbers as constants."""
        config = self._config
        slope = rate / (1 - config.adam_beta1**steps)
        return torch.tensor([1 - rate * config.weight_decay, slope, (1 - config.adam_beta2**steps) ** -0.5])

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter, grad: Tensor, state: MomentState, numbers: Tensor) -> None:
        config = self._config
        update = _compiled_update() if self._fused else _update_rows
        constants = (config.adam_beta1, config.adam_beta2, config.adam_eps)
        weights_RC, grads_RC = rows_of(parameter.data), rows_of(grad.contiguous())
        for start, stop in chunks(weights_RC):
            keys = state.noise.keys(config.seed, state.steps, start, stop) if state.formats[0].rounds_randomly else None
            rows = (weights_RC[start:stop], grads_RC[start:stop])
            update(*rows, state.formats, state.part(start, stop), numbers, constants, keys)


def _update_rows(
    weight_RC: Tensor,
    grad_RC: Tensor,
    formats: tuple[MomentFormat, ...],
    held: tuple[Held, ...],
    numbers: Tensor,
    constants: tuple[float, float, float],
    keys: tuple[Tensor, Tensor] | None,
) -> None:
    """Update weights and moments in place. Source: arXiv:1711.05101, algorithm 2."""
    beta1, beta2, epsilon = constants
    decay, slope, root = numbers.unbind()
    first_RC = formats[0].read(held[0]) * beta1 + grad_RC * (1 - beta1)
    second_RC = formats[1].read(held[1]) * beta2 + grad_RC * grad_RC * (1 - beta2)
    weight_RC.mul_(decay).sub_(slope * first_RC / (second_RC.sqrt() * root + epsilon))
    noise = draw_noise(*keys) if keys is not None else (None, None)
    for form, each, values_RC, noise_RC in zip(formats, held, (first_RC, second_RC), noise, strict=True):
        form.write(each, values_RC, noise_RC)


@cache
def _compiled_update() -> Any:
    return compiled(_update_rows)
