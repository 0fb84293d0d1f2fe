"""torch_npu and MindSpeed, imported when they are wanted and not before.

torch imports every installed backend by itself, and transformers imports torch_npu; where CANN is missing both fail.
So the commands of offbeat hide it (`offbeat_core.defer_device_backends`), and this module imports it where wanted.

MindSpeed makes megatron-core run on NPUs by replacing functions of it. Importing `mindspeed.megatron_adaptor` patches
torch, and megatron as it is imported; `repatch` does it again for other settings. Both must be over before megatron
makes its groups: what holds the old functions by then keeps them.

Source: torch 2.13.0, torch/__init__.py, `_import_device_backends`; torch_npu 2.13.0, torch_npu/__init__.py;
transformers 5.19, transformers/utils/import_utils.py, `is_torch_npu_available`; Ascend/MindSpeed,
mindspeed/megatron_adaptor.py; `repatch` as called by verl, verl/workers/engine/mindspeed.
"""

import importlib
import sys
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any, Final

import torch

from offbeat_core import BackendError, defer_device_backends, restore_module

RUNTIME: Final = "torch_npu"
INSTALL: Final = 'pip install "offbeat-npu[engine]", on a machine with the NPU driver and CANN'


def load_runtime() -> Any:
    """torch.npu, the module of streams, memory and random numbers; a BackendError says why there is none."""
    if not hasattr(torch, "npu"):
        load_operators()
    return torch.npu  # type: ignore[attr-defined]


def load_operators() -> ModuleType:
    """torch_npu itself, whose functions are the platform's fused operators; errors as of `load_runtime`."""
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


ADAPTOR: Final = "mindspeed.megatron_adaptor"
PARALLEL_STATE: Final = "megatron.core.parallel_state"
MINDSPEED_INSTALL: Final = (
    "clone https://gitcode.com/Ascend/MindSpeed, check out the branch of your megatron-core, pip install -e ."
)


_patched_for: Final[list[dict[str, Any]]] = []
"""The settings of the last patch, which holds for the whole process; empty before the first."""


def patch_megatron(settings: Mapping[str, Any]) -> None:
    """Patch megatron-core for NPUs; the same settings again change nothing, so a second engine may come any time.

    Args:
        settings: arguments in Megatron's words, such as {"tensor_model_parallel_size": 2, "use_flash_attn": True}.

    Raises:
        BackendError: torch_npu or MindSpeed is not installed; or it is too late: megatron has been imported without the
            patches, or has its groups and is patched for other settings.
    """
    if ADAPTOR in sys.modules and _patched_for == [dict(settings)]:
        return
    _refuse_late_patches()
    load_operators()
    words, sys.argv = sys.argv, sys.argv[:1]  # the adaptor reads the command line on import, as if it were Megatron's
    try:
        adaptor = importlib.import_module(ADAPTOR)
    except ImportError as error:
        raise BackendError(f"MindSpeed does not import: {error}; {MINDSPEED_INSTALL}") from error
    finally:
        sys.argv = words
    adaptor.repatch(dict(settings))
    _patched_for[:] = [dict(settings)]


def _refuse_late_patches() -> None:
    state = sys.modules.get(PARALLEL_STATE)
    if state is None:
        return
    if state.model_parallel_is_initialized():
        raise BackendError(
            "MindSpeed must patch megatron-core before its groups exist, and they do, without patches or for other "
            "settings: open the NPU engine before anything calls initialize_model_parallel, and close it before one "
            "with other settings"
        )
    if ADAPTOR not in sys.modules:
        raise BackendError(
            "MindSpeed must patch megatron-core before it is imported, and it is already: import offbeat's engine "
            "first, or `import mindspeed.megatron_adaptor` at the top of your program"
        )
