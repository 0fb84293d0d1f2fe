"""vLLM as a rollout engine of offbeat. Importing this imports neither vLLM nor torch."""

from offbeat_rollout_vllm._engine import VllmRolloutEngine
from offbeat_rollout_vllm._options import RENAMED, Renaming, VllmRolloutOptions
from offbeat_rollout_vllm._setup import SUPPORTED_VERSIONS, SupportedVersion

__all__ = [
    "RENAMED",
    "SUPPORTED_VERSIONS",
    "Renaming",
    "SupportedVersion",
    "VllmRolloutEngine",
    "VllmRolloutOptions",
]
