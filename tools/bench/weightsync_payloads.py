"""Payloads of a sync in place of all weights: a LoRA adapter, or the elements that have changed."""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from bench.weightsync_floors import SIZES, llama_shapes
from torch import Tensor

from offbeat_weightsync._changes import encode_run

RANK: Final = 16
CHANGED_SHARE: Final = 0.03
"""Share of the elements that a step at a learning rate of 1e-6 changes: weight_changes.py saw 2.9 and 4.2 %."""
RUN: Final = 1 << 18


def adapter_tensors(size: str) -> dict[str, Tensor]:
    """Make both matrices of each linear layer of the blocks, bfloat16, by PEFT's names."""
    found = {}
    for name, shape in llama_shapes(SIZES[size]):
        if name.endswith("_proj.weight"):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{stem}.lora_A.weight"] = torch.full((RANK, shape[1]), 0.5, dtype=torch.bfloat16)
            found[f"{stem}.lora_B.weight"] = torch.full((shape[0], RANK), 0.5, dtype=torch.bfloat16)
    return found


def flips(tensors: Mapping[str, Tensor]) -> Callable[[], None]:
    """Return a function that changes the lowest bit of some elements of each tensor, the same ones at each call."""
    draws = torch.Generator().manual_seed(0)
    places = {name: torch.rand(each.numel(), generator=draws) < CHANGED_SHARE for name, each in tensors.items()}

    def flip() -> None:
        for name, tensor in tensors.items():
            tensor.view(torch.int16).view(-1).bitwise_xor_(places[name].short())

    return flip


def sent_bytes(tensors: Mapping[str, Tensor], flip: Callable[[], None]) -> int:
    """Count the bytes that describe one more change."""
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    flip()
    total = 0
    for name, tensor in tensors.items():
        old, new = (each.view(torch.int16).view(-1).numpy().view("u2") for each in (before[name], tensor))
        total += sum(len(encode_run(old[i : i + RUN], new[i : i + RUN]).data) for i in range(0, len(new), RUN))
    return total
