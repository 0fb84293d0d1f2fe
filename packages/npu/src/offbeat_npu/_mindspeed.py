"""MindSpeed, which makes megatron-core run on NPUs by replacing functions of it; only in time, or not at all.

Importing `mindspeed.megatron_adaptor` patches torch, and megatron as it is imported; `repatch` does it again for
other settings. Both must be over before megatron makes its groups: what holds the old functions by then keeps them.
Source: Ascend/MindSpeed, mindspeed/megatron_adaptor.py; `repatch` as called by verl, verl/workers/engine/mindspeed.
"""

import importlib
import sys
from collections.abc import Mapping
from typing import Any, Final

from offbeat_npu._runtime import load_operators
from offbeat_types import BackendError

ADAPTOR: Final = "mindspeed.megatron_adaptor"
PARALLEL_STATE: Final = "megatron.core.parallel_state"
INSTALL: Final = (
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
        raise BackendError(f"MindSpeed does not import: {error}; {INSTALL}") from error
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
