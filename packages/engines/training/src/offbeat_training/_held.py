"""Moments of a rank's parameters as an optimizer of ours holds them, and how they go into checkpoints and come back.

Shapes: R rows of one parameter, its last dimension but all others flattened; C columns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from offbeat_training._moments import Held, MomentFormat, Noise, moment_formats
from offbeat_training._tensor_files import Box

CHUNK_ELEMENTS: Final = 2**18
"""Elements that are updated at a time on a processor: 1 MiB in float32, so that they stay in its cache."""
DEVICE_CHUNK_ELEMENTS: Final = 2**24
"""The same on a device with memory of its own: 64 MiB in float32, of which it needs several at a time."""


@dataclass(eq=False)
class MomentState:
    """Moments of one parameter, with the format of each, and the updates that they have had."""

    moments: tuple[Held, ...]
    formats: tuple[MomentFormat, ...]
    noise: Noise
    steps: int = 0

    def part(self, start: int, stop: int) -> tuple[Held, ...]:
        """Return some rows of each moment."""
        return tuple(tuple(each[start:stop] for each in held) for held in self.moments)


class HeldMoments:
    """Moments of parameters, each from its first gradient on.

    Args:
        parameters: by name; float32.
        places: shape of the whole of each, and the box of it that the parameter is.
        names: of the moments of each parameter.
        dtype: float32, bfloat16 or int8.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        places: Mapping[str, tuple[Sequence[int], Box]],
        names: Sequence[str],
        dtype: str,
    ) -> None:
        self.parameters, self.names = dict(parameters), tuple(names)
        self._places, self._dtype = places, dtype
        self._states: dict[str, MomentState] = {}
        self._formats: dict[torch.device, tuple[MomentFormat, ...]] = {}

    def of(self, name: str) -> MomentState:
        """Return the moments of a parameter; zeros at first."""
        return self._states.get(name) or self._begin(name)

    def steps_of(self, name: str) -> float | None:
        """Return the updates that a parameter has had; None where it has no moments."""
        state = self._states.get(name)
        return None if state is None else float(state.steps)

    @torch.no_grad()
    def read(self, name: str) -> dict[str, Tensor]:
        """Return the moments of a parameter, in its shape, float32."""
        parameter, state = self.parameters[name], self._states[name]
        found = {each: torch.empty(parameter.shape, device=parameter.device) for each in self.names}
        for values, form, held in zip(found.values(), state.formats, state.moments, strict=True):
            rows = rows_of(values)
            for start, stop in chunks(rows):
                rows[start:stop] = form.read(tuple(each[start:stop] for each in held))
        return found

    @torch.no_grad()
    def load(self, name: str, moments: Mapping[str, Tensor], steps: float) -> None:
        """Hold the moments of a parameter: what `read` gave as it was, other numbers as the nearest."""
        state = self._begin(name)
        state.steps = int(steps)
        for each, form, held in zip(self.names, state.formats, state.moments, strict=True):
            rows = rows_of(moments[each].contiguous())
            for start, stop in chunks(rows):
                form.write(tuple(part[start:stop] for part in held), rows[start:stop])

    def clear(self) -> None:
        """Forget all moments."""
        self._states.clear()

    def memory(self) -> Iterator[Tensor]:
        """Iterate over the memory of all moments."""
        return (each for state in self._states.values() for held in state.moments for each in held)

    def _begin(self, name: str) -> MomentState:
        parameter = self.parameters[name]
        device, (num_rows, num_columns) = parameter.device, rows_of(parameter).shape
        if device not in self._formats:
            self._formats[device] = moment_formats(self._dtype, device)[: len(self.names)]
        formats = self._formats[device]
        moments = tuple(form.hold(num_rows, num_columns, device) for form in formats)
        self._states[name] = MomentState(moments, formats, Noise(name, *self._places[name], device))
        return self._states[name]


def rows_of(tensor: Tensor) -> Tensor:
    """View a tensor as [R, C]."""
    return tensor.view(-1, tensor.shape[-1])


def chunks(rows_RC: Tensor) -> Iterator[tuple[int, int]]:
    """Iterate over the rows that are updated together."""
    most = CHUNK_ELEMENTS if rows_RC.is_cpu else DEVICE_CHUNK_ELEMENTS
    size = max(1, most // max(1, rows_RC.shape[1]))
    return ((start, min(start + size, len(rows_RC))) for start in range(0, len(rows_RC), size))
