"""Tests on the real engine, which the nox session `test(engine-megatron+engine)` has; elsewhere they are left out."""

import gc
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from offbeat_testing import tiny_model

collect_ignore_glob = [] if find_spec("megatron") else ["test_*.py"]
torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[3] / "engine-torch/tests"))  # for pictured_sequences

if find_spec("megatron"):
    from offbeat_engine_megatron._megatron import load_megatron

    warnings.filterwarnings("ignore", module="megatron")
    load_megatron()  # here, once: ranks are forked from this process
    import_module("offbeat_engine_megatron._build")
    gc.freeze()  # else each rank's first collection copies all the pages of what is imported: a third of its time


def pytest_collection_modifyitems(items):
    """megatron-core warns of itself at every call."""
    for item in items:
        for kind in (UserWarning, DeprecationWarning, FutureWarning):
            item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind.__name__}"))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("megatron") / "qwen3", hidden_size=32, num_layers=4, num_kv_heads=4)
