"""Runs in vLLM's workers: where the trainer's tensors lie within the engine's, and what is there.

The engine holds fused matrices (qkv_proj, gate_up_proj), of tensor-parallel ranks each a part, and on a CPU it holds
most of them only in a packed layout that nothing but its product can read. What is held is therefore read by what
serves: a packed matrix is multiplied with the identity.

Source: vllm 0.32.0, vllm/model_executor/layers/linear.py and vocab_parallel_embedding.py (parts, padding),
vllm/model_executor/layers/utils.py (dispatch_cpu_unquantized_gemm), vllm/model_executor/models/utils.py
(WeightsMapper).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from offbeat_rollout_vllm._held_experts import EXPERT, place_expert, read_expert
from offbeat_rollout_vllm._place import Place

IDENTITY_ROWS: Final = 512
SHARDS: Final = {"q": 0, "k": 1, "v": 2}
BLOCK: Final = 128
SCALES: Final = "weight_scale_inv"
"""What vLLM calls the scales of a weight of FP8 blocks."""


class HeldWeights:
    """The weights of one worker's model, by the trainer's names.

    Args:
        model: vLLM's.
        dtype: number format of the weights.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self._fusions = {part: (fused, index) for fused, parts in packed.items() for index, part in enumerate(parts)}
        self._unpacked: tuple[nn.Module, Tensor] | None = None

    def find(self, name: str) -> Place:
        """Where the trainer's tensor `name` lies.

        Raises:
            KeyError: the model has no such module, or one of a kind that is not known here.
        """
        mapped, part = self._map(name)
        path, _, leaf = mapped.rpartition(".")
        module = _submodule(self._model, path)
        if module is None and (found := EXPERT.fullmatch(path)):
            experts = _submodule(self._model, found["experts"])
            if hasattr(experts, "routed_experts"):
                return place_expert(experts, name, int(found["number"]), found["matrix"], leaf)
        if module is None:
            parent, _, last = path.rpartition(".")
            fused, part = self._fusions.get(last, (last, None))
            module = _submodule(self._model, f"{parent}.{fused}".removeprefix("."))
        if module is None or getattr(module, leaf, None) is None:
            raise KeyError(f"vLLM's model has nothing for {name} (looked for {mapped})")
        if is_block_held(module):
            check_blocks(module, name)
            if leaf == SCALES:
                return in_blocks(_place(module, "weight", part))
        return _place(module, leaf, part)

    def read(self, name: str) -> Tensor:
        """Return this rank's part of the trainer's tensor `name`, as it serves."""
        place = self.find(name)
        if place.expert is not None:
            return read_expert(place).to(self._dtype)
        held = self._parameter(place.module, place.leaf)
        part = held[place.first_row : place.first_row + place.shape[0]][tuple(map(slice, place.shape))]
        return part if is_block_held(place.module) else part.to(self._dtype)

    def forget(self) -> None:
        """Drop what was unpacked last."""
        self._unpacked = None

    def _map(self, name: str) -> tuple[str, int | None]:
        """Name of the engine's tensor, and which part of it, where the model's own map says so."""
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        if mapper is None:
            return name, None
        mapped = list(mapper.apply([(name, torch.empty(0))]))
        if len(mapped) != 1:
            raise KeyError(f"vLLM's model has {len(mapped)} tensors for {name}: this package reads back exactly one")
        renamed, marker = mapped[0]
        shard: Any = getattr(marker, "shard_id", None)
        return renamed, SHARDS.get(shard, shard)

    def _parameter(self, module: nn.Module, leaf: str) -> Tensor:
        if leaf != "weight" or not is_packed(module):
            held: Tensor = getattr(module, leaf)
            return held.detach()
        if self._unpacked is None or self._unpacked[0] is not module:
            self._unpacked = module, unpack(module, self._dtype)
        return self._unpacked[1]


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    """The layer itself, where vLLM has put one with LoRA adapters around it."""
    try:
        found = model.get_submodule(path)
    except AttributeError:
        return None
    inner: nn.Module = getattr(found, "base_layer", found)
    return inner


def is_block_held(module: nn.Module) -> bool:
    """Whether its weight was made for FP8 blocks; its bias, if it has one, is in the engine's format all the same."""
    return getattr(module, "weight_block_size", None) is not None


def check_blocks(module: nn.Module, name: str) -> None:
    """Refuse to read what a kernel has packed, whose blocks are not what came any more.

    Raises:
        KeyError: it has.
    """
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


def in_blocks(place: Place) -> Place:
    """Where the scales lie of what lies at `place`. vLLM has seen to it that parts begin with a block."""
    return replace(
        place,
        leaf=SCALES,
        first_row=place.first_row // BLOCK,
        shape=tuple(-(-size // BLOCK) for size in place.shape),
        pieces=tuple((start // BLOCK, -(-size // BLOCK)) for start, size in place.pieces),
    )


def is_packed(module: nn.Module) -> bool:
    """Whether products of this module use a packed copy of its weight; an input embedding makes no products."""
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


def _place(module: nn.Module, leaf: str, part: int | None) -> Place:
    """Where this rank's part of what the trainer calls one tensor lies."""
    layer: Any = module
    if hasattr(layer, "shard_indices"):
        indices = layer.shard_indices
        first, last = indices.org_vocab_start_index, indices.org_vocab_end_index
        columns = (layer.embedding_dim,) if leaf == "weight" else ()
        shape, pieces = (last - first, *columns), ((first, last - first),)
        return Place(module=module, leaf=leaf, first_row=0, shape=shape, dim=0, pieces=pieces)
    if hasattr(layer, "quant_method") and hasattr(layer, "output_size"):
        return _linear_place(layer, leaf, part)
    held = tuple(getattr(layer, leaf).shape)
    return Place(module=module, leaf=leaf, first_row=0, shape=held, dim=0, pieces=((0, (*held, 1)[0]),))


def _linear_place(layer: Any, leaf: str, part: int | None) -> Place:
    num_in, num_out = _in_and_out(layer)
    columns = (num_in,) if leaf == "weight" else ()
    rank = getattr(layer, "tp_rank", 0)
    if num_in != layer.input_size:  # row parallel: ranks have different columns, and all of the bias
        piece = (rank * num_in, num_in) if columns else (0, num_out)
        dim = 1 if columns else 0
        return Place(module=layer, leaf=leaf, first_row=0, shape=(num_out, *columns), dim=dim, pieces=(piece,))
    first_row = 0
    pieces: tuple[tuple[int, int], ...] = ((rank * num_out if num_out != layer.output_size else 0, num_out),)
    if hasattr(layer, "output_sizes"):
        sizes, shares = _part_sizes(layer)
        pieces = tuple(_pieces(layer.tp_size, rank, sizes, shares))
        if part is not None:
            first_row, pieces = sum(sizes[:part]), ((rank // shares[part] * sizes[part], sizes[part]),)
    shape = (sum(size for _, size in pieces), *columns)
    return Place(module=layer, leaf=leaf, first_row=first_row, shape=shape, dim=0, pieces=pieces)


def _pieces(num_ranks: int, rank: int, sizes: list[int], shares: list[int]) -> Iterator[tuple[int, int]]:
    """(start, size) of this rank's rows of each matrix, where the trainer's tensor holds them one after the other."""
    first = 0
    for size, share in zip(sizes, shares, strict=True):
        yield first + rank // share * size, size
        first += num_ranks // share * size


def _part_sizes(layer: Any) -> tuple[list[int], list[int]]:
    """Rows of each part on this rank, and how many ranks hold the same rows of it."""
    if hasattr(layer, "num_kv_head_replicas"):
        value_size = getattr(layer, "v_head_size", layer.head_size)
        keys = layer.num_kv_heads * layer.head_size
        same = layer.num_kv_head_replicas
        return [layer.num_heads * layer.head_size, keys, layer.num_kv_heads * value_size], [1, same, same]
    sizes = [size // layer.tp_size for size in layer.output_sizes]
    return sizes, [1] * len(sizes)
