"""TensorRT-LLM as a rollout engine: in this process, or as a server with weights handed over replica by replica.

Names are loaded when they are asked for: importing the package imports neither torch nor TensorRT-LLM.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_core import ModelFolder
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

_HOMES = ("_versions", "_options", "_handles", "_local_link", "_server_link", "serve", "_weights", "_engine")
"""Modules that hold these names, those that import least first."""


def __getattr__(name: str) -> object:
    homes = _HOMES if name in __all__ else ()
    for module in homes:
        found = import_module(f"{__name__}.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
