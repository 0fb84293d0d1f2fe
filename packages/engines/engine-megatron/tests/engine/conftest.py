"""Tests on the real engine, which the nox session `test(engine-megatron+engine)` has; elsewhere they are left out."""

import dataclasses
import gc
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

collect_ignore_glob = [] if find_spec("megatron") else ["test_*.py"]
torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[3] / "engine-torch/tests"))  # for pictured_sequences

if find_spec("megatron"):
    from megatron_layouts import MODELS, MORE_FAMILIES, Layout, engine_config, make_model

    from offbeat_engine_megatron import MegatronTrainEngine
    from offbeat_engine_megatron._megatron import load_megatron

    warnings.filterwarnings("ignore", module="megatron")
    load_megatron()  # here, once: ranks are forked from this process
    gc.freeze()  # else each rank's first collection copies all the pages of what is imported: a third of its time


def pytest_collection_modifyitems(items):
    """megatron-core warns of itself at every call."""
    for item in items:
        for kind in (UserWarning, DeprecationWarning, FutureWarning):
            item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind.__name__}"))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folder of each of `megatron_layouts.MODELS` and `MORE_FAMILIES`."""
    place = tmp_path_factory.mktemp("models")
    return {name: make_model(place / name, name) for name in (*MODELS, *MORE_FAMILIES)}


@pytest.fixture(scope="session")
def model_folder(models):
    return models["qwen3"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder that ranks, and the tests of a file, share."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def create(models):
    """Makes an engine for a layout, with other settings where asked; those of this process are closed at the end."""
    made = []

    def make(layout=None, mesh=None, *, folder=None, **changes):
        layout = layout or Layout()
        config = dataclasses.replace(engine_config(folder or models[layout.model], layout), **changes)
        made.append(MegatronTrainEngine.create(config, mesh))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    gc.collect()  # what an engine that could not be made has left: groups must not outlive a fork
