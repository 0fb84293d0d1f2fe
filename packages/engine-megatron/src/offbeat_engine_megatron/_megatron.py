"""The one place that imports megatron-core, and says how to install it where it is missing."""

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from offbeat_types import INSTALL_LINES, BackendError

NOTICES = (
    "(Transformer Engine and )?Apex (is|are) not installed",
    "full scope is deprecated",
    "When using (sequence parallelism|async grad allreduce) it is recommended",
    "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
)
"""What megatron-core, and torch about it, warn of at every start: nothing that a user could act upon."""

MODULES = (
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.parallel_state",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel",
)


def require_megatron() -> None:
    """Raise when megatron-core is not installed.

    Raises:
        BackendError: with the install line.
    """
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        line = INSTALL_LINES["offbeat.engine", "megatron"]
        raise BackendError(f"the megatron engine needs megatron-core, which is not installed; install it with: {line}")


def load_megatron(*, compiled: bool = False) -> None:
    """Import what the engine uses of megatron-core, and silence `NOTICES`; the second time is without effect.

    Args:
        compiled: let megatron-core wrap its small functions in torch.compile. On a CPU compiling them costs more
            than it ever saves, and their import would load the compiler (6.4 s instead of 4.0 s).

    Raises:
        BackendError: it is not installed.
    """
    if all(name in sys.modules for name in MODULES):
        return
    require_megatron()
    for notice in NOTICES:
        warnings.filterwarnings("ignore", message=notice)
    _import(compiled=compiled)


def _import(*, compiled: bool) -> None:
    original = torch.compile
    if not compiled:
        torch.compile = _as_it_is
    try:
        for name in MODULES:
            import_module(name)
    finally:
        torch.compile = original


def _as_it_is(model: Any = None, **options: Any) -> Any:
    """torch.compile, doing nothing: as a function or as a decorator with options."""
    return model if model is not None else lambda wrapped: wrapped
