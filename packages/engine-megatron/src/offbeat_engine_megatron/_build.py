"""Puts an engine together: the model's parts on this rank, their weights, the optimizer, the passes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat_engine_megatron._model import HeadSettings, build_parts, rotary_frequencies, transformer_config
from offbeat_engine_megatron._optimizer import ClippedOptimizer, wrap_parts
from offbeat_engine_megatron._passes import Passes
from offbeat_engine_megatron._ranks import Ranks
from offbeat_engine_megatron._weights import HeldWeights

if TYPE_CHECKING:
    from offbeat_engine_megatron._engine import MegatronTrainEngine, Plan


def build(engine: "MegatronTrainEngine", plan: "Plan") -> None:
    """Make what trains; all ranks call it."""
    engine._ranks = Ranks(engine.mesh)
    recompute: dict[str, Any] = {}
    if plan.config.activation_checkpointing:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = transformer_config(plan.shape, plan.parallel, plan.options, **recompute)
    with engine._ranks.together("load model"):
        parts = _parts(engine, plan, config)
        held = HeldWeights(parts, plan.shape, plan.parallel, engine.mesh)
        held.read(Path(plan.config.model_path).expanduser())
    wrapped = wrap_parts(parts, config, plan.options)
    engine._optimizer = ClippedOptimizer(wrapped, plan.config, plan.options)
    engine._held = held
    engine._passes = Passes(wrapped, engine.mesh, engine._device.torch_device)


def build_reference(engine: "MegatronTrainEngine", plan: "Plan") -> Passes:
    """Make the first policy, which only answers; all ranks call it."""
    config = transformer_config(plan.shape, plan.parallel, plan.options)
    with engine._ranks.together("load the first policy"):
        parts = _parts(engine, plan, config)
        for part in parts:
            part.requires_grad_(requires_grad=False)
        HeldWeights(parts, plan.shape, plan.parallel, engine.mesh).read(Path(plan.config.model_path).expanduser())
    return Passes(parts, engine.mesh, engine._device.torch_device)


def _parts(engine: "MegatronTrainEngine", plan: "Plan", config: Any) -> list[Any]:
    head = HeadSettings(
        tp=engine.mesh.group("tp"),
        cp=engine.mesh.group("cp"),
        temperature=plan.options.temperature,
        entropy_gradient=plan.options.entropy_gradient,
        sequence_parallel=plan.parallel.sp,
    )
    frequencies = rotary_frequencies(plan.hf_config, engine._device.torch_device)
    return build_parts(config, plan.shape, plan.parallel, engine.mesh, head, frequencies)
