"""The runtime of the platform, torch_npu, imported when a device is asked for and not before.

torch imports every installed backend by itself, and transformers imports this one; where CANN is missing both fail.
So the commands of offbeat hide it (`offbeat_types.defer_device_backends`), and this module imports it where wanted.
Source: torch 2.13.0, torch/__init__.py, `_import_device_backends`; torch_npu 2.13.0, torch_npu/__init__.py;
transformers 5.19, transformers/utils/import_utils.py, `is_torch_npu_available`.
"""

import importlib
from functools import cache
from types import ModuleType
from typing import Any, Final

import torch

from offbeat_types import BackendError, defer_device_backends, restore_module

RUNTIME: Final = "torch_npu"
INSTALL: Final = 'pip install "offbeat-npu[engine]", on a machine with the NPU driver and CANN'


def load_runtime() -> Any:
    """torch.npu, the module of streams, memory and random numbers.

    Raises:
        BackendError: torch_npu is not installed, or does not import, with what it said.
    """
    if not hasattr(torch, "npu"):
        load_operators()
    return torch.npu  # type: ignore[attr-defined]


def load_operators() -> ModuleType:
    """torch_npu itself, whose functions are the platform's fused operators.

    Raises:
        BackendError: as `load_runtime`.
    """
    loaded = _import_runtime()
    if isinstance(loaded, str):
        raise BackendError(loaded)
    return loaded


@cache
def _import_runtime() -> ModuleType | str:
    """torch_npu, or why it does not import; tried once, because a failed import leaves parts of it behind."""
    restore_module(RUNTIME)
    try:
        return importlib.import_module(RUNTIME)
    except ModuleNotFoundError as error:
        defer_device_backends()  # for those that would stumble over it, such as transformers
        if error.name != RUNTIME:
            return f"{RUNTIME} does not import: {error}; install what it needs"
        return f"{RUNTIME} is not installed; install it with: {INSTALL}"
    except (ImportError, RuntimeError, OSError) as error:  # a shared library of CANN is missing, or of another version
        defer_device_backends()
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return (
            f"{RUNTIME} does not import: {first}; install CANN and the driver, and run its set_env.sh in this shell "
            "(grpo-async-app doctor says what is missing)"
        )
