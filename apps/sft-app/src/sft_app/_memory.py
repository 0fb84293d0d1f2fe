"""Memory of one rank, estimated from the configuration."""

from math import prod
from typing import Final

from offbeat_placement import read_shape, train_advice, train_memory
from offbeat_recipes import RunMemory
from offbeat_types import ConfigError, TrainLayout
from sft_app._config import SftConfig

_AXES: Final = ("tensor_parallel", "pipeline_parallel", "context_parallel")


def sharing_ranks(config: SftConfig) -> int:
    """Ranks that share one copy of the model's matrices, blocks and sequences.

    Raises:
        ConfigError: they do not divide the ranks.
    """
    sizes = {axis: config.engine.options.get(axis, 1) for axis in _AXES}
    if not all(isinstance(size, int) and size >= 1 for size in sizes.values()):
        raise ConfigError(f"engine.options {sizes} must be whole numbers of ranks, 1 or more")
    shared: int = prod(sizes.values())
    num_ranks = config.engine.num_ranks
    if num_ranks % shared:
        text = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        raise ConfigError(f"engine.num_ranks = {num_ranks} must be a multiple of {text} (engine.options)")
    return shared


def estimate_memory(config: SftConfig, layout: TrainLayout | None = None) -> RunMemory:
    """Estimate from the model's config.json, for the default engine.

    Args:
        config: of the run.
        layout: how the ranks share the model; None where their backend cannot be asked: as FSDP does.

    Raises:
        ModelError: it is not there, not readable, or of a family that is not known.
    """
    shape, width = read_shape(config.model.path), sharing_ranks(config)
    layout = layout or TrainLayout(dp=config.engine.num_ranks // width, tp=width, zero_stage=3)
    estimate = train_memory(config.engine, layout, shape).estimate(shape)
    return RunMemory(shape, {"trainer": estimate}, {"trainer": train_advice(config.engine, estimate)})
