"""Puts an engine together: the model's parts on this rank, their weights, the optimizer, the passes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat_engine_megatron._checkpoint import Checkpoints
from offbeat_engine_megatron._groups import Ranks
from offbeat_engine_megatron._layers import add_tower, image_processor
from offbeat_engine_megatron._layout import Plan
from offbeat_engine_megatron._lora import Adapters
from offbeat_engine_megatron._model import HeadSettings, build_parts, transformer_config
from offbeat_engine_megatron._mtp import TokensAhead, new_tensors
from offbeat_engine_megatron._optimizer import ClippedOptimizer, OptimizerState, wrap_parts
from offbeat_engine_megatron._passes import Passes, Updates
from offbeat_engine_megatron._shape import rotary_frequencies
from offbeat_engine_megatron._slots import TOWER, list_ahead_slots
from offbeat_engine_megatron._weights import HeldWeights
from offbeat_mesh import Device, Mesh
from offbeat_training import ImageProcessor, TensorFolder


@dataclass(frozen=True, kw_only=True)
class Built:
    """What an engine consists of.

    Args:
        ranks: of the trainer.
        images: of a model with a vision tower; None of a model for text.
        held: weights of the model.
        trained: what the optimizer updates: these, but for a tower that is left as it is, or the adapters.
        adapters: with LoRA.
        ahead: the loss of multi-token prediction, where it trains.
        optimizer: of what is trained.
        passes: through the model.
        updates: shares of what the engine is asked.
        checkpoints: what it saves and loads.
    """

    ranks: Ranks
    images: ImageProcessor | None
    held: HeldWeights
    trained: HeldWeights
    adapters: Adapters | None
    ahead: TokensAhead | None
    optimizer: ClippedOptimizer
    passes: Passes
    updates: Updates
    checkpoints: Checkpoints


def build(plan: Plan, mesh: Mesh, device: Device) -> Built:
    """Make what trains; all ranks call it."""
    ranks, target = Ranks(mesh), device.torch_device
    images = image_processor(plan.hf_config, plan.config.model_path) if plan.shape.tower else None
    recompute: dict[str, Any] = {}
    if plan.config.activation_checkpointing:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = transformer_config(plan.shape, plan.parallel, plan.options, plan.dtype, **recompute)
    with ranks.together("make model"):
        parts = _parts(plan, mesh, config)
        held = HeldWeights(parts, plan.shape, plan.parallel, mesh)
        ahead_held = _hold_ahead(plan, mesh, parts)
        adapters = _adapters_of(plan, mesh, parts, held)
        trained = adapters.held if adapters is not None else _trained_of(plan, mesh, parts, held)
    wrapped = wrap_parts(parts, config, plan.options)
    optimizer = ClippedOptimizer(wrapped, plan.config, plan.options)
    with ranks.together("load model"):  # when there are float32 copies, so that these lose nothing
        _load(plan, OptimizerState(optimizer), held, adapters, ahead_held)
    budget, vocabulary = plan.config.max_tokens_per_microbatch, plan.shape.vocabulary
    ahead = _ahead_of(plan, mesh, parts)
    return Built(
        ranks=ranks,
        images=images,
        held=held,
        trained=trained,
        adapters=adapters,
        ahead=ahead,
        optimizer=optimizer,
        passes=Passes(wrapped, mesh, target, ahead, images, sees_always=plan.options.train_vision),
        updates=Updates(ranks, plan.parallel, budget=budget, vocabulary=vocabulary, device=target, images=images),
        checkpoints=Checkpoints(ranks, mesh, held, trained, optimizer, device, plan, adapters, ahead_held),
    )


def _load(
    plan: Plan, state: OptimizerState, held: HeldWeights, adapters: Adapters | None, ahead: HeldWeights | None
) -> None:
    """Read the model's folder. Layers of multi-token prediction that it lacks are new, alike in every layout."""
    folder = Path(plan.config.model_path).expanduser()
    held.read(folder, state.put_weights)
    if adapters is not None:
        adapters.initialise(plan.config.seed, state.put_weights)
    if ahead is None:
        return
    with TensorFolder(folder) as tensors:
        known = any(slot.name in tensors.names for slot in ahead.slots)
    if known:
        ahead.read(folder, state.put_weights)
    else:
        std = getattr(plan.hf_config, "initializer_range", 0.02)
        ahead.fill(new_tensors(ahead.slots, seed=plan.config.seed, std=std), state.put_weights)


def _adapters_of(plan: Plan, mesh: Mesh, parts: list[Any], held: HeldWeights) -> Adapters | None:
    rank = plan.config.lora_rank
    if not rank:
        return None
    alpha = plan.config.lora_alpha or 2.0 * rank
    return Adapters(parts, held, plan.shape, plan.parallel, mesh, rank=rank, alpha=alpha)


def _trained_of(plan: Plan, mesh: Mesh, parts: list[Any], held: HeldWeights) -> HeldWeights:
    """All weights, but for a tower that is left as it is."""
    if not plan.shape.tower or plan.options.train_vision:
        return held
    slots = [slot for slot in held.slots if not slot.name.startswith(TOWER)]
    return HeldWeights(parts, plan.shape, plan.parallel, mesh, slots)


def _hold_ahead(plan: Plan, mesh: Mesh, parts: list[Any]) -> HeldWeights | None:
    """Weights of multi-token prediction."""
    if not plan.shape.mtp_layers:
        return None
    slots = list_ahead_slots(plan.shape, plan.parallel)
    return HeldWeights(parts, plan.shape, plan.parallel, mesh, slots)


def _ahead_of(plan: Plan, mesh: Mesh, parts: list[Any]) -> TokensAhead | None:
    if not plan.shape.mtp_layers:
        return None
    ahead = TokensAhead(
        mesh,
        mesh.device.torch_device,
        num_layers=plan.shape.mtp_layers,
        weight=plan.options.mtp_loss_weight,
        detached=plan.options.mtp_detached,
    )
    for part in parts:
        part.ahead = ahead
    return ahead


def build_reference(plan: Plan, mesh: Mesh, ranks: Ranks, images: ImageProcessor | None) -> Passes:
    """Make the first policy, which only answers; all ranks call it."""
    plan = replace(plan, shape=replace(plan.shape, mtp_layers=0))
    config = transformer_config(plan.shape, plan.parallel, plan.options, plan.dtype)
    with ranks.together("load the first policy"):
        parts = _parts(plan, mesh, config)
        for part in parts:
            part.requires_grad_(requires_grad=False)
        HeldWeights(parts, plan.shape, plan.parallel, mesh).read(Path(plan.config.model_path).expanduser())
    return Passes(parts, mesh, mesh.device.torch_device, images=images)


def _parts(plan: Plan, mesh: Mesh, config: Any) -> list[Any]:
    head = HeadSettings(
        tp=mesh.group("tp"),
        cp=mesh.group("cp"),
        temperature=plan.options.temperature,
        entropy_gradient=plan.options.entropy_gradient,
        sequence_parallel=plan.parallel.sp,
    )
    device = mesh.device.torch_device
    frequencies = rotary_frequencies(plan.hf_config.get_text_config(), device)
    parts = build_parts(config, plan.shape, plan.parallel, mesh, head, frequencies)
    if plan.shape.tower:
        train, deepstack = plan.options.train_vision, plan.shape.deepstack
        add_tower(parts, plan.hf_config, device, head.tp, deepstack=deepstack, trained=train)
    return parts
