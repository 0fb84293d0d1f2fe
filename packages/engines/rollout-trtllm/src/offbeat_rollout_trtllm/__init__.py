"""TensorRT-LLM as a rollout engine: in this process, or as a server with weights handed over replica by replica.

Names are loaded when they are asked for: importing the package imports neither torch nor TensorRT-LLM.
"""

from typing import TYPE_CHECKING

from offbeat_core import load_lazily

if TYPE_CHECKING:
    from offbeat_rollout_trtllm._engine import TrtllmRolloutEngine
    from offbeat_rollout_trtllm._handles import CudaHandles, HandleFormat
    from offbeat_rollout_trtllm._local_link import LocalLink
    from offbeat_rollout_trtllm._options import TrtllmOptions
    from offbeat_rollout_trtllm._server_link import EngineControl
    from offbeat_rollout_trtllm._versions import SUPPORTED_VERSIONS, USES, Release, Use, find_release
    from offbeat_rollout_trtllm._weights import ReplicaWeights, is_fp8_weight, plan_flushes
    from offbeat_rollout_trtllm.serve import RolloutApp

__all__ = [
    "SUPPORTED_VERSIONS",
    "USES",
    "CudaHandles",
    "EngineControl",
    "HandleFormat",
    "LocalLink",
    "Release",
    "ReplicaWeights",
    "RolloutApp",
    "TrtllmOptions",
    "TrtllmRolloutEngine",
    "Use",
    "find_release",
    "is_fp8_weight",
    "plan_flushes",
]

__getattr__, __dir__ = load_lazily(
    __name__,
    {
        "_engine": "TrtllmRolloutEngine",
        "_handles": "CudaHandles HandleFormat",
        "_local_link": "LocalLink",
        "_options": "TrtllmOptions",
        "_server_link": "EngineControl",
        "_versions": "find_release Release SUPPORTED_VERSIONS Use USES",
        "_weights": "is_fp8_weight plan_flushes ReplicaWeights",
        "serve": "RolloutApp",
    },
)
