"""TensorRT-LLM as a rollout engine: in this process, or as a server with weights handed over replica by replica.

Names are loaded when they are asked for: importing the package imports neither torch nor TensorRT-LLM.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_rollout_trtllm._engine import TrtllmRolloutEngine
    from offbeat_rollout_trtllm._handles import CudaHandles, HandleFormat
    from offbeat_rollout_trtllm._local_link import LocalLink
    from offbeat_rollout_trtllm._options import TrtllmOptions
    from offbeat_rollout_trtllm._server_link import EngineControl
    from offbeat_rollout_trtllm._versions import SUPPORTED_VERSIONS, USES, Release, Use, find_release
    from offbeat_rollout_trtllm._weights import ReplicaWeights, is_fp8_weight, plan_flushes
    from offbeat_rollout_trtllm.serve import RolloutApp
    from offbeat_types import ModelFolder

_HOMES = {
    "SUPPORTED_VERSIONS": "_versions",
    "USES": "_versions",
    "CudaHandles": "_handles",
    "EngineControl": "_server_link",
    "HandleFormat": "_handles",
    "LocalLink": "_local_link",
    "ModelFolder": "_engine",
    "Release": "_versions",
    "ReplicaWeights": "_weights",
    "RolloutApp": "serve",
    "TrtllmOptions": "_options",
    "TrtllmRolloutEngine": "_engine",
    "Use": "_versions",
    "find_release": "_versions",
    "is_fp8_weight": "_weights",
    "plan_flushes": "_weights",
}

__all__ = [
    "SUPPORTED_VERSIONS",
    "USES",
    "CudaHandles",
    "EngineControl",
    "HandleFormat",
    "LocalLink",
    "ModelFolder",
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


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
