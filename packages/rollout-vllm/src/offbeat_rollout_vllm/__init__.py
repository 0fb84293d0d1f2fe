"""vLLM as a rollout engine of offbeat. Importing this imports neither vLLM nor torch."""

from offbeat_rollout_vllm._engine import VllmRolloutEngine
from offbeat_rollout_vllm._options import VllmRolloutOptions
from offbeat_rollout_vllm._renamed import RENAMED, Renaming
from offbeat_rollout_vllm._versions import SUPPORTED_VERSIONS, SupportedVersion

__all__ = [
    "RENAMED",
    "SUPPORTED_VERSIONS",
    "Renaming",
    "SupportedVersion",
    "VllmRolloutEngine",
    "VllmRolloutOptions",
]
