"""What the tests of the NPU package share."""

import shutil
import sys
from pathlib import Path

import pytest

from offbeat_types import defer_device_backends

sys.path.insert(0, str(Path(__file__).parent))  # for npu_standin
defer_device_backends()  # tests/engine runs beside torch-npu


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for the device, built; skipped where there is no compiler."""
    if not (shutil.which("c++") and shutil.which("ninja")):
        pytest.skip("the stand-in for the device is built with a C++ compiler and ninja, which are not here")
    import npu_standin  # imports torch: after the line above

    return npu_standin.build(tmp_path_factory.mktemp("standin"))
