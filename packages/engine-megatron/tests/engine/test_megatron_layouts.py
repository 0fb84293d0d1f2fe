"""Every layout trains as plain transformers does: loss, gradients, norm, weights after two steps, to 1e-5."""

import dataclasses

import pytest
from megatron_layouts import LAYOUTS, Layout, engine_config, make_model, train_with_engine
from megatron_yardstick import compare, train_with_transformers

from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_mesh import Mesh

TOLERANCE = 1e-5
IN_CI = {
    "qwen3, one rank",
    "qwen3, tp2",
    "qwen3, cp2",
    "qwen3, dp2, overlap_grad_reduce=True, overlap_param_gather=True",
    "qwen3, tp2 cp2 pp2",
    "qwen3, pp2 dp2, virtual_pipeline=2",
    "qwen3, tp2, lora",
    "qwen2, tp2 pp2",
    "llama, one rank",
    "qwen3-moe, dp2 ep2",
}
"""One layout for each kind of parallelism and each family; the others only vary them further."""


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Of each model its folder, and what transformers makes of it; made once."""
    known = {}

    def get(layout):
        kind = layout.model, layout.lora
        if kind not in known:
            folder = make_model(tmp_path_factory.mktemp("layouts") / layout.model, layout.model)
            known[kind] = folder, train_with_transformers(folder, lora=layout.lora)
        return known[kind]

    return get


@pytest.fixture
def yardstick(request, trained):
    return trained(request.getfixturevalue("layout"))


def on_ranks(layout):
    marks = [pytest.mark.mesh(**({"dp": 1} | layout.axes), deadline_s=120)]
    return pytest.param(layout, marks=marks if str(layout) in IN_CI else [*marks, pytest.mark.nightly])


@pytest.mark.timeout(180)
@pytest.mark.parametrize("layout", [on_ranks(each) for each in LAYOUTS], ids=str)
def test_a_layout_trains_as_transformers_does(layout, mesh, yardstick):
    folder, wanted = yardstick
    engine = MegatronTrainEngine.create(engine_config(folder, layout), mesh)
    found = train_with_engine(engine)
    errors = dataclasses.asdict(compare(found, wanted))
    assert max(errors.values()) < TOLERANCE, errors
    assert bool(found.gradients) != bool(layout.options.get("overlap_grad_reduce"))
    engine.close()


def test_there_are_as_many_layouts_as_promised():
    assert len({str(layout) for layout in LAYOUTS}) == len(LAYOUTS) >= 40
    assert {str(layout) for layout in LAYOUTS} > IN_CI


@pytest.mark.nightly
@pytest.mark.mesh(dp=8, deadline_s=120)
def test_a_mesh_of_data_parallel_ranks_is_cut_by_the_options(mesh, yardstick):
    """As the applications make it: so many ranks, and the options say how they share the model."""
    folder, wanted = yardstick
    options = {"tensor_parallel": 2, "context_parallel": 2, "pipeline_parallel": 2}
    engine = MegatronTrainEngine.create(engine_config(folder, Layout(options=options)), mesh)
    assert engine.mesh.axes == {"dp": 1, "cp": 2, "tp": 2, "pp": 2, "ep": 1, "edp": 4}
    assert max(dataclasses.asdict(compare(train_with_engine(engine), wanted)).values()) < TOLERANCE


@pytest.fixture
def layout():
    return Layout()


def test_a_process_alone_needs_no_world(yardstick):
    folder, wanted = yardstick
    engines = [MegatronTrainEngine.create(engine_config(folder, Layout()), mesh) for mesh in (None, Mesh())]
    for engine in engines:
        assert max(dataclasses.asdict(compare(train_with_engine(engine), wanted)).values()) < TOLERANCE
        engine.close()
