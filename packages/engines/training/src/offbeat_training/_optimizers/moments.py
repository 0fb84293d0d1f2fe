"""Moments as an optimizer of ours holds them: in float32, bfloat16, or 8 bits with one scale for each block.

All arithmetic is in float32. What is held depends on the values and on where an element lies in its whole tensor, never
on how ranks have cut that tensor by rows, so that ranks hold what one process holds, bit for bit.

Shapes: R rows of one tensor, its last dimension but all others flattened; C columns; B blocks of a row.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat_device import StreamedMemory
from offbeat_training._tensor_files import Box

SMALL_NUMEL: Final = 4096
"""Whole tensors of fewer elements keep float32 moments, and so do vectors, whatever the format: there is nothing to
save, and norms and biases are sensitive. Source: bitsandbytes, `min_8bit_size` of bitsandbytes/optim/optimizer.py."""
BLOCK: Final = 256
"""Elements of a row that share a scale, at most. Source: bitsandbytes, bitsandbytes/optim/optimizer.py."""
CHUNK_ELEMENTS: Final = 2**18
"""Elements that are updated at a time on a processor: 1 MiB in float32, so that they stay in its cache."""
DEVICE_CHUNK_ELEMENTS: Final = 2**24
"""The same on a device with memory of its own: 64 MiB in float32, of which it needs several at a time."""
_EXPONENTS: Final = 7
"""Decades that the 8-bit code spans. Source: arXiv:2110.02861, section 2.1."""
_WORD: Final = 2**32 - 1

Word = TypeVar("Word", int, Tensor)
Held = tuple[Tensor, ...]
"""Tensors in which a format holds one of [R, C]; their rows are those of the tensor."""


class MomentFormat(Protocol):
    """Format in which a moment is held. `rounds_randomly`: `write` needs noise to be right in the mean."""

    rounds_randomly: bool

    def hold(self, num_rows: int, num_columns: int, device: torch.device) -> Held:
        """Return zeros [R, C]."""

    def read(self, held: Held) -> Tensor:
        """Return [R, C] float32, in memory of its own unless the format is float32."""

    def write(self, held: Held, values_RC: Tensor, noise_RC: Tensor | None = None) -> None:
        """Round float32 values to what is held, to the nearest; with noise [R, C], int64 in [0, 2**16), at random."""


class Float32Moments:
    """Moments as they are computed."""

    rounds_randomly = False

    def hold(self, num_rows: int, num_columns: int, device: torch.device) -> Held:
        return (torch.zeros(num_rows, num_columns, device=device),)

    def read(self, held: Held) -> Tensor:
        return held[0]

    def write(self, held: Held, values_RC: Tensor, noise_RC: Tensor | None = None) -> None:
        held[0].copy_(values_RC)


class Bfloat16Moments:
    """Moments in bfloat16, half the memory.

    A moment moves by a share 1 - beta of what it is off. Below 2**-9, which is half a bit of bfloat16, the nearest
    number is always the old one, and with beta2 = 0.999 a second moment would never fall. Rounded at random, up as
    often as needed for the mean to be right, it falls as it should.
    """

    rounds_randomly = True

    def hold(self, num_rows: int, num_columns: int, device: torch.device) -> Held:
        return (torch.zeros(num_rows, num_columns, dtype=torch.bfloat16, device=device),)

    def read(self, held: Held) -> Tensor:
        return held[0].float()

    def write(self, held: Held, values_RC: Tensor, noise_RC: Tensor | None = None) -> None:
        if noise_RC is not None:  # the upper half of the bits is a bfloat16: add to the lower half, and cut it off
            bits_RC = (values_RC.view(torch.int32) + noise_RC.to(torch.int32)) & -(2**16)
            values_RC = bits_RC.view(torch.float32)
        held[0].copy_(values_RC)


class Int8Moments:
    """Moments in 8 bits, a quarter of the memory, with one float32 scale, the largest magnitude, for a block of a row.

    The code is the dynamic tree of the paper: seven decades below the scale, of which each larger one has twice as many
    numbers. Two changes. Scales of both signs have a code, in place of that of the smallest negative number, so that
    what is read and written again stays as it is, and checkpoints in float32 are exact. And a second moment that is
    not 0 is not rounded to 0, by which a step divides: it would have no bound.

    Source: Dettmers et al., arXiv:2110.02861, sections 2 and 2.1. Zeros of second moments: arXiv:2309.01507, section 3.

    Args:
        device: of the moments.
        signed: they may be negative, as first moments are.
    """

    rounds_randomly = False

    def __init__(self, device: torch.device, *, signed: bool) -> None:
        codes = dynamic_codes(signed=signed)
        self._codes = codes.to(device)
        edges = (codes[1:] + codes[:-1]) / 2
        if not signed:
            edges[0] = 0.0  # only 0 itself is 0
        self._edges = edges.to(device)

    def hold(self, num_rows: int, num_columns: int, device: torch.device) -> Held:
        codes_RC = torch.zeros(num_rows, num_columns, dtype=torch.uint8, device=device)
        return codes_RC, torch.zeros(num_rows, -(-num_columns // BLOCK), device=device)

    def read(self, held: Held) -> Tensor:
        codes_RC, scales_RB = held
        values_RC = functional.embedding(codes_RC.int(), self._codes[:, None])[..., 0]
        return values_RC * _spread(scales_RB, codes_RC.shape[1])

    def write(self, held: Held, values_RC: Tensor, noise_RC: Tensor | None = None) -> None:
        codes_RC, scales_RB = held
        num_columns = values_RC.shape[1]
        padded = functional.pad(values_RC.abs(), (0, scales_RB.shape[1] * BLOCK - num_columns))
        scales_RB.copy_(padded.view(*scales_RB.shape, BLOCK).amax(2))
        divisor_RC = _spread(scales_RB.where(scales_RB > 0, 1.0), num_columns)
        codes_RC.copy_(torch.bucketize(values_RC / divisor_RC, self._edges, out_int32=True))


def _spread(scales_RB: Tensor, num_columns: int) -> Tensor:
    """Return [R, C] of what each element's block has."""
    return scales_RB[:, :, None].expand(-1, -1, BLOCK).flatten(1)[:, :num_columns]


def dynamic_codes(*, signed: bool) -> Tensor:
    """Return the [256] numbers in [-1, 1] or [0, 1] that 8 bits stand for, ascending."""
    found = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        edges = torch.linspace(0.1, 1.0, 2 ** (exponent + (0 if signed else 1)) + 1, dtype=torch.float64)
        middles = 10.0 ** (exponent + 1 - _EXPONENTS) * (edges[1:] + edges[:-1]) / 2
        found += middles.tolist() + ((-middles).tolist() if signed else [])
    if signed:
        found[found.index(max(number for number in found if number < 0))] = -1.0
    return torch.tensor(sorted(found), dtype=torch.float32)


def moment_formats(name: str, device: torch.device) -> tuple[MomentFormat, MomentFormat]:
    """Return the formats of the first and the second moment; `name` is float32, bfloat16 or int8."""
    if name == "int8":
        return Int8Moments(device, signed=True), Int8Moments(device, signed=False)
    return (Bfloat16Moments(), Bfloat16Moments()) if name == "bfloat16" else (Float32Moments(), Float32Moments())


def moment_bytes(name: str) -> float:
    """Bytes of one moment of one element, in long rows."""
    return {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0 + 4.0 / BLOCK}[name]


def is_small(shape: Sequence[int]) -> bool:
    """Return whether a whole tensor of this shape keeps float32 moments."""
    return len(shape) < 2 or torch.Size(shape).numel() < SMALL_NUMEL


class Noise:
    """Random numbers for rounding a part of a tensor: a hash of the element's place in the whole, and of the step.

    They need no state: a run that is resumed draws the same, and so do ranks for their parts.

    Args:
        name: of the tensor.
        shape: of the whole.
        box: this rank's part.
        device: of the part.
    """

    def __init__(self, name: str, shape: Sequence[int], box: Box, device: torch.device) -> None:
        self._salt = crc32(name.encode())
        rows = torch.zeros((), dtype=torch.int64, device=device)
        for size, (start, stop) in zip(shape[:-1], box[:-1], strict=True):
            rows = rows[..., None] * size + torch.arange(start, stop, device=device)
        self._rows_R1, self._columns_C = rows.reshape(-1, 1), torch.arange(*box[-1], device=device)

    def keys(self, seed: int, step: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return what `draw_noise` takes for some rows of the part: [R, 1] and [C] int64."""
        key = hash_word(hash_word(self._salt ^ (seed & _WORD)) + step & _WORD)
        return hash_word(self._rows_R1[start:stop] + key & _WORD), self._columns_C


def draw_noise(rows_R1: Tensor, columns_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return two of [R, C] int64 in [0, 2**16), from `Noise.keys`."""
    words_RC = hash_word(rows_R1 ^ columns_C)
    return words_RC & 0xFFFF, words_RC >> 16


def hash_word(word: Word) -> Word:
    """Scatter 32 bits over 32. Source: Mueller, stackoverflow.com/a/12996028; its factor keeps products in int64."""
    for _ in range(2):
        word = ((word >> 16) ^ word) * 0x45D9F3B & _WORD
    return (word >> 16) ^ word


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
        stream: brings moments to the device where they are used; None: there they are.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        places: Mapping[str, tuple[Sequence[int], Box]],
        names: Sequence[str],
        dtype: str,
        stream: StreamedMemory | None = None,
    ) -> None:
        self._stream = stream
        self.parameters, self.names = dict(parameters), tuple(names)
        self._places, self._dtype = places, dtype
        self._states: dict[str, MomentState] = {}
        self._formats: dict[torch.device, tuple[MomentFormat, ...]] = {}

    def with_gradients(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over names and parameters that have a gradient, each while its moments can be used."""
        names = [name for name, parameter in self.parameters.items() if parameter.grad is not None]
        return ((name, self.parameters[name]) for name in self.through(names))

    def through(self, names: Iterable[str]) -> Iterator[str]:
        """Iterate over names, each while its moments, if there are any, can be used."""
        return self._stream.through(names, self._memory_of) if self._stream else iter(names)

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
        for _ in self.through([name]):
            for values, form, held in zip(found.values(), state.formats, state.moments, strict=True):
                rows = rows_of(values)
                for start, stop in chunks(rows):
                    rows[start:stop] = form.read(tuple(each[start:stop] for each in held))
        return found

    @torch.no_grad()
    def load(self, name: str, moments: Mapping[str, Tensor], steps: float) -> None:
        """Hold the moments of a parameter: what `read` gave as it was, other numbers as the nearest."""
        for _ in self.through([name]):
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
        return (each for name in self._states for each in self._memory_of(name))

    def _memory_of(self, name: str) -> Iterator[Tensor]:
        state = self._states.get(name)
        return (each for held in (state.moments if state else ()) for each in held)

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
