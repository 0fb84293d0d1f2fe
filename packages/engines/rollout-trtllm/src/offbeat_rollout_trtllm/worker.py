"""The class that TensorRT-LLM mixes into its workers by name; only they import it."""

from typing import Any

from offbeat_rollout_trtllm._handles import ProvenUpdates
from offbeat_rollout_trtllm._versions import import_engine

_Base: Any = import_engine("tensorrt_llm.llmapi.rlhf_utils").WorkerExtension


class WorkerExtension(ProvenUpdates, _Base):  # type: ignore[misc]  # TensorRT-LLM is not installed where we check types
    """Loads weights from handles, and says what it opened."""
