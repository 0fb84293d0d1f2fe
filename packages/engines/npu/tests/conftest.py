"""What the tests of the NPU package share."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from offbeat_core import defer_device_backends

sys.path.insert(0, str(Path(__file__).parent))  # for npu_standin
defer_device_backends()  # tests/engine runs beside torch-npu


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for the device, built; skipped where there is no compiler, but not by CI."""
    if not (shutil.which("c++") and shutil.which("ninja")):
        do_without = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        do_without("the stand-in for the device is built with a C++ compiler and ninja, which are not here")
    import npu_standin  # imports torch: after the line above

    return npu_standin.build(tmp_path_factory.mktemp("standin"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs whose processes are forks come first: once this process has computed gradients on a device, none can."""
    items.sort(key=lambda item: item.path.stem != "test_npu_run")
