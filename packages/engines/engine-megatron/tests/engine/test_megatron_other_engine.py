"""Either engine resumes from what the other has saved: the next two steps are those of the run that saved."""

import json

import numpy as np
import pytest
from megatron_layouts import Layout, engine_config, params_of
from megatron_yardstick import train_steps

from offbeat_engine_torch import TorchTrainEngine

TORCH = {"llama": Layout(model="llama", axes={"dp": 2}), "qwen3": Layout(axes={"tp": 2, "dp": 2})}
MEGATRON = {
    "llama": Layout(model="llama", axes={"cp": 2, "dp": 2}),
    "qwen3": Layout(axes={"tp": 2, "pp": 2}),
}


def create_torch(models, layout, mesh=None):
    return TorchTrainEngine.create(engine_config(models[layout.model], layout), mesh)


def save_and_continue(engine, place):
    done = engine.steps_taken
    train_steps(engine, done, done + 2)
    engine.save(place)
    reported = [done + 2, train_steps(engine, done + 2, done + 4)]
    if engine.leader:
        (place / "reported.json").write_text(json.dumps(reported))


def resume(engine, place):
    train_steps(engine, 5, 6)  # something to forget
    engine.load(place)
    done, reported = json.loads((place / "reported.json").read_text())
    assert engine.steps_taken == done
    np.testing.assert_allclose(train_steps(engine, done, done + 2), reported, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", params_of(list(TORCH.values())))
def test_the_torch_engine_saves(models, shared, mesh, layout):
    save_and_continue(create_torch(models, layout, mesh), shared / f"torch-{layout.model}")


@pytest.mark.nightly
@pytest.mark.parametrize("layout", params_of(list(MEGATRON.values())))
def test_this_engine_goes_on_from_there_and_saves(create, shared, mesh, layout):
    engine = create(layout, mesh)
    resume(engine, shared / f"torch-{layout.model}")
    save_and_continue(engine, shared / f"megatron-{layout.model}")


@pytest.mark.nightly
@pytest.mark.parametrize("layout", params_of(list(TORCH.values())))
def test_the_torch_engine_goes_on_from_there(models, shared, mesh, layout):
    resume(create_torch(models, layout, mesh), shared / f"megatron-{layout.model}")


def test_with_adapters_too(create, models, tmp_path):
    """LoRA, in one process each."""
    layout = Layout(lora=True)
    save_and_continue(create_torch(models, layout), tmp_path / "torch")
    ours = create(layout)
    resume(ours, tmp_path / "torch")
    ours.load(tmp_path / "torch")
    save_and_continue(ours, tmp_path / "megatron")
    resume(create_torch(models, layout), tmp_path / "megatron")
