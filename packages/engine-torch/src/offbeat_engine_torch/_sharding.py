"""Cuts a model over the mesh: rows over dp (FSDP2), heads and feed-forward columns over tp.

Tensor parallelism follows the plan that the model family declares to transformers (`base_model_tp_plan`), and cuts
the rows of embedding and vocabulary head where they divide. Norms are the same on all tp ranks.
Source: FSDP2 (torch.distributed.fsdp.fully_shard), Megatron-LM (arXiv:1909.08053) for columns and rows.
"""

import fnmatch
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from offbeat_engine_torch._model import CausalModel
from offbeat_engine_torch._tensor_parallel import TensorParallel, cut_embedding, cut_linear
from offbeat_mesh import Mesh
from offbeat_training import LoraLinear, VocabularyPart
from offbeat_types import ConfigError, ModelError

COLUMNS, ROWS, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
EMBEDDING = "embedding_rowwise"  # some versions of transformers add it for tied models (5.19), others do not (5.23)


def shard_model(model: CausalModel, mesh: Mesh, device: torch.device, autocast: torch.dtype | None = None) -> None:
    """Give an outlined model memory on `device` for what this rank holds of it. The values are left open.

    Args:
        model: from `outline_model`, with adapters where they are wanted.
        mesh: of all ranks.
        device: of this rank.
        autocast: format in which the layers compute, and in which their weights are gathered; None for float32.
            Gradients are added up in float32, and so is what the layers hand on: embedding and head stay float32.

    Raises:
        ConfigError: the family has no plan for tensor parallelism, or its sizes cannot be cut into tp parts.
    """
    layers, dp_mesh = _layers(model), mesh.device_mesh["dp"]
    if mesh.axes["tp"] > 1:
        tp = TensorParallel(mesh)
        _cut_layers(model, tp)
        _cut_vocabulary(model, tp)
    within_layers = {id(module) for layer in layers for module in layer.modules()}
    for layer in layers:
        layer.to_empty(device=device)
        _fully_shard(layer, dp_mesh, autocast)
    for module in model.modules():
        if id(module) not in within_layers:
            module.to_empty(device=device, recurse=False)
    model.whole.tie_weights()
    embedding = model.whole.get_input_embeddings()
    if embedding.weight is not model.head.weight:
        # Gathered when it is called, and not together with the head.
        _fully_shard(embedding, dp_mesh)
    _fully_shard(model, dp_mesh)
    _fill_buffers(model.whole)


def free_gathered(model: nn.Module) -> None:
    """Drop what a forward pass without backward has gathered: it would be stale after the next update."""
    if isinstance(model, FSDPModule):
        model.reshard()


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
    """What the family's plan says of a module; empty when nothing."""
    inner = module.removeprefix(f"{model.whole.base_model_prefix}.")
    return next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(inner, pattern)), "")


def _plan(config: Any) -> dict[str, str]:
    """The family's plan for its layers; embedding and head are cut by `_cut_vocabulary`, whatever it says of them."""
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    return {module: style for module, style in plan.items() if style != EMBEDDING}


def _layers(model: CausalModel) -> list[nn.Module]:
    """Decoder layers: the modules that transformers says must stay in one piece."""
    names = set(getattr(model.whole, "_no_split_modules", None) or ())
    layers = [module for module in model.backbone.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelError(f"{type(model.whole).__name__} names no decoder layers: train it on one rank")
    return layers


def _fully_shard(module: nn.Module, mesh: DeviceMesh, autocast: torch.dtype | None = None) -> None:
    """Shard rows; gradients are added up, not averaged: losses are divided by the totals of the whole update."""
    if mesh.size() > 1:
        policy = MixedPrecisionPolicy(param_dtype=autocast, reduce_dtype=torch.float32, cast_forward_inputs=False)
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(enable=True)


def check_tensor_parallel(config: Any, family: str, size: int) -> None:
    """Refuse a model that `size` ranks cannot share evenly.

    Args:
        config: transformers' config of the model.
        family: what errors call it.
        size: tensor parallel ranks, above 1.

    Raises:
        ConfigError: the family has no plan of columns and rows, or its sizes cannot be cut.
    """
    if getattr(config, "vision_config", None) is not None:
        raise ConfigError(
            f"tp = {size}: the layers of {family} are not shared out, because it has a vision tower: set tp to 1, and "
            "every rank holds its part of all weights (FSDP2)"
        )
    plan = _plan(config)
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


def _cut_layers(model: CausalModel, tp: TensorParallel) -> None:
    config = model.whole.config
    check_tensor_parallel(config, type(model.whole).__name__, tp.size)
    plan = _plan(config)
    for name, module in model.whole.named_modules():
        style = plan_style(plan, model, name)
        if style in (COLUMNS, ROWS):
            _cut_layer(module, tp, columns=style == COLUMNS)


def _cut_layer(module: nn.Module, tp: TensorParallel, *, columns: bool) -> None:
    """Cut a linear layer; of an adapter, the side that meets the cut dimension is cut with it."""
    if isinstance(module, LoraLinear):
        cut_linear(module.lora_base, tp, columns=columns)
        cut_linear(module.lora_B if columns else module.lora_A, tp, columns=columns)
    else:
        assert isinstance(module, nn.Linear)
        cut_linear(module, tp, columns=columns)


def _cut_vocabulary(model: CausalModel, tp: TensorParallel) -> None:
    """Cut the rows of embedding and head, where they divide."""
    embedding, head = model.whole.get_input_embeddings(), model.head
    if head.out_features % tp.size or embedding.num_embeddings % tp.size:
        return
    cut_embedding(embedding, tp)
    cut_linear(head, tp, columns=True)
    model.whole.tie_weights()
    model.part = VocabularyPart(first=tp.rank * (head.out_features // tp.size), add=tp.add, largest=tp.largest)


@torch.no_grad()
def _fill_buffers(whole: Any) -> None:
    """Compute what is not saved with the weights, such as rotary frequencies, as transformers itself does."""
    for module in whole.modules():
        if module._non_persistent_buffers_set:
            whole._init_weights(module)
