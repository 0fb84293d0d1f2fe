"""Memory of one rank of each role, estimated from the configuration."""

from dataclasses import replace
from typing import Final

from grpo_async_app._config import GrpoConfig
from grpo_async_app._placement import trainer_width
from offbeat_placement import (
    NUMBER_BYTES,
    MemoryEstimate,
    ModelShape,
    Placement,
    RolloutMemory,
    read_shape,
    train_advice,
    train_memory,
)
from offbeat_recipes import RunMemory
from offbeat_types import CacheBudget, CacheNeeds, RolloutEngineSettings, TrainLayout, installed_backends, load_backend

_CACHE_ADVICE: Final = "a larger {0}.tensor_parallel, or fewer {0}.max_running"


def estimate_memory(
    config: GrpoConfig, layout: TrainLayout | None = None, placement: Placement | None = None
) -> RunMemory:
    """Estimate from the model's config.json.

    Args:
        config: of the run.
        layout: how the trainer's ranks share the model; None where its backend cannot be asked: as FSDP does.
        placement: of the roles; some engines take a share of their device, whatever it has.

    Raises:
        ModelError: config.json is not there, not readable, or of a family that is not known.
    """
    shape, width = read_shape(config.model.path), trainer_width(config)
    layout = layout or TrainLayout(dp=config.engine.num_ranks // width, tp=width, zero_stage=3)
    trainer = train_memory(config.engine, layout, shape, keeps_reference=config.algorithm.needs_reference)
    roles, limits = {"trainer": trainer.estimate(shape)}, {"trainer": 0}
    advice = {"trainer": train_advice(config.engine, roles["trainer"])}
    engines: dict[str, tuple[str, RolloutEngineSettings, ModelShape, int]]
    engines = {"rollout": (config.rollout.backend, config.rollout, shape, 2 * config.rollout.sync_bucket_bytes)}
    if config.teacher.is_set:
        teacher = config.teacher_engine(0)
        engines["teacher"] = (config.teacher.backend, teacher, read_shape(config.teacher.path), 0)
    for role, (backend, settings, of, sync_bytes) in engines.items():
        device_bytes = placement.accelerator_bytes(role) if placement else 0
        roles[role], budget = _estimate_engine(backend, settings, of, sync_bytes, device_bytes)
        advice[role] = ((budget and budget.advice) or _CACHE_ADVICE).format(role)
        limits[role] = budget.limit_bytes if budget else 0
    return RunMemory(shape, roles, advice, limits)


def _estimate_engine(
    backend: str, settings: RolloutEngineSettings, shape: ModelShape, sync_bytes: int, device_bytes: int
) -> tuple[MemoryEstimate, CacheBudget | None]:
    """Of one rank of an engine, and what its backend says of its cache, where it can be asked."""
    number_bytes = NUMBER_BYTES[settings.dtype]
    memory = RolloutMemory(
        weight_bytes=number_bytes,
        kv_bytes=number_bytes,
        tensor_parallel=settings.tensor_parallel,
        max_running=settings.max_running,
        max_model_len=settings.max_model_len,
        sync_bytes=sync_bytes,
    )
    tell = None
    if backend in installed_backends("offbeat.rollout"):
        tell = getattr(load_backend("offbeat.rollout", backend), "cache_budget", None)
    if tell is None:
        return memory.estimate(shape), None
    needs = CacheNeeds(
        device_bytes=device_bytes,
        weight_bytes=memory.held_weights(shape) + sync_bytes,
        token_bytes=memory.kv_bytes_per_token(shape),
    )
    budget: CacheBudget = tell(settings, needs)
    return replace(memory, cache_bytes=budget.cache_bytes).estimate(shape), budget
