"""Points of megatron-core's passes: those of transformers by the same names, in each layout that has them whole."""

import numpy as np
import pytest
import torch
from megatron_layouts import Layout, params_of

from offbeat_core import POSITIONS, ModelError, TrainSequence
from offbeat_testing import reference_model, tiny_model
from offbeat_training import record_points

IDS = np.random.default_rng(7).integers(3, 250, 23).astype(np.int32)
SEQUENCE = TrainSequence(ids=IDS, loss_mask=np.arange(len(IDS)) > 0)


def points_of(folder, layer):
    """Values of transformers, but positions, which megatron-core has none of."""
    model = reference_model(folder)
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), record_points(model, layer) as found:
        model(torch.from_numpy(IDS).long()[None], use_cache=False, position_ids=torch.arange(len(IDS))[None])
    return {point: values.numpy() for point, values in found.items() if point != POSITIONS}


def check_points(engine, folder):
    """Compare all layers on the first rank, which answers; the last token is left out."""
    num_layers = engine._plan.shape.num_layers
    for layer in (None, *range(num_layers)):
        found, wanted = engine.inspect(SEQUENCE, layer), points_of(folder, layer)
        if any(engine.mesh.coordinates.values()):
            continue
        assert [*found] == [*wanted]
        for point, values in found.items():
            assert values.shape == (len(IDS) - 1, wanted[point].shape[1]), point
            assert np.abs(values - wanted[point][:-1]).max() < 1e-4, (layer, point)
    with pytest.raises(ModelError, match=f"has layers 0 to {num_layers - 1}"):
        engine.inspect(SEQUENCE, num_layers)


@pytest.mark.parametrize("model", ["qwen3", "llama", "qwen3-moe"])
def test_every_point_has_the_values_of_transformers(create, models, model):
    check_points(create(Layout(model=model)), models[model])


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """A model with several queries for each key, which megatron-core's projection has in another order."""
    return tiny_model(tmp_path_factory.mktemp("grouped"), "qwen2", num_heads=8, num_kv_heads=4)


@pytest.mark.mesh(tp=2)
def test_heads_of_groups_come_in_the_order_of_the_folder(create, mesh, grouped):
    check_points(create(mesh=mesh, folder=grouped), grouped)


LAYOUTS = (
    Layout(axes={"tp": 2}),
    Layout(axes={"tp": 2}, options={"sequence_parallel": False}),
    Layout(axes={"tp": 2, "pp": 2}),
    Layout(axes={"dp": 2}),
    Layout(model="qwen3-moe", axes={"tp": 2, "pp": 2}),
    Layout(model="qwen3-moe", axes={"dp": 2, "ep": 2}),
)


@pytest.mark.parametrize("layout", params_of(LAYOUTS))
def test_ranks_put_together_what_they_share(create, models, mesh, layout):
    check_points(create(layout, mesh), models[layout.model])


@pytest.mark.parametrize(
    ("mesh", "options"), [({"cp": 2}, {}), ({"pp": 2}, {"virtual_pipeline": 2})], ids=str, indirect=["mesh"]
)
@pytest.mark.mesh
def test_what_is_not_put_together_is_left_out(create, mesh, options):
    assert create(Layout(options=options), mesh).inspect(SEQUENCE) == {}


def test_what_was_watched_computes_as_before(create):
    engine = create()
    before = engine.logprobs([SEQUENCE])
    engine.inspect(SEQUENCE, 0)
    assert np.array_equal(engine.logprobs([SEQUENCE])[0], before[0])
    assert not any(module._forward_pre_hooks for part in engine._policy.parts for module in part.modules())
