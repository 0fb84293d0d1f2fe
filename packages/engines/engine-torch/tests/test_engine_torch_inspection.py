"""Values that the trainer computes on the way to log-probabilities, by the names that sampling engines use too."""

import numpy as np
import pytest
import torch

from offbeat_core import LAYER_POINTS, ModelError, TrainEngineConfig, TrainSequence
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import reference_model, tiny_model
from offbeat_training import record_points

NUM_TOKENS = 23


def config(folder, **settings):
    return TrainEngineConfig(model_path=str(folder), device="cpu", num_threads=1, **settings)


def sequence():
    ids = np.random.default_rng(3).integers(3, 300, NUM_TOKENS).astype(np.int32)
    return TrainSequence(ids=ids, loss_mask=np.arange(NUM_TOKENS) > 4)


def points_of(folder, layer):
    """Return the points of transformers' own model."""
    model = reference_model(folder)
    model.set_attn_implementation("sdpa")
    ids = torch.from_numpy(sequence().ids).long()[None]
    with torch.no_grad(), record_points(model, layer) as found:
        model(ids, use_cache=False, position_ids=torch.arange(NUM_TOKENS)[None])
    return {point: values[:-1].numpy() for point, values in found.items()}


def assert_same(found, wanted, allowed=1e-4):
    for point, values in found.items():
        assert np.abs(values - wanted[point]).max() < allowed, point


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe", "olmo3", "qwen3_5_text"])
def test_points_are_those_of_transformers(tmp_path, family):
    folder = tiny_model(tmp_path, family)
    engine = TorchTrainEngine.create(config(folder))
    for layer in (None, 0, 1):
        found, wanted = engine.inspect(sequence(), layer), points_of(folder, layer)
        assert [*found] == [*wanted]
        assert_same(found, wanted)


def test_an_adapter_is_seen_in_the_projection_that_has_it(tmp_path):
    folder = tiny_model(tmp_path, "qwen3")
    engine = TorchTrainEngine.create(config(folder, lora_rank=4))
    for piece in engine._policy.pieces:
        if piece.name.endswith("layers.1.self_attn.v_proj.lora_B"):
            piece.local.fill_(0.1)
    wanted = points_of(folder, 1)
    differing = [
        point for point, values in engine.inspect(sequence(), 1).items() if np.abs(values - wanted[point]).max() > 1e-3
    ]
    assert differing[0] == "value projection"


@pytest.mark.mesh(dp=2, compare=False)
def test_the_first_rank_answers_for_all(model_folder, mesh):
    engine = TorchTrainEngine.create(config(model_folder), mesh)
    found = engine.inspect(sequence(), 1)
    if mesh.group("dp").rank == 0:
        assert {*found} == {*LAYER_POINTS} - {"experts"}
        assert_same(found, points_of(model_folder, 1))


@pytest.mark.mesh(tp=2, compare=False)
def test_what_ranks_hold_in_part_is_left_out_or_narrower(model_folder, mesh):
    engine = TorchTrainEngine.create(config(model_folder), mesh)
    found, wanted = engine.inspect(sequence(), 1), points_of(model_folder, 1)
    whole = {point: values for point, values in found.items() if values.shape == wanted[point].shape}
    assert {*whole} >= {"attention input", "after attention", "mlp input"}
    assert "query" not in whole
    assert_same(whole, wanted)


def test_compiled_layers_are_seen_inside(tmp_path):
    folder = tiny_model(tmp_path, "qwen3")
    engine = TorchTrainEngine.create(config(folder))
    layer = engine._policy.model.decoder.layers[1]
    layer.compile(backend="eager")
    engine._policy.is_compiled = True
    engine.logprobs([sequence()])
    assert_same(engine.inspect(sequence(), 1), points_of(folder, 1))


def test_a_layer_that_is_not_there_is_refused(tmp_path):
    engine = TorchTrainEngine.create(config(tiny_model(tmp_path, "qwen3")))
    with pytest.raises(ModelError, match=r"layer 2 was asked for, and .* has layers 0 to 1"):
        engine.inspect(sequence(), 2)
