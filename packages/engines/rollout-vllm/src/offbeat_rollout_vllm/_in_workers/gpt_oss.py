"""Runs in vLLM's workers: the tensors that vLLM's gpt-oss does not load a second time, and where they lie.

Of a layer's experts trainer and engine both hold whole stacks. The trainer has `gate_up_proj` [experts, in, 2 x width],
where the columns of gate and up alternate, and `down_proj` [experts, width, out], each with a bias. vLLM has the same
with rows and columns swapped. Of the sinks [heads] each tensor-parallel rank has those of its heads.

Expected: the model loads them in a reload as it does at the start. Happens (vllm 0.32.0): gpt_oss.py copies them into
parameters that are on the meta device during a reload, where they vanish without an error. So they go through the
loaders of the parameters, as experts of other families do. Can go when vLLM's own loading does that.

Source: vllm 0.32.0, vllm/model_executor/models/gpt_oss.py (_load_weights_other) and
vllm/model_executor/layers/fused_moe/routed_experts.py (weight_loader).
"""

from typing import Any, Final

import torch
from torch import Tensor

WEIGHTS: Final = ("w13_weight", "w2_weight")
BIASES: Final = ("w13_bias", "w2_bias")
STACKS: Final = WEIGHTS + BIASES
SINKS: Final = "sinks"


def holds_stack(module: Any, leaf: str) -> bool:
    """Return whether this is such a stack of a layer's experts."""
    return leaf in STACKS and hasattr(module, "routed_experts")


def holds_sinks(module: Any, leaf: str) -> bool:
    """Return whether these are the sinks of a layer."""
    return leaf == SINKS and hasattr(module, "qkv_proj")


def sinks_part(layer: Any) -> tuple[int, int]:
    """Return (start, size) of this rank's sinks."""
    size = len(layer.sinks)
    return layer.qkv_proj.tp_rank * size, size


def load_sinks(layer: Any, whole: Tensor) -> None:
    """Hand this rank's sinks to the loader of vLLM's parameter."""
    layer.sinks.weight_loader(layer.sinks, whole.narrow(0, *sinks_part(layer)))


def stack_part(layer: Any, leaf: str) -> tuple[tuple[int, ...], int, tuple[tuple[int, int], ...]]:
    """Return the shape, the dimension and the runs of this rank's part of a stack: see `TensorLocation`."""
    config, experts = layer.moe_config, layer.global_num_experts
    width, hidden = config.intermediate_size_per_partition_unpadded, config.hidden_dim_unpadded
    rows = 2 * width
    match leaf:
        case "w13_weight":
            return (experts, hidden, rows), 2, ((config.tp_rank * rows, rows),)
        case "w2_weight":
            return (experts, width, hidden), 1, ((config.tp_rank * width, width),)
        case "w13_bias":
            return (experts, rows), 1, ((config.tp_rank * rows, rows),)
    # Ranks add up what they compute, so the first alone adds the bias.
    return ((experts, hidden), 0, ((0, experts),)) if config.tp_rank == 0 else ((0, hidden), 0, ())


def load_stack(layer: Any, leaf: str, whole: Tensor) -> None:
    """Hand the trainer's tensor to the loader of vLLM's parameter, one matrix of one expert at a time.

    The loader takes gate and up apart, and cuts this rank's rows out of each; they alternate here, and a rank has a run
    of them. So it gets the first half of the runs of all ranks as one, and the second half as the other.
    """
    config, parameter = layer.moe_config, getattr(layer, leaf)
    rows = whole.transpose(1, 2) if leaf in WEIGHTS else whole
    if leaf.startswith("w13"):
        runs = rows.unflatten(1, (config.moe_parallel_config.tp_size, 2, -1))  # type: ignore[no-untyped-call]
        halves = {"w1": runs[:, :, 0].flatten(1, 2), "w3": runs[:, :, 1].flatten(1, 2)}
    else:
        halves = {"w2": torch.zeros_like(rows) if leaf == "w2_bias" and config.tp_rank else rows}
    for shard, matrices in halves.items():
        for expert, matrix in enumerate(matrices):
            parameter.weight_loader(parameter, matrix, weight_name=leaf, shard_id=shard, expert_id=expert)


def read_bias(held: Tensor, leaf: str, shape: tuple[int, ...]) -> Tensor:
    """Return this rank's part of the biases [experts, rows]; a kernel may have padded the halves of gate and up."""
    if leaf == "w2_bias":
        return held[: shape[0], : shape[1]]
    return torch.cat([half[:, : shape[1] // 2] for half in held.chunk(2, 1)], 1)
