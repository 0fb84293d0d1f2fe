"""What one layout has saved another goes on from: the next step is the undisturbed run's."""

import json

import numpy as np
import pytest
import torch
from megatron_layouts import Layout, engine_config, make_model
from megatron_yardstick import train_steps

from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_mesh import Mesh
from offbeat_testing import reference_model, tiny_model
from offbeat_types import ModelError

MODELS = ("qwen3", "qwen3-moe")
WRITERS = [
    Layout(),
    Layout(axes={"tp": 2, "pp": 2}),
    Layout(axes={"cp": 2, "dp": 2}),
    Layout(axes={"pp": 2, "dp": 2}, options={"virtual_pipeline": 2}),
    Layout(axes={"dp": 2}, options={"distributed_optimizer": False}),
    Layout(axes={"dp": 2}, options={"overlap_grad_reduce": True, "overlap_param_gather": True}),
    Layout(model="qwen3-moe", axes={"dp": 2, "ep": 2}),
    Layout(model="qwen3-moe", axes={"tp": 2, "pp": 2}),
]
READERS = [
    Layout(),
    Layout(axes={"tp": 2}),
    Layout(axes={"pp": 2, "dp": 2}),
    Layout(axes={"dp": 4}, options={"overlap_grad_reduce": True, "overlap_param_gather": True}),
    Layout(axes={"dp": 2}, options={"distributed_optimizer": False}),
    Layout(model="qwen3-moe", axes={"tp": 2, "dp": 2, "ep": 2}),
    Layout(model="qwen3-moe", axes={"pp": 2}),
]


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A folder that ranks and tests share: models, checkpoints by writer, and what the undisturbed run told."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for model in MODELS:
        make_model(folder / model, model)
    return folder


def on(layouts):
    return [pytest.param(each, marks=pytest.mark.mesh(**({"dp": 1} | each.axes), deadline_s=120)) for each in layouts]


def place_of(runs, layout):
    return runs / str(layout).replace(" ", "-").replace(",", "")


@pytest.mark.nightly
@pytest.mark.timeout(180)
@pytest.mark.parametrize("layout", on(WRITERS), ids=str)
def test_a_layout_saves(runs, layout, mesh):
    """Two steps, a checkpoint, two more steps."""
    engine = MegatronTrainEngine.create(engine_config(runs / layout.model, layout), mesh)
    train_steps(engine, 0, 2)
    engine.save(place_of(runs, layout))
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    told = train_steps(engine, 2, 4)
    if engine.leader:
        (place_of(runs, layout) / "told.json").write_text(json.dumps(told))
        names = {name for name, _ in reference_model(place_of(runs, layout)).named_parameters()}
        assert names == weights.keys() or "moe" in layout.model
    engine.close()


@pytest.mark.nightly
@pytest.mark.timeout(180)
@pytest.mark.parametrize("layout", on(READERS), ids=str)
def test_a_layout_goes_on_from_what_any_other_saved(runs, layout, mesh):
    engine = MegatronTrainEngine.create(engine_config(runs / layout.model, layout), mesh)
    for number, writer in enumerate(each for each in WRITERS if each.model == layout.model):
        if number == 1:  # the first time the optimizer is a fresh one; later there is the run before to forget
            train_steps(engine, 7, 8)
        engine.load(place_of(runs, writer))
        assert engine.steps_taken == 2
        wanted = json.loads((place_of(runs, writer) / "told.json").read_text())
        np.testing.assert_allclose(train_steps(engine, 2, 4), wanted, rtol=1e-5, atol=1e-5, err_msg=str(writer))


@pytest.mark.timeout(180)
@pytest.mark.mesh(dp=4, deadline_s=120)
def test_ranks_go_on_in_another_layout(runs, mesh):
    """One of the pairs above, in the same processes one after the other."""

    def create(**sizes):
        return MegatronTrainEngine.create(engine_config(runs / "qwen3", Layout(options=sizes)), mesh)

    engine = create(tensor_parallel=2, pipeline_parallel=2)
    train_steps(engine, 0, 1)
    engine.save(runs / "shared")
    told = train_steps(engine, 1, 2)
    engine.close()
    engine = create(context_parallel=2)
    engine.load(runs / "shared")
    np.testing.assert_allclose(train_steps(engine, 1, 2), told, rtol=1e-5, atol=1e-5)
    engine.close()


def test_one_process_goes_on_bit_for_bit(runs, tmp_path):
    layout = Layout()
    engine, other = (MegatronTrainEngine.create(engine_config(runs / "qwen3", layout)) for _ in range(2))
    train_steps(engine, 0, 2)
    engine.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    assert train_steps(engine, 2, 4) == train_steps(other, 2, 4)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(engine.weights(), other.weights(), strict=True))
    engine.close()
    other.close()


@pytest.mark.mesh(dp=2, compare=False)
def test_a_checkpoint_before_the_first_step(runs, mesh, tmp_path_factory):
    engine = MegatronTrainEngine.create(engine_config(runs / "qwen3", Layout()), mesh)
    folder = tmp_path_factory.getbasetemp() / "unstepped"
    engine.save(folder)
    first = train_steps(engine, 0, 2)
    engine.load(folder)
    np.testing.assert_allclose(train_steps(engine, 0, 2), first, rtol=1e-6)


BAD = {"no checkpoint": "not a checkpoint that", "another model": "another model", "cut short": "cut short"}


@pytest.mark.mesh(tp=2, compare=False)
@pytest.mark.parametrize(("what", "told"), BAD.items(), ids=BAD)
def test_a_bad_checkpoint_is_refused_on_all_ranks(runs, mesh, tmp_path_factory, what, told):
    folder = tmp_path_factory.getbasetemp() / f"bad-{what}"
    engine = MegatronTrainEngine.create(engine_config(runs / "qwen3", Layout()), mesh)
    engine.save(folder)
    if engine.leader:
        trainer = folder / "trainer"
        if what == "no checkpoint":
            (trainer / "engine.json").unlink()
        elif what == "another model":
            tiny_model(folder)
        else:
            moments = (trainer / "optimizer.safetensors").read_bytes()
            (trainer / "optimizer.safetensors").write_bytes(moments[:-100])
    mesh.group("tp").barrier()
    train_steps(engine, 0, 1)
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    with pytest.raises(ModelError, match=told):
        engine.load(folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.weights())
    train_steps(engine, 1, 2)  # and it goes on
    assert engine.steps_taken == 2


def test_a_mesh_is_not_needed(runs):
    MegatronTrainEngine.create(engine_config(runs / "qwen3", Layout()), Mesh()).close()
