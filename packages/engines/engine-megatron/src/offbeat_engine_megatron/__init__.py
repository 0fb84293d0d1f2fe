"""megatron-core as a trainer of offbeat: tensor, sequence, context, pipeline and expert parallel training."""

from offbeat_engine_megatron._engine import MegatronTrainEngine
from offbeat_engine_megatron._layout import MegatronEngineOptions

__all__ = ["MegatronEngineOptions", "MegatronTrainEngine"]
