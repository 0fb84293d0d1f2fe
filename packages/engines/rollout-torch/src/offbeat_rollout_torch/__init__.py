"""The embedded rollout engine: continuous batching in plain torch."""

from offbeat_rollout_torch._engine import TorchRolloutEngine, TorchRolloutOptions
from offbeat_rollout_torch._families import FAMILIES, Architecture

__all__ = ["FAMILIES", "Architecture", "TorchRolloutEngine", "TorchRolloutOptions"]
