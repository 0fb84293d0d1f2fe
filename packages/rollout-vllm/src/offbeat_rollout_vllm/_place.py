"""Where one of the trainer's tensors lies within the engine's."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this rank's part of one of the trainer's tensors lies.

    Args:
        module: of the engine.
        leaf: its parameter, such as "weight" or "bias".
        expert: which of the stack that the parameter is, on this rank; None: it is no stack of experts.
        first_row: within this rank's parameter.
        shape: of this rank's part.
        dim: along which ranks have different parts.
        pieces: (start, size) of each run of this rank's part within the whole, along `dim` and in order: one, but of a
            tensor that the trainer holds fused too (a vision tower's qkv) one of each matrix in it, and none of an
            expert that other ranks hold.
    """

    module: nn.Module
    leaf: str
    expert: int | None = None
    first_row: int
    shape: tuple[int, ...]
    dim: int
    pieces: tuple[tuple[int, int], ...]
