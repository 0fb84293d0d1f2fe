"""AdamW whose moments are held in fewer bytes than they are computed in, a few rows of a parameter at a time.

Shapes: R rows of one parameter, its last dimension but all others flattened; C columns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from offbeat_core import TrainEngineConfig
from offbeat_device import compiled
from offbeat_training._moments import Held, MomentFormat, Noise, draw_noise, moment_formats
from offbeat_training._tensor_files import Box
from offbeat_training._trainer_state import MOMENTS

CHUNK_ELEMENTS: Final = 2**18
"""Elements that are updated at a time on a processor: 1 MiB in float32, so that they stay in its cache."""
DEVICE_CHUNK_ELEMENTS: Final = 2**24
"""The same on a device with memory of its own: 64 MiB in float32, of which it needs several at a time."""


@dataclass(eq=False)
class _State:
    """Moments of one parameter, and the updates that they have had."""

    first: Held
    second: Held
    noise: Noise
    steps: int = 0


class NarrowAdamW:
    """AdamW of matrices with moments in bfloat16 or 8 bits. Updates are computed in float32 before moments are rounded.

    Args:
        parameters: by name; float32.
        places: shape of the whole of each, and the box of it that the parameter is.
        config: betas, epsilon, decay and the seed of what is rounded at random.
        moments: bfloat16 or int8.
        fused: compile the update of a few rows to one or two kernels, see `offbeat_device.compiled`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        places: Mapping[str, tuple[Sequence[int], Box]],
        config: TrainEngineConfig,
        moments: str,
        *,
        fused: bool,
    ) -> None:
        self._parameters, self._places = dict(parameters), places
        self._config, self._moments, self._fused = config, moments, fused
        self._states: dict[str, _State] = {}
        self._formats: dict[torch.device, tuple[MomentFormat, MomentFormat]] = {}

    def step(self, rate: float) -> None:
        """Update every parameter that has a gradient."""
        numbers: dict[tuple[int, torch.device], Tensor] = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            state = self._states.get(name) or self._begin(name)
            state.steps += 1
            key = (state.steps, parameter.device)
            if key not in numbers:  # one copy to the device for all parameters
                numbers[key] = self._numbers(rate, state.steps).to(parameter.device)
            self._update(parameter, parameter.grad, state, numbers[key])

    def holds(self, name: str) -> bool:
        """Return whether a parameter is one of these."""
        return name in self._parameters

    def steps_of(self, name: str) -> float | None:
        """Return the updates that a parameter has had; None where it has no moments."""
        state = self._states.get(name)
        return None if state is None else float(state.steps)

    @torch.no_grad()
    def read(self, name: str) -> tuple[Tensor, Tensor]:
        """Return both moments of a parameter, in its shape, float32."""
        parameter, state = self._parameters[name], self._states[name]
        found = [torch.empty(parameter.shape, device=parameter.device) for _ in MOMENTS]
        for values, form, held in zip(
            found, self._formats_on(parameter.device), (state.first, state.second), strict=True
        ):
            rows = _rows(values)
            for start, stop in _chunks(rows):
                rows[start:stop] = form.read(_part(held, start, stop))
        return found[0], found[1]

    @torch.no_grad()
    def load(self, name: str, moments: Sequence[Tensor], steps: float) -> None:
        """Hold both moments of a parameter: what `read` gave as it was, other numbers as the nearest."""
        state = self._begin(name)
        state.steps = int(steps)
        formats = self._formats_on(self._parameters[name].device)
        for values, form, held in zip(moments, formats, (state.first, state.second), strict=True):
            rows = _rows(values.contiguous())
            for start, stop in _chunks(rows):
                form.write(_part(held, start, stop), rows[start:stop])

    def clear(self) -> None:
        """Forget all moments."""
        self._states.clear()

    def held(self) -> Iterator[Tensor]:
        """Iterate over the memory of all moments."""
        for state in self._states.values():
            yield from (*state.first, *state.second)

    def _begin(self, name: str) -> _State:
        parameter = self._parameters[name]
        device, (num_rows, num_columns) = parameter.device, _rows(parameter).shape
        first, second = (form.hold(num_rows, num_columns, device) for form in self._formats_on(device))
        self._states[name] = _State(first, second, Noise(name, *self._places[name], device))
        return self._states[name]

    def _formats_on(self, device: torch.device) -> tuple[MomentFormat, MomentFormat]:
        if device not in self._formats:
            self._formats[device] = moment_formats(self._moments, device)
        return self._formats[device]

    def _numbers(self, rate: float, steps: int) -> Tensor:
        """Return what depends on the step, as a tensor, for compiled code would hold numbers as constants."""
        config = self._config
        slope = rate / (1 - config.adam_beta1**steps)
        return torch.tensor([1 - rate * config.weight_decay, slope, (1 - config.adam_beta2**steps) ** -0.5])

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter, grad: Tensor, state: _State, numbers: Tensor) -> None:
        config, formats = self._config, self._formats_on(parameter.device)
        update = _compiled_update() if self._fused else _update_rows
        constants = (config.adam_beta1, config.adam_beta2, config.adam_eps)
        weights_RC, grads_RC = _rows(parameter.data), _rows(grad.contiguous())
        for start, stop in _chunks(weights_RC):
            keys = state.noise.keys(config.seed, state.steps, start, stop) if formats[0].rounds_randomly else None
            held = _part(state.first, start, stop), _part(state.second, start, stop)
            update(weights_RC[start:stop], grads_RC[start:stop], formats, held, numbers, constants, keys)


def _update_rows(
    weight_RC: Tensor,
    grad_RC: Tensor,
    formats: tuple[MomentFormat, MomentFormat],
    held: tuple[Held, Held],
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


def _rows(tensor: Tensor) -> Tensor:
    """View a tensor as [R, C]."""
    return tensor.view(-1, tensor.shape[-1])


def _part(held: Held, start: int, stop: int) -> Held:
    return tuple(each[start:stop] for each in held)


def _chunks(rows_RC: Tensor) -> Iterator[tuple[int, int]]:
    """Iterate over the rows that are updated together."""
    most = CHUNK_ELEMENTS if rows_RC.is_cpu else DEVICE_CHUNK_ELEMENTS
    size = max(1, most // max(1, rows_RC.shape[1]))
    return ((start, min(start + size, len(rows_RC))) for start in range(0, len(rows_RC), size))
