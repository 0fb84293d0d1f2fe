"""Formats in which ranks gather embedding and head, and in which they add up their gradients."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat_core import TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import tiny_model, tiny_vision_model

WIDTH = 32
BFLOAT16 = {"dtype": "bfloat16", "options": {"head_dtype": "bfloat16"}}


def create(folder, mesh=None, **settings):
    settings = {"learning_rate": 1e-3, "adam_eps": 1e-5, "max_tokens_per_microbatch": 48, "device": "cpu"} | settings
    return TorchTrainEngine.create(TrainEngineConfig(model_path=str(folder), **settings), mesh)


class Collectives(TorchDispatchMode):
    """Numbers that ranks gather and add up, by format."""

    def __init__(self):
        super().__init__()
        self.gathered, self.summed = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        for part, found in (("allgather", self.gathered), ("reduce_scatter", self.summed)):
            if part in name:
                found += [(each.dtype, each.numel()) for each in args[:2] if isinstance(each, torch.Tensor)]
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    name = "qwen3" if request.param else "llama"
    return tiny_model(tmp_path_factory.mktemp("vocabulary") / name, name, tied=request.param, hidden_size=WIDTH)


@pytest.mark.mesh(dp=2)
def test_embedding_and_head_are_gathered_in_the_format_of_the_heads_products(folder, mesh, make_groups, weighted_loss):
    found = {}
    for name, settings in {"bfloat16": BFLOAT16, "float32 head": {"dtype": "bfloat16"}}.items():
        engine = create(folder, mesh, **settings)
        vocabulary = engine.vocabulary_size * WIDTH
        with Collectives() as seen:
            engine.forward_backward(make_groups(), weighted_loss)
        found[name] = {dtype for dtype, size in seen.gathered if size >= vocabulary}  # a layer has as many
        assert {dtype for dtype, _ in seen.summed} == {torch.float32}, "gradients are added up in float32"
    assert found["bfloat16"] == {torch.bfloat16}
    assert torch.float32 in found["float32 head"]
    assert all(tensor.dtype == torch.float32 for _, tensor in engine.weights())


def three_steps(engine, make_groups, loss):
    reported = []
    for seed in range(3):
        reported.append(engine.forward_backward(make_groups(seed=seed), loss)["loss"].value)
        reported.append(engine.step()["grad_norm"].value)
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    return reported, weights, engine.logprobs(make_groups(seed=9)), engine.logprobs(make_groups(seed=9), reference=True)


@pytest.mark.parametrize(
    "mesh", [{"dp": 2}, pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.nightly)], ids=str, indirect=True
)
@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4}], ids=["all", "lora"])
def test_ranks_train_as_one_process_whose_head_multiplies_in_bfloat16(
    folder, mesh, make_groups, weighted_loss, changes
):
    """Within the bounds of bfloat16 layers; log-probabilities are those of one process."""
    one = three_steps(create(folder, **BFLOAT16, **changes), make_groups, weighted_loss)
    many = three_steps(create(folder, mesh, **BFLOAT16, **changes), make_groups, weighted_loss)
    np.testing.assert_allclose(many[0], one[0], rtol=3e-2, atol=3e-2)
    for name, tensor in one[1].items():
        torch.testing.assert_close(many[1][name], tensor, rtol=3e-2, atol=3e-2, msg=name)
    for found, wanted in zip(many[2] + many[3], one[2] + one[3], strict=True):
        np.testing.assert_allclose(found, wanted, atol=6e-2, rtol=0)


@pytest.mark.mesh(dp=2)
def test_the_gradient_of_the_vocabulary_is_as_near_to_float32_as_that_of_the_layers(
    folder, mesh, make_groups, weighted_loss
):
    exact, rounded = create(folder, mesh), create(folder, mesh, **BFLOAT16)
    for engine in (exact, rounded):
        engine.forward_backward(make_groups(), weighted_loss)
    for wanted, found in zip(exact._policy.pieces, rounded._policy.pieces, strict=True):
        grad, near = (each.parameter.grad.to_local() for each in (wanted, found))
        assert near.dtype == torch.float32
        assert (near - grad).norm() <= 0.03 * grad.norm() + 1e-6, wanted.name


@pytest.fixture(scope="module")
def pictured(tmp_path_factory):
    return tiny_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.mark.mesh(dp=2)
def test_a_tower_keeps_its_format(pictured, mesh, weighted_loss):
    from pictured_sequences import Pictures

    updates = Pictures(pictured).groups((1, 0, 1), samples=1)
    one, many = create(pictured, **BFLOAT16), create(pictured, mesh, **BFLOAT16)
    for found, wanted in zip(many.logprobs(updates), one.logprobs(updates), strict=True):
        np.testing.assert_allclose(found, wanted, atol=6e-2, rtol=0)
    with Collectives() as seen:
        losses = [engine.forward_backward(updates, weighted_loss)["loss"].value for engine in (many, one)]
    assert losses[0] == pytest.approx(losses[1], rel=3e-2, abs=3e-2)
    assert torch.float32 in {dtype for dtype, _ in seen.gathered}


def test_a_plan_shows_the_format_in_which_the_vocabulary_is_gathered(folder):
    def planned(**settings):
        return TorchTrainEngine.plan(TrainEngineConfig(model_path=str(folder), device="cpu", **settings), 2)

    assert planned(**BFLOAT16).vocabulary_bytes == 2
    assert planned(dtype="bfloat16").vocabulary_bytes == 4, "a CPU's head is float32"
    assert planned(options={"head_dtype": "bfloat16"}).vocabulary_bytes == 4, "so are the layers"
    assert planned(**BFLOAT16, head="score").vocabulary_bytes == 4
