"""What an engine was asked for, checked before anything starts. Needs no megatron-core, and no other rank."""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from offbeat_dist import Device, Mesh, open_device
from offbeat_engine_megatron._options import MegatronEngineOptions, read_options
from offbeat_engine_megatron._parallel import Parallel, check_model_fits, choose_parallel
from offbeat_engine_megatron._shape import ModelShape, read_model
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
    options = read_options(config.options)
    check_schedule(config)
    if config.dtype not in _FORMATS:
        raise ConfigError(f"the megatron engine computes in {' or '.join(_FORMATS)}: got dtype = {config.dtype}")
    parallel = choose_parallel(axes or dict.fromkeys(("dp", "cp", "tp", "pp", "ep"), 1), options)
    hf_config, shape = read_model(config.model_path, trust_remote_code=config.trust_remote_code)
    if options.mtp_layers and config.lora_rank:
        raise ConfigError("mtp_layers trains whole layers, and lora_rank adapters alone: set one of them to 0")
    shape = replace(shape, mtp_layers=options.mtp_layers)
    check_model_fits(shape, parallel)
    return Plan(config=config, options=options, hf_config=hf_config, shape=shape, parallel=parallel)


def plan_layout(config: TrainEngineConfig, num_ranks: int) -> TrainLayout:
    """How so many ranks will share the model; see `offbeat_types.TrainBackend.plan`."""
    open_device(config.device)
    plan = plan_engine(config, {"dp": num_ranks, "cp": 1, "tp": 1, "pp": 1, "ep": 1})
    sizes = {axis: getattr(plan.parallel, axis) for axis in ("dp", "cp", "tp", "pp", "ep")}
    return TrainLayout(**sizes, zero_stage=int(plan.options.distributed_optimizer))


def open_device_of(config: TrainEngineConfig, mesh: Mesh | None) -> Device:
    """The device of `config`; on a mesh each rank has its own already, of which the config may say the kind."""
    if mesh is None:
        return open_device(config.device)
    kind = config.device.partition(":")[0]
    if kind not in ("auto", mesh.device.kind):
        raise ConfigError(f"the mesh computes on {mesh.device.kind}, the engine is set to {config.device}; use auto")
    return mesh.device
