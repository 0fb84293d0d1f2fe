"""torch.compile as the engines use it: one graph for every length, and nothing read that others can write."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

RECOMPILE_LIMIT: Final = 64
"""Graphs that one function may have: with and without gradient, a window, adapters, prompts that are shared."""

_FOLDER: Final = "TORCHINDUCTOR_CACHE_DIR"
_OPTIONS: Final[dict[str, Any]] = {
    "compile_threads": 1,  # no processes beside this one: a layer has few kernels
    "fx_graph_cache": False,  # its files are pickles
}


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a function that computes the same, compiled at its first call; call `prepare_compiler` before that.

    Sizes of tensors and numbers among the arguments may change from call to call. Python that cannot be traced raises.

    Args:
        function: of tensors.
        options: of torch's code generator (`torch._inductor.config`), beside this package's.
    """
    made: Callable[..., Any] = torch.compile(function, dynamic=True, fullgraph=True, options=_OPTIONS | options)
    return made


def prepare_compiler() -> None:
    """Let compiled code be kept where this user alone can write, instead of in a folder of /tmp with a known name."""
    # Here, as it takes seconds to import, which only what compiles should spend.
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, RECOMPILE_LIMIT)
    settings.specialize_float = True  # an epsilon is a constant, and not an input of each graph
    # A backward pass that cannot be compiled raises in the forward pass: later, other ranks would wait for this one.
    torch._functorch.config.force_non_lazy_backward_lowering = True
    # Importing torch's tracer, as these lines and other libraries do, sets the variable to the folder of /tmp.
    if os.environ.get(_FOLDER, default_cache_dir()) != default_cache_dir():
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offbeat" / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
    except OSError:  # a home that cannot be written to, or is not this user's
        folder = Path(tempfile.mkdtemp(prefix="offbeat-compiled-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[_FOLDER] = str(folder)
