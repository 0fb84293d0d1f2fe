"""Run by Python at its start, in the tests' child processes, from a folder on PYTHONPATH: see `conftest.py`.

torchvision's wheels for Linux are built for CUDA. Beside a torch built for the CPU their operators cannot be loaded,
and torchvision then fails to import, because it describes two of them. Once those two are declared it imports, and what
image processors use of it, resizing and interpolation, is torch's own. A torchvision built for the CPU needs none of
this.

Source: torchvision 0.28.0, torchvision/_meta_registrations.py (register_fake) and csrc/ops/nms.cpp (schemas).
"""

from importlib.util import find_spec
from pathlib import Path

BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
LIBRARIES = []


def is_built_for_cuda():
    """Whether there is a torchvision, and it names CUDA in its version. Does not import it."""
    spec = find_spec("torchvision")
    return spec is not None and "+cu" in (Path(spec.origin).parent / "version.py").read_text()


def declare_operators():
    """Give torchvision the two operators that it describes while it is imported, where it cannot load its own."""
    import torch

    if torch.version.cuda is None and not LIBRARIES:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(name + BOXES)
        LIBRARIES.append(library)  # operators go with their library


if is_built_for_cuda():
    declare_operators()
