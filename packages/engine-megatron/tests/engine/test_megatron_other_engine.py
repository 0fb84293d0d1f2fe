"""Either engine goes on from what the other has saved: the next two steps are those of the run that saved."""

import dataclasses
import json

import numpy as np
import pytest
from megatron_layouts import Layout, engine_config, make_model
from megatron_yardstick import train_steps

from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_engine_torch import TorchTrainEngine

MODELS = ("qwen3", "llama")


def on(pairs):
    return [pytest.param(*pair, marks=pytest.mark.mesh(**pair[1], deadline_s=120)) for pair in pairs]


TORCH = [("llama", {"dp": 2}), ("qwen3", {"tp": 2, "dp": 2})]
MEGATRON = [("llama", {"cp": 2, "dp": 2}), ("qwen3", {"tp": 2, "pp": 2})]


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A folder that ranks and tests share: models, and checkpoints by engine, model and layout."""
    folder = tmp_path_factory.mktemp("engines")
    for model in MODELS:
        make_model(folder / model, model)
    return folder


def config(folder, *, lora=False):
    return dataclasses.replace(engine_config(folder, Layout()), lora_rank=4 if lora else 0)


def place_of(runs, kind, model, axes):
    return runs / "-".join([kind, model, *(f"{axis}{size}" for axis, size in axes.items())])


def save_and_go_on(engine, place):
    done = engine.steps_taken
    train_steps(engine, done, done + 2)
    engine.save(place)
    told = [done + 2, train_steps(engine, done + 2, done + 4)]
    if engine.leader:
        (place / "told.json").write_text(json.dumps(told))


def go_on(engine, place):
    train_steps(engine, 5, 6)  # something to forget
    engine.load(place)
    done, told = json.loads((place / "told.json").read_text())
    assert engine.steps_taken == done
    np.testing.assert_allclose(train_steps(engine, done, done + 2), told, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("model", "axes"), on(TORCH))
def test_the_torch_engine_saves(runs, mesh, model, axes):
    save_and_go_on(TorchTrainEngine.create(config(runs / model), mesh), place_of(runs, "torch", model, axes))


@pytest.mark.nightly
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("model", "axes"), on(MEGATRON))
def test_this_engine_goes_on_from_there_and_saves(runs, mesh, model, axes):
    engine = MegatronTrainEngine.create(config(runs / model), mesh)
    go_on(engine, place_of(runs, "torch", model, dict(TORCH)[model]))
    save_and_go_on(engine, place_of(runs, "megatron", model, axes))
    engine.close()


@pytest.mark.nightly
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("model", "axes"), on(TORCH))
def test_the_torch_engine_goes_on_from_there(runs, mesh, model, axes):
    engine = TorchTrainEngine.create(config(runs / model), mesh)
    go_on(engine, place_of(runs, "megatron", model, dict(MEGATRON)[model]))


def test_with_adapters_too(runs, tmp_path):
    """LoRA, in one process each."""
    theirs = TorchTrainEngine.create(config(runs / "qwen3", lora=True))
    save_and_go_on(theirs, tmp_path / "torch")
    ours = MegatronTrainEngine.create(config(runs / "qwen3", lora=True))
    go_on(ours, tmp_path / "torch")
    ours.load(tmp_path / "torch")
    save_and_go_on(ours, tmp_path / "megatron")
    ours.close()
    go_on(TorchTrainEngine.create(config(runs / "qwen3", lora=True)), tmp_path / "megatron")
