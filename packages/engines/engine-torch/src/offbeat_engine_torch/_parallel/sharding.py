"""Cuts a model over the mesh: rows over dp and cp (FSDP2), heads and feed-forward columns over tp, experts over ep.

Tensor parallelism follows the plan that the model family declares to transformers (`base_model_tp_plan`), and cuts
the rows of embedding and vocabulary head where they divide. Norms are the same on all tp ranks.
Source: FSDP2 (torch.distributed.fsdp.fully_shard), Megatron-LM (arXiv:1909.08053) for columns and rows.

Weights cut over tp are DTensors, so that FSDP2 and checkpoints know which part is here; the arithmetic is on plain
local tensors. (torch's own `ColwiseParallel` works out the placements anew for every number of tokens: 13 ms an
operation, and packs are never of the same length twice.)
"""

import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from offbeat_core import ConfigError, ModelError
from offbeat_engine_torch._formats import stays_in_float32
from offbeat_engine_torch._layers.exchange import TensorParallel, here
from offbeat_engine_torch._model import CausalModel, plain_name
from offbeat_engine_torch._parallel.stacks import cut_stacks, find_stacks
from offbeat_mesh import Mesh
from offbeat_training import LoraLinear, VocabularyPart


class ColumnLinear(nn.Linear):
    """A linear layer whose outputs are split over the ranks. Made by `cut_linear`."""

    tp: TensorParallel

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out / tp]."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):  # here and not by the product, so that ranks add up gradients in its format
            x = x.to(torch.get_autocast_dtype(kind))
        return functional.linear(self.tp.enter(x), here(self.weight), here(self.bias))


class RowLinear(nn.Linear):
    """A linear layer whose inputs are split over the ranks. Made by `cut_linear`."""

    tp: TensorParallel

    def forward(self, x: Tensor) -> Tensor:
        """[..., in / tp] to [..., out]."""
        # The bias after the sum: before it, it would count once for each rank.
        whole, bias = self.tp.leave(functional.linear(x, here(self.weight))), here(self.bias)
        return whole if bias is None else whole + bias


class RowEmbedding(nn.Embedding):
    """An embedding whose rows are split over the ranks; other ranks' count as 0 here. Made by `cut_embedding`."""

    tp: TensorParallel

    def forward(self, ids: Tensor) -> Tensor:
        """[...] int64 to [..., E]."""
        weight_VE = here(self.weight)
        first = self.tp.rank * len(weight_VE)
        row = ids - first
        held = (row >= 0) & (row < len(weight_VE))
        # The row without gradient, if it is one of this rank's.
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < len(weight_VE):
            padding = None
        found = functional.embedding(row.where(held, 0), weight_VE, padding)
        return self.tp.leave(found.where(held[..., None], 0.0))


def cut_linear(layer: Any, tp: TensorParallel, mesh: DeviceMesh, *, columns: bool) -> None:
    """Turn a layer into a `ColumnLinear` (outputs cut) or a `RowLinear` (inputs cut), in place."""
    if columns:
        cut_rows(layer, mesh)
        layer.__class__ = ColumnLinear
    else:
        _cut(layer, "weight", 1, mesh)
        layer.__class__ = RowLinear
    layer.tp = tp


def cut_embedding(layer: Any, tp: TensorParallel, mesh: DeviceMesh) -> None:
    """Turn an embedding into a `RowEmbedding`, in place."""
    cut_rows(layer, mesh)
    layer.__class__ = RowEmbedding
    layer.tp = tp


def cut_rows(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the first dimension of all its own parameters, which leaves its arithmetic to others."""
    for name, _ in list(layer.named_parameters(recurse=False)):
        _cut(layer, name, 0, mesh)


def _cut(layer: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> None:
    parameter = getattr(layer, name)
    # src_data_rank None: each rank takes its part of what it has, and nothing is sent.
    cut = distribute_tensor(parameter, mesh, [Shard(dim)], src_data_rank=None)
    layer.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


COLUMNS, ROWS, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
EMBEDDING = "embedding_rowwise"  # some versions of transformers add it for tied models (5.19), others do not (5.23)


def shard_model(
    model: CausalModel,
    mesh: Mesh,
    device: torch.device,
    autocast: torch.dtype | None = None,
    *,
    rounds_vocabulary: bool = False,
    reduced: torch.dtype = torch.float32,
) -> None:
    """Give an outlined model memory on `device` for what this rank holds of it. The values are left open.

    Args:
        model: from `outline_model`, with adapters where they are wanted.
        mesh: of all ranks, with replicas of the model along pp.
        device: of this rank.
        autocast: format in which the layers compute, and in which their weights are gathered, but for those that stay
            in float32; None for float32. What the layers hand on is in float32.
        rounds_vocabulary: gather embedding and head in that format too, unless the family keeps one in float32.
        reduced: format in which the gradients of layers are added up; those of all else are added up in float32.
    """
    layers, replicas = find_layers(model), ("pp",) if mesh.axes["pp"] > 1 else ()
    meshes = mesh.device_mesh_over(*((axis,) for axis in replicas), ("dp", "cp"), ("tp",))
    dp_mesh = meshes[(*replicas, "dp_cp")]  # with replicas of two dims, gathered along the last (HSDP)
    if not layers:
        raise ModelError(f"{type(model.whole).__name__} names no decoder layers: train it on one rank")
    if mesh.axes["tp"] > 1:
        tp = TensorParallel.of(mesh, "tp")
        _cut_layers(model, tp, meshes["tp"])
        _cut_vocabulary(model, tp, meshes["tp"])
    stacks, edp_mesh = list[nn.Module](), dp_mesh
    if mesh.axes["ep"] > 1:
        stacks, edp_mesh = find_stacks(model.whole), cut_stacks(model.whole, mesh)
    within_layers = {id(module) for layer in layers for module in layer.modules()}
    kept = kept_in_float32(model) if autocast else set()
    for layer in layers:
        layer.to_empty(device=device)
        for module in kept.intersection(layer.modules()):
            _fully_shard(module, dp_mesh)  # before its layer, which takes what is left
        for stack in set(stacks).intersection(layer.modules()):
            _fully_shard(stack, edp_mesh, autocast, reduced, alone=True)
        _fully_shard(layer, dp_mesh, autocast, reduced)
    for module in model.modules():
        if id(module) not in within_layers:
            module.to_empty(device=device, recurse=False)
    # `to_empty` has made each module a parameter of its own.
    model.whole.tie_weights()
    _shard_vocabulary(model, dp_mesh, autocast if rounds_vocabulary else None, kept)
    fill_buffers(model.whole)


def _shard_vocabulary(model: CausalModel, mesh: DeviceMesh, autocast: torch.dtype | None, kept: set[nn.Module]) -> None:
    """Shard embedding and head, and with the head what no layer holds, such as the last norm."""
    embedding = model.whole.get_input_embeddings()
    if autocast and not kept & {embedding, model.head}:
        # In float32, as what no layer holds is without it: the tower's ends, and what the family keeps.
        tower = model.vision.tower if model.vision else []
        outside = [module for module in (*kept, *tower) if not _is_sharded(module)]
        for module in outside:
            _fully_shard(module, mesh)
        embedding.register_forward_hook(lambda _, __, rows: rows.float())
    else:
        autocast = None
    if embedding.weight is not model.head.weight:
        # Gathered when it is called, and not together with the head.
        _fully_shard(embedding, mesh, autocast)
    _fully_shard(model, mesh, autocast)


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def kept_in_float32(model: CausalModel) -> set[nn.Module]:
    """Modules with parameters that stay in float32, such as the routers of Ernie 4.5."""
    stays = stays_in_float32(model.whole)
    return {
        module
        for path, module in model.whole.named_modules()
        if any(stays(plain_name(f"{path}.{name}")) for name, _ in module.named_parameters(recurse=False))
    }


def free_gathered(model: nn.Module) -> None:
    """Drop what a forward pass without backward has gathered: it would be stale after the next update."""
    if isinstance(model, FSDPModule):
        model.reshard()


def add_up_gradients(model: nn.Module, *, now: bool) -> None:
    """Have backward passes add up gradients over the ranks, or keep them here, whole, for a later one that does."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def partial_gradients(model: CausalModel) -> set[str]:
    """Parameters that all tp ranks hold, but see gradients for their own heads only: those have to be added up."""
    plan = _plan(model.whole.config)
    return {
        f"{module}.{name}" if module else name
        for module, owner in model.whole.named_modules()
        if plan_style(plan, model, module) == PARTIAL
        for name, _ in owner.named_parameters(recurse=False)
    }


def plan_style(plan: dict[str, str], model: CausalModel, module: str) -> str:
    """Return what the family's plan says of a module; empty when nothing."""
    inner = module.removeprefix(f"{model.whole.base_model_prefix}.")
    return next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(inner, pattern)), "")


def _plan(config: Any) -> dict[str, str]:
    """Return the family's plan for its layers.

    Embedding and head are cut by `_cut_vocabulary`, whatever it says of them.
    """
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    return {module: style for module, style in plan.items() if style != EMBEDDING}


def find_layers(model: CausalModel) -> list[nn.Module]:
    """Return the layers: the modules that transformers says must stay in one piece; none where it says nothing."""
    names = set(getattr(model.whole, "_no_split_modules", None) or ())
    # FSDP2 makes a class of its own of each that it cuts, below the family's.
    return [each for each in model.backbone.modules() if names & {base.__name__ for base in type(each).__mro__}]


def _fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    autocast: torch.dtype | None = None,
    reduced: torch.dtype = torch.float32,
    *,
    alone: bool = False,
) -> None:
    """Shard rows; gradients are added up, not averaged: losses are divided by the totals of the whole update.

    With `alone` also where this rank has all rows: FSDP2 then converts them as others, and counts them as its own.
    """
    if mesh.size() > 1 or alone:
        policy = MixedPrecisionPolicy(param_dtype=autocast, reduce_dtype=reduced, cast_forward_inputs=False)
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(enable=True)


def check_tensor_parallel(config: Any, family: str, size: int) -> None:
    """Refuse a model that `size` ranks cannot share evenly; errors call it `family`.

    Raises:
        ConfigError: the family has no plan of columns and rows, or its sizes cannot be cut.
    """
    if getattr(config, "vision_config", None) is not None:
        raise ConfigError(
            f"tp = {size}: the layers of {family} are not shared out, because it has a vision tower: set tp to 1, and "
            "every rank holds its part of all weights (FSDP2)"
        )
    plan = _plan(config)
    if any(name.endswith(".sinks") for name in plan):
        raise ConfigError(
            f"tp = {size}: the attention sinks of {family} are not shared out: set tp to 1, and every rank holds its "
            "part of all weights (FSDP2)"
        )
    unknown = sorted(set(plan.values()) - {COLUMNS, ROWS, PARTIAL})
    if not plan or unknown:
        what = f"asks for {', '.join(unknown)}" if plan else "has none"
        raise ConfigError(f"tp = {size} needs a tensor-parallel plan of columns and rows: {family} {what}; set tp to 1")
    wrong = [
        f"{name} = {getattr(config, name)}"
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
        if (getattr(config, name, None) or 0) % size
    ]
    if wrong:
        raise ConfigError(f"tp = {size} must divide the model's heads and feed-forward width: got {', '.join(wrong)}")


def _cut_layers(model: CausalModel, tp: TensorParallel, mesh: DeviceMesh) -> None:
    config = model.whole.config
    check_tensor_parallel(config, type(model.whole).__name__, tp.size)
    plan = _plan(config)
    for name, module in model.whole.named_modules():
        style = plan_style(plan, model, name)
        if style in (COLUMNS, ROWS):
            _cut_layer(module, tp, mesh, columns=style == COLUMNS)


def _cut_layer(module: nn.Module, tp: TensorParallel, mesh: DeviceMesh, *, columns: bool) -> None:
    """Cut a linear layer; of an adapter, the side that meets the cut dimension is cut with it."""
    if isinstance(module, LoraLinear):
        cut_linear(module.lora_base, tp, mesh, columns=columns)
        cut_linear(module.lora_B if columns else module.lora_A, tp, mesh, columns=columns)
    else:
        assert isinstance(module, nn.Linear)
        cut_linear(module, tp, mesh, columns=columns)


def _cut_vocabulary(model: CausalModel, tp: TensorParallel, mesh: DeviceMesh) -> None:
    """Cut the rows of embedding and head, where they divide."""
    embedding, head = model.whole.get_input_embeddings(), model.head
    # Where they do not, every rank holds both whole.
    if head.out_features % tp.size or embedding.num_embeddings % tp.size:
        return
    cut_embedding(embedding, tp, mesh)
    cut_linear(head, tp, mesh, columns=True)
    # Cutting has made each of the two a parameter of its own.
    model.whole.tie_weights()
    model.part = VocabularyPart(first=tp.rank * (head.out_features // tp.size), add=tp.add, largest=tp.largest)


@torch.no_grad()
def fill_buffers(module: Any, owner: Any = None) -> None:
    """Compute what is not saved with the weights, such as rotary frequencies, as transformers itself does.

    Args:
        module: and all within it.
        owner: model of transformers that it belongs to; a tower is one of its own.
    """
    owner = module if hasattr(module, "_init_weights") else owner
    if module._non_persistent_buffers_set:
        for parameter in module.parameters():
            parameter._is_hf_initialized = True  # by it transformers leaves weights alone: they are read from files
        owner._init_weights(module)
    for child in module.children():
        fill_buffers(child, owner)
