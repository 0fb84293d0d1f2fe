"""TensorRT-LLM as a rollout engine: in this process, or as a server with weights handed over replica by replica.

Names are loaded when they are asked for: importing the package imports neither torch nor TensorRT-LLM.
"""

from typing import TYPE_CHECKING

from offbeat_core import load_lazily

if TYPE_CHECKING:
    from offbeat_rollout_trtllm._engine import TrtllmRolloutEngine
    from offbeat_rollout_trtllm._handles import CudaHandles
    from offbeat_rollout_trtllm._options import TrtllmOptions
    from offbeat_rollout_trtllm._server_link import EngineControl
    from offbeat_rollout_trtllm._versions import SUPPORTED_VERSIONS, USES, Release, Use
    from offbeat_rollout_trtllm._weights import ReplicaWeights, is_fp8_weight
    from offbeat_rollout_trtllm.serve import RolloutApp

__all__ = [
    "SUPPORTED_VERSIONS",
    "USES",
    "CudaHandles",
    "EngineControl",
    "Release",
    "ReplicaWeights",
    "RolloutApp",
    "TrtllmOptions",
    "TrtllmRolloutEngine",
    "Use",
    "is_fp8_weight",
]

__getattr__, __dir__ = load_lazily(
    __name__,
    {
        "_engine": "TrtllmRolloutEngine",
        "_handles": "CudaHandles",
        "_options": "TrtllmOptions",
        "_server_link": "EngineControl",
        "_versions": "Release SUPPORTED_VERSIONS Use USES",
        "_weights": "is_fp8_weight ReplicaWeights",
        "serve": "RolloutApp",
    },
)
