"""No rank skips the vision tower: ranks with and without images train as one process, with the same collectives."""

import numpy as np
import pytest
import torch
from pictured_sequences import Pictures

from offbeat_core import ConfigError, DataError, PeerFailedError, TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import tiny_vision_model

FAMILIES = [("qwen3_vl", True), ("qwen3_vl", False), ("qwen2_5_vl", False), ("gemma3", True), ("gemma4", False)]

# Images of each prompt. One rank of all has any; none has; more ranks than sequences, so that some only keep company.
UPDATES = {"one image": (1, 0, 0, 0, 0, 0), "three of one": (0, 0, 3, 0), "none": (0, 0, 0), "one sequence": (1,)}


def config(folder, **changes):
    settings = {"learning_rate": 1e-3, "adam_eps": 1e-5, "max_tokens_per_microbatch": 160, "device": "cpu"}
    return TrainEngineConfig(model_path=str(folder), **settings | changes)


def train(engine, updates, loss):
    """What three updates and a question return, and the weights after them."""
    reported = []
    for sequences in updates:
        metrics = engine.forward_backward(sequences, loss)
        reported += [metrics["loss"].value if "loss" in metrics else 0.0, engine.step()["grad_norm"].value]
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    return reported, weights, engine.logprobs(updates[0]), engine.logprobs(updates[0], reference=True)


def assert_same(many, one, tolerance=1e-5):
    np.testing.assert_allclose(many[0], one[0], rtol=tolerance, atol=tolerance)
    assert list(many[1]) == list(one[1])
    for name, tensor in one[1].items():
        torch.testing.assert_close(many[1][name], tensor, rtol=tolerance, atol=tolerance, msg=name)
    for found, wanted in zip(many[2] + many[3], one[2] + one[3], strict=True):
        np.testing.assert_allclose(found, wanted, atol=4 * tolerance, rtol=0)


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def folder(request, tmp_path_factory):
    family, tied = request.param
    return tiny_vision_model(tmp_path_factory.mktemp("ranks-vision") / family, family, tied=tied)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return tiny_vision_model(tmp_path_factory.mktemp("ranks-vision") / "model")


@pytest.fixture(
    scope="module", params=[True, pytest.param(False, marks=pytest.mark.nightly)], ids=["trained", "frozen"]
)
def run(request, folder, weighted_loss):
    """Settings, updates, and what one process makes of them."""
    updates = [Pictures(folder).groups(counts, samples=1) for counts in UPDATES.values()]
    settings = config(folder, options={"train_vision": request.param})
    return settings, updates, train(TorchTrainEngine.create(settings), updates, weighted_loss)


@pytest.mark.parametrize(
    "mesh", [{"dp": 2}, {"cp": 2}, pytest.param({"dp": 4}, marks=pytest.mark.nightly)], ids=str, indirect=True
)
def test_ranks_without_images_keep_the_others_company(run, mesh, weighted_loss):
    settings, updates, of_one_process = run
    assert_same(train(TorchTrainEngine.create(settings, mesh), updates, weighted_loss), of_one_process)


CHANGES = {"lora": {"lora_rank": 4}, "checkpointing": {"activation_checkpointing": True}}


@pytest.mark.mesh(dp=2)
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(
    "train_vision", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["trained", "frozen"]
)
def test_settings_mean_the_same_on_ranks(qwen3, mesh, changes, train_vision, weighted_loss):
    updates = [Pictures(qwen3).groups(counts, samples=1) for counts in UPDATES.values()]
    settings = config(qwen3, options={"train_vision": train_vision}, **changes)
    one = train(TorchTrainEngine.create(settings), updates, weighted_loss)
    assert_same(train(TorchTrainEngine.create(settings, mesh), updates, weighted_loss), one)


@pytest.mark.mesh(dp=2)
def test_a_loss_that_fails_on_one_rank_leaves_no_rank_in_the_tower(qwen3, mesh):
    """Its own pack may be the only one with an image: the others wait for it there."""
    engine = TorchTrainEngine.create(config(qwen3, max_tokens_per_microbatch=64), mesh)
    sequences = Pictures(qwen3).groups((1, 0, 1, 0, 0, 0), samples=1)

    def fail(tokens):
        if mesh.rank == 0:
            raise ValueError("no")
        return tokens.logprobs_N.sum(), {}

    with pytest.raises(ValueError if mesh.rank == 0 else PeerFailedError, match="no"):
        engine.forward_backward(sequences, fail)
    assert len(engine.logprobs(sequences)) == len(sequences)


@pytest.mark.mesh(dp=2, compare=False)
def test_other_images_on_one_rank_are_noticed(qwen3, mesh, weighted_loss):
    engine = TorchTrainEngine.create(config(qwen3), mesh)
    sequences = Pictures(qwen3).groups((1,), seed=0)
    pixels = sequences[0].images[0]
    pixels[0, 0, 0] = mesh.rank
    with pytest.raises(Exception, match="arguments of forward_backward"):
        engine.forward_backward(sequences, weighted_loss)


@pytest.mark.mesh(dp=2)
def test_wrong_placeholders_are_refused_on_all_ranks(qwen3, mesh, weighted_loss):
    engine = TorchTrainEngine.create(config(qwen3), mesh)
    [sequence] = Pictures(qwen3).groups((1,), samples=1)
    broken = type(sequence)(ids=sequence.ids, loss_mask=sequence.loss_mask, extras=sequence.extras)
    with pytest.raises(DataError, match="placeholder tokens"):
        engine.forward_backward([broken], weighted_loss)


@pytest.mark.mesh(tp=2, compare=False)
def test_layers_of_vision_models_are_not_shared(qwen3, mesh):
    with pytest.raises(ConfigError, match="tp"):
        TorchTrainEngine.create(config(qwen3), mesh)
