"""Memory of one rank of each role, estimated from the configuration."""

from typing import Final

from grpo_async_app._config import GrpoConfig
from grpo_async_app._placement import trainer_width
from offbeat_cluster.placement import MemoryEstimate, RolloutMemory
from offbeat_recipes import NUMBER_BYTES, RunMemory, read_shape, train_memory
from offbeat_types import TrainLayout

_ADVICE: Final = {
    "trainer": "more engine.num_ranks, engine.activation_checkpointing, or fewer max_tokens_per_microbatch",
    "rollout": "a larger rollout.tensor_parallel, or fewer rollout.max_running",
    "teacher": "a larger teacher.tensor_parallel, or teacher.colocate = false",
}


def estimate_memory(config: GrpoConfig, layout: TrainLayout | None = None) -> RunMemory:
    """Estimate from the model's config.json, for the default engines.

    Args:
        config: of the run.
        layout: how the trainer's ranks share the model; None where its backend cannot be asked: as FSDP does.

    Raises:
        ModelError: it is not there, not readable, or of a family that is not known.
    """
    shape, rollout, width = read_shape(config.model.path), config.rollout, trainer_width(config)
    layout = layout or TrainLayout(dp=config.engine.num_ranks // width, tp=width, zero_stage=3)
    number_bytes = NUMBER_BYTES[rollout.dtype]
    trainer = train_memory(config.engine, layout, shape, keeps_reference=config.algorithm.needs_reference)
    engines = RolloutMemory(
        weight_bytes=number_bytes,
        kv_bytes=number_bytes,
        tensor_parallel=rollout.tensor_parallel,
        max_running=rollout.max_running,
        max_model_len=rollout.max_model_len,
        sync_bytes=2 * rollout.sync_bucket_bytes,
    )
    roles = {"trainer": trainer.estimate(shape), "rollout": engines.estimate(shape)}
    if config.teacher.is_set:
        roles["teacher"] = _estimate_teacher(config)
    return RunMemory(shape, roles, _ADVICE)


def _estimate_teacher(config: GrpoConfig) -> MemoryEstimate:
    """Of one rank of a replica: the samples of one group are scored together."""
    number_bytes = NUMBER_BYTES[config.teacher.dtype]
    return RolloutMemory(
        weight_bytes=number_bytes,
        kv_bytes=number_bytes,
        tensor_parallel=config.teacher.tensor_parallel,
        max_running=config.rollout.samples_per_prompt,
        max_model_len=config.rollout.max_model_len,
    ).estimate(read_shape(config.teacher.path))
