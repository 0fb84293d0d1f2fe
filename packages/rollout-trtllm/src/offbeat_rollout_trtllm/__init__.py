"""TensorRT-LLM as a rollout engine: in this process, or as a server with weights handed over replica by replica.

Names are loaded when they are asked for: importing the package imports neither torch nor TensorRT-LLM.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_rollout_trtllm._app import RolloutApp
    from offbeat_rollout_trtllm._control import EngineControl
    from offbeat_rollout_trtllm._engine import TrtllmRolloutEngine
    from offbeat_rollout_trtllm._flushes import plan_flushes
    from offbeat_rollout_trtllm._fp8 import is_fp8_weight
    from offbeat_rollout_trtllm._handles import CudaHandles, HandleFormat
    from offbeat_rollout_trtllm._local_link import LocalLink
    from offbeat_rollout_trtllm._model_folder import ModelFolder
    from offbeat_rollout_trtllm._options import TrtllmOptions
    from offbeat_rollout_trtllm._replica import ReplicaEngine, ReplicaWeights
    from offbeat_rollout_trtllm._surface import USES, Use
    from offbeat_rollout_trtllm._versions import SUPPORTED_VERSIONS, Release, find_release

_HOMES = {
    "SUPPORTED_VERSIONS": "_versions",
    "USES": "_surface",
    "CudaHandles": "_handles",
    "EngineControl": "_control",
    "HandleFormat": "_handles",
    "LocalLink": "_local_link",
    "ModelFolder": "_model_folder",
    "Release": "_versions",
    "ReplicaEngine": "_replica",
    "ReplicaWeights": "_replica",
    "RolloutApp": "_app",
    "TrtllmOptions": "_options",
    "TrtllmRolloutEngine": "_engine",
    "Use": "_surface",
    "find_release": "_versions",
    "is_fp8_weight": "_fp8",
    "plan_flushes": "_flushes",
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
    "ReplicaEngine",
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
