"""Puts an engine together: the model's parts on this rank, their weights, the optimizer, the passes."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat_engine_megatron._checkpoint import Checkpoints
from offbeat_engine_megatron._images import Images
from offbeat_engine_megatron._looking import give_sight
from offbeat_engine_megatron._lora import Adapters
from offbeat_engine_megatron._model import HeadSettings, build_parts, transformer_config
from offbeat_engine_megatron._mtp import TokensAhead, new_tensors
from offbeat_engine_megatron._optimizer import ClippedOptimizer, wrap_parts
from offbeat_engine_megatron._optimizer_state import OptimizerState
from offbeat_engine_megatron._passes import Passes
from offbeat_engine_megatron._ranks import Ranks
from offbeat_engine_megatron._rotary import rotary_frequencies
from offbeat_engine_megatron._slots import TOWER, list_ahead_slots
from offbeat_engine_megatron._steps import Steps
from offbeat_engine_megatron._tensor_files import TensorFolder
from offbeat_engine_megatron._updates import Updates
from offbeat_engine_megatron._weights import HeldWeights

if TYPE_CHECKING:
    from offbeat_engine_megatron._engine import MegatronTrainEngine
    from offbeat_engine_megatron._plan import Plan


def build(engine: "MegatronTrainEngine", plan: "Plan") -> None:
    """Make what trains; all ranks call it."""
    engine._ranks = Ranks(engine.mesh)
    engine._images = Images(plan.hf_config, plan.config.model_path) if plan.shape.tower else None
    recompute: dict[str, Any] = {}
    if plan.config.activation_checkpointing:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = transformer_config(plan.shape, plan.parallel, plan.options, plan.dtype, **recompute)
    with engine._ranks.together("make model"):
        parts = _parts(engine, plan, config)
        held = HeldWeights(parts, plan.shape, plan.parallel, engine.mesh)
        ahead_held = _hold_ahead(engine, plan, parts)
        engine._held, engine._adapters = held, _adapters_of(engine, plan, parts, held)
        engine._trained = _trained_of(engine, plan, parts)
    wrapped = wrap_parts(parts, config, plan.options)
    engine._optimizer = ClippedOptimizer(wrapped, plan.config, plan.options)
    with engine._ranks.together("load model"):  # when there are float32 copies, so that these lose nothing
        _load(plan, OptimizerState(engine._optimizer), held, engine._adapters, ahead_held)
    engine._steps = Steps(engine._optimizer, engine._ranks, engine._trained)
    engine._updates = Updates(
        engine._ranks,
        plan.parallel,
        budget=plan.config.max_tokens_per_microbatch,
        vocabulary=plan.shape.vocabulary,
        device=engine._device.torch_device,
        images=engine._images,
    )
    engine._ahead = _ahead_of(engine, plan, parts)
    engine._passes = Passes(
        wrapped,
        engine.mesh,
        engine._device.torch_device,
        engine._ahead,
        engine._images,
        sees_always=plan.options.train_vision,
    )
    engine._checkpoints = Checkpoints(
        engine._ranks,
        engine.mesh,
        held,
        engine._trained,
        engine._optimizer,
        engine._device,
        plan,
        engine._adapters,
        ahead_held,
    )


def _load(
    plan: "Plan", state: OptimizerState, held: HeldWeights, adapters: Adapters | None, ahead: HeldWeights | None
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


def _adapters_of(engine: "MegatronTrainEngine", plan: "Plan", parts: list[Any], held: HeldWeights) -> Adapters | None:
    rank = plan.config.lora_rank
    if not rank:
        return None
    alpha = plan.config.lora_alpha or 2.0 * rank
    return Adapters(parts, held, plan.shape, plan.parallel, engine.mesh, rank=rank, alpha=alpha)


def _trained_of(engine: "MegatronTrainEngine", plan: "Plan", parts: list[Any]) -> HeldWeights:
    """What the optimizer updates: adapters; or all, but for a tower that is left as it is."""
    if engine._adapters is not None:
        return engine._adapters.held
    if not plan.shape.tower or plan.options.train_vision:
        return engine._held
    slots = [slot for slot in engine._held.slots if not slot.name.startswith(TOWER)]
    return HeldWeights(parts, plan.shape, plan.parallel, engine.mesh, slots)


def _hold_ahead(engine: "MegatronTrainEngine", plan: "Plan", parts: list[Any]) -> HeldWeights | None:
    """Weights of multi-token prediction."""
    if not plan.shape.mtp_layers:
        return None
    slots = list_ahead_slots(plan.shape, plan.parallel)
    return HeldWeights(parts, plan.shape, plan.parallel, engine.mesh, slots)


def _ahead_of(engine: "MegatronTrainEngine", plan: "Plan", parts: list[Any]) -> TokensAhead | None:
    if not plan.shape.mtp_layers:
        return None
    ahead = TokensAhead(
        engine.mesh,
        engine._device.torch_device,
        num_layers=plan.shape.mtp_layers,
        weight=plan.options.mtp_loss_weight,
        detached=plan.options.mtp_detached,
    )
    for part in parts:
        part.ahead = ahead
    return ahead


def build_reference(engine: "MegatronTrainEngine", plan: "Plan") -> Passes:
    """Make the first policy, which only answers; all ranks call it."""
    plan = replace(plan, shape=replace(plan.shape, mtp_layers=0))
    config = transformer_config(plan.shape, plan.parallel, plan.options, plan.dtype)
    with engine._ranks.together("load the first policy"):
        parts = _parts(engine, plan, config)
        for part in parts:
            part.requires_grad_(requires_grad=False)
        HeldWeights(parts, plan.shape, plan.parallel, engine.mesh).read(Path(plan.config.model_path).expanduser())
    return Passes(parts, engine.mesh, engine._device.torch_device, images=engine._images)


def _parts(engine: "MegatronTrainEngine", plan: "Plan", config: Any) -> list[Any]:
    head = HeadSettings(
        tp=engine.mesh.group("tp"),
        cp=engine.mesh.group("cp"),
        temperature=plan.options.temperature,
        entropy_gradient=plan.options.entropy_gradient,
        sequence_parallel=plan.parallel.sp,
    )
    device = engine._device.torch_device
    frequencies = rotary_frequencies(plan.hf_config.get_text_config(), device)
    parts = build_parts(config, plan.shape, plan.parallel, engine.mesh, head, frequencies)
    if plan.shape.tower:
        train, deepstack = plan.options.train_vision, plan.shape.deepstack
        give_sight(parts, plan.hf_config, device, head.tp, deepstack=deepstack, trained=train)
    return parts
