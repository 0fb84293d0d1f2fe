"""Either engine goes on from what the other has saved: the next two steps are those of the run that saved."""

import dataclasses
import json

import numpy as np
import pytest
from megatron_layouts import Layout, engine_config, make_model, make_sequences, policy_loss

from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_engine_torch import TorchTrainEngine

MODELS = ("qwen3", "llama")
TORCH = [pytest.param(axes, marks=pytest.mark.mesh(**axes, deadline_s=120)) for axes in ({"dp": 2}, {"tp": 2, "dp": 2})]
MEGATRON = [
    pytest.param(axes, marks=pytest.mark.mesh(**axes, deadline_s=120))
    for axes in ({"tp": 2, "pp": 2}, {"cp": 2, "dp": 2})
]


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A folder that ranks and tests share: models, and checkpoints by engine, model and layout."""
    folder = tmp_path_factory.mktemp("engines")
    for model in MODELS:
        make_model(folder / model, model)
    return folder


def config(folder, *, lora=False):
    return dataclasses.replace(engine_config(folder, Layout()), lora_rank=4 if lora else 0)


def train(engine, first, last):
    told = []
    for step in range(first, last):
        told.append(engine.forward_backward(make_sequences(step), policy_loss)["loss"].value)
        told.append(engine.step()["grad_norm"].value)
    return told


def place_of(runs, kind, model, axes):
    return runs / "-".join([kind, model, *(f"{axis}{size}" for axis, size in axes.items())])


def save_and_go_on(engine, place):
    train(engine, 0, 2)
    engine.save(place)
    told = train(engine, 2, 4)
    if engine.leader:
        (place / "told.json").write_text(json.dumps(told))


def go_on(engine, place):
    train(engine, 5, 6)  # something to forget
    engine.load(place)
    np.testing.assert_allclose(train(engine, 2, 4), json.loads((place / "told.json").read_text()), rtol=1e-5, atol=1e-5)
    assert engine.steps_taken == 4


@pytest.mark.timeout(180)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("axes", TORCH, ids=str)
def test_the_torch_engine_saves(runs, mesh, model, axes):
    save_and_go_on(TorchTrainEngine.create(config(runs / model), mesh), place_of(runs, "torch", model, axes))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("axes", MEGATRON, ids=str)
def test_this_engine_goes_on_from_there_and_saves(runs, mesh, axes):
    for model in MODELS:
        engine = MegatronTrainEngine.create(config(runs / model), mesh)
        for theirs in TORCH:
            go_on(engine, place_of(runs, "torch", model, theirs.values[0]))
        engine.close()
        engine = MegatronTrainEngine.create(config(runs / model), mesh)
        save_and_go_on(engine, place_of(runs, "megatron", model, axes))
        engine.close()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("axes", TORCH, ids=str)
def test_the_torch_engine_goes_on_from_there(runs, mesh, model, axes):
    engine = TorchTrainEngine.create(config(runs / model), mesh)
    for theirs in MEGATRON:
        go_on(engine, place_of(runs, "megatron", model, theirs.values[0]))


def test_with_adapters_too(runs, tmp_path):
    """LoRA, in one process each."""
    theirs = TorchTrainEngine.create(config(runs / "qwen3", lora=True))
    save_and_go_on(theirs, tmp_path / "torch")
    ours = MegatronTrainEngine.create(config(runs / "qwen3", lora=True))
    go_on(ours, tmp_path / "torch")
    ours.load(tmp_path / "torch")
    save_and_go_on(ours, tmp_path / "megatron")
    ours.close()
    go_on_from = TorchTrainEngine.create(config(runs / "qwen3", lora=True))
    train(go_on_from, 5, 6)
    go_on_from.load(tmp_path / "megatron")
    wanted = json.loads((tmp_path / "megatron/told.json").read_text())
    np.testing.assert_allclose(train(go_on_from, 2, 4), wanted, rtol=1e-5, atol=1e-5)
