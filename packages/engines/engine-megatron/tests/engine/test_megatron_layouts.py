"""Every layout trains as plain transformers does: loss, gradients, norm, weights after two steps, to 1e-5."""

import dataclasses

import pytest
from megatron_layouts import LAYOUTS, Layout, params_of, train_with_engine
from megatron_yardstick import compare, train_with_transformers

from offbeat_mesh import Mesh

TOLERANCE = 1e-5
ONE_OF_A_KIND = {
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
    "qwen3-moe, dp2 ep2, experts=sequential",
    "qwen2-moe, tp2 ep2",
    "glm4-moe, cp2 pp2 ep2",
    "deepseek-v3, tp2 ep2",
}
"""One layout for each kind of parallelism and each family; the others only vary them further."""

IN_CI = [each for each in LAYOUTS if str(each) in ONE_OF_A_KIND]


@pytest.fixture(scope="session")
def trained(models):
    """What transformers makes of each model; made once."""
    known = {}

    def get(layout):
        kind = layout.model, layout.lora
        if kind not in known:
            known[kind] = train_with_transformers(models[layout.model], lora=layout.lora)
        return known[kind]

    return get


@pytest.fixture
def yardstick(request, trained):
    return trained(request.getfixturevalue("layout"))


@pytest.mark.parametrize("layout", params_of(LAYOUTS, IN_CI))
def test_a_layout_trains_as_transformers_does(create, layout, mesh, yardstick):
    found = train_with_engine(create(layout, mesh))
    errors = dataclasses.asdict(compare(found, yardstick))
    assert max(errors.values()) < TOLERANCE, errors
    assert bool(found.gradients) != bool(layout.options.get("overlap_grad_reduce"))


def test_there_are_as_many_layouts_as_promised():
    assert len({str(layout) for layout in LAYOUTS}) == len(LAYOUTS) >= 40
    assert len(IN_CI) == len(ONE_OF_A_KIND)


@pytest.fixture
def layout():
    return Layout()


@pytest.mark.nightly
@pytest.mark.mesh(dp=8, deadline_s=120)
def test_a_mesh_of_data_parallel_ranks_is_cut_by_the_options(create, mesh, yardstick):
    """As the applications make it: so many ranks, and the options say how they share the model."""
    options = {"tensor_parallel": 2, "context_parallel": 2, "pipeline_parallel": 2}
    engine = create(Layout(options=options), mesh)
    assert engine.mesh.axes == {"dp": 1, "cp": 2, "tp": 2, "pp": 2, "ep": 1, "edp": 4}
    assert max(dataclasses.asdict(compare(train_with_engine(engine), yardstick)).values()) < TOLERANCE


def test_a_process_alone_needs_no_world(create, yardstick):
    for mesh in (None, Mesh()):
        engine = create(mesh=mesh)
        assert max(dataclasses.asdict(compare(train_with_engine(engine), yardstick)).values()) < TOLERANCE
