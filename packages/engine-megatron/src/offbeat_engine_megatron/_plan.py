"""What an engine was asked for, checked before anything starts. Needs no megatron-core, and no other rank."""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from offbeat_engine_megatron._options import MegatronEngineOptions
from offbeat_engine_megatron._parallel import Parallel, check_model_fits, choose_parallel
from offbeat_engine_megatron._shape import ModelShape, read_model
from offbeat_mesh import open_device
from offbeat_types import ConfigError, TrainEngineConfig, TrainLayout, check_schedule

_FORMATS: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an engine was asked for, checked before anything starts.

    Args:
        config: of the engine.
        options: of this backend.
        hf_config: transformers' config of the model.
        shape: of the model.
        parallel: sizes of the axes.
    """

    config: TrainEngineConfig
    options: MegatronEngineOptions
    hf_config: Any
    shape: ModelShape
    parallel: Parallel

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights that the model computes with."""
        return _FORMATS[self.config.dtype]


def plan_engine(config: TrainEngineConfig, axes: dict[str, int] | None = None) -> Plan:
    """Check everything that can be checked without megatron-core and without other ranks.

    Args:
        config: of the engine.
        axes: sizes of the mesh's axes; None for one process.

    Raises:
        ConfigError: a setting is out of range, or the ranks cannot share the model that way.
        ModelError: the model folder is missing, or of a family that is not supported.
    """
    options = MegatronEngineOptions.parse(config.options)
    check_schedule(config)
    if config.dtype not in _FORMATS:
        raise ConfigError(f"the megatron engine computes in {' or '.join(_FORMATS)}: got dtype = {config.dtype}")
    parallel = choose_parallel(axes or dict.fromkeys(("dp", "cp", "tp", "pp", "ep"), 1), options)
    hf_config, shape = read_model(config.model_path, trust_remote_code=config.trust_remote_code)
    if options.mtp_layers and config.lora_rank:
        raise ConfigError("mtp_layers trains whole layers, and lora_rank adapters alone: set one of them to 0")
    shape = replace(shape, mtp_layers=options.mtp_layers)
    check_model_fits(shape, parallel)
    _check_tower(shape, config, options)
    return Plan(config=config, options=options, hf_config=hf_config, shape=shape, parallel=parallel)


def _check_tower(shape: ModelShape, config: TrainEngineConfig, options: MegatronEngineOptions) -> None:
    if shape.tower and config.lora_rank:
        raise ConfigError(
            f"lora_rank with a vision tower ({shape.family}): adapters here are those of megatron-core's layers, and "
            'the tower has none; set lora_rank = 0, or use engine.backend = "torch"'
        )
    if shape.tower and options.mtp_layers:
        raise ConfigError(
            f"mtp_layers with a vision tower ({shape.family}): they look up embeddings of later tokens, where images "
            "have none; set mtp_layers = 0"
        )


def plan_layout(config: TrainEngineConfig, num_ranks: int) -> TrainLayout:
    """How so many ranks will share the model; see `offbeat_types.TrainBackend.plan`."""
    open_device(config.device)
    plan = plan_engine(config, {"dp": num_ranks, "cp": 1, "tp": 1, "pp": 1, "ep": 1})
    sizes = {axis: getattr(plan.parallel, axis) for axis in ("dp", "cp", "tp", "pp", "ep")}
    layout = TrainLayout(**sizes, zero_stage=int(plan.options.distributed_optimizer))
    if config.dtype == "float32":
        return layout
    return replace(layout, weight_bytes=plan.dtype.itemsize, optimizer_bytes=12)  # a float32 copy beside the moments
