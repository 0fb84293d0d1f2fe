"""Tests of megatron-core on the stand-in device, in the environment of the Megatron engine; elsewhere left out.

The nox session `test(engine-megatron+engine)` runs this folder, by its name.
"""

import gc
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[2] / "engine-torch" / "tests")]
collect_ignore_glob = [] if find_spec("megatron") else ["test_*.py"]

if find_spec("megatron"):
    from offbeat_engine_megatron._megatron import load_megatron

    warnings.filterwarnings("ignore", module="megatron")
    load_megatron()  # here, once: ranks are forked from this process
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """megatron-core warns of itself at every call."""
    for item in items:
        if item.path.is_relative_to(HERE):
            for kind in (UserWarning, DeprecationWarning, FutureWarning):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind.__name__}"))
