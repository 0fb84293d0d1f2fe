"""Syncing a LoRA adapter alone: its matrices instead of the model's. Pure.

Names are those of Hugging Face PEFT, "….q_proj.lora_A.weight" [rank, in] and "….q_proj.lora_B.weight" [out, rank].
Source: https://github.com/huggingface/peft, peft/tuners/lora/layer.py; W + (alpha / rank) B A, arXiv:2106.09685.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from torch import Tensor

from offbeat_types import WeightSyncError

DOWN: Final = ".lora_A."
UP: Final = ".lora_B."
PEFT_PREFIX: Final = "base_model.model."


def select_adapter(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """The adapter's tensors among the trainer's, in order: what to plan and send.

    Raises:
        WeightSyncError: there is none, or one lacks its partner or does not fit it.
    """
    found = [(name, tensor) for name, tensor in tensors if DOWN in name or UP in name]
    if not found:
        raise WeightSyncError("a LoRA-only sync needs tensors named lora_A and lora_B: the trainer has none")
    by_name = dict(found)
    for name, tensor in found:
        other = name.replace(DOWN, UP) if DOWN in name else name.replace(UP, DOWN)
        if other not in by_name:
            raise WeightSyncError(f"{name} needs {other}, which the trainer does not have")
        down, up = (tensor, by_name[other]) if DOWN in name else (by_name[other], tensor)
        if down.shape[0] != up.shape[1]:
            raise WeightSyncError(f"{name}: rank {down.shape[0]} of lora_A is not rank {up.shape[1]} of lora_B")
    return found


def merge_adapter(
    base: Callable[[str], Tensor], adapter: Iterable[tuple[str, Tensor]], scale: float
) -> Iterator[tuple[str, Tensor]]:
    """The merged weights of the layers that an adapter changes, for an engine that cannot hold adapters.

    Always from the base weights, never from the last merge: rounding would add up.

    Args:
        base: name -> [out, in], the weight without the adapter.
        adapter: as `select_adapter` gives it.
        scale: alpha / rank.

    Yields:
        (name, base + scale B A), in the base's dtype, computed in float32.
    """
    by_name = dict(adapter)
    for name, down in by_name.items():
        if DOWN in name:
            target = name.replace(DOWN, ".").removeprefix(PEFT_PREFIX)
            weight = base(target)
            merged = weight.float() + scale * (by_name[name.replace(DOWN, UP)].float() @ down.float())
            yield target, merged.to(weight.dtype)
