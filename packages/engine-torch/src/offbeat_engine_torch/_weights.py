"""The policy's weights under Hugging Face names, one whole tensor after another."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offbeat_engine_torch._model import CausalModel
from offbeat_engine_torch._pieces import Piece
from offbeat_engine_torch._ranks import Ranks
from offbeat_training import lora_layers
from offbeat_types import TensorSpec

ADAPTERS = (".lora_A", ".lora_B")


def iterate_weights(model: CausalModel, pieces: Sequence[Piece], ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) in the model's own order; a tied head once, adapters merged.

    Every rank iterates to the end: each step gathers one tensor from all.
    """
    by_name = {piece.name: piece for piece in pieces}
    scales = {f"{name}.weight": layer.scale for name, layer in lora_layers(model.whole).items()}
    for name, piece in by_name.items():
        if name.endswith(ADAPTERS):
            continue
        tensor = ranks.gather(piece)
        if name in scales:
            layer = name.removesuffix(".weight")
            low_A, low_B = (ranks.gather(by_name[layer + side]) for side in ADAPTERS)
            tensor = torch.addmm(tensor, low_B, low_A, alpha=scales[name])
        yield name, tensor


def weight_specs(pieces: Sequence[Piece]) -> list[TensorSpec]:
    """Names, shapes and formats of what `iterate_weights` gives."""
    return [
        TensorSpec(piece.name, str(piece.local.dtype).removeprefix("torch."), piece.shape)
        for piece in pieces
        if not piece.name.endswith(ADAPTERS)
    ]
