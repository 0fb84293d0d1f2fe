"""Moments in bfloat16 and 8 bits in a whole trainer: losses, checkpoints, sleep, ranks and estimates."""

import dataclasses
from pathlib import Path

import pytest
import torch

from offbeat_core import ConfigError, TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_placement import read_shape, train_memory
from offbeat_testing import tiny_model

NARROW = ["bfloat16", "int8"]


def config(folder, moments, **changes):
    settings = {"learning_rate": 1e-3, "adam_eps": 1e-5, "device": "cpu", "weight_decay": 0.01}
    return TrainEngineConfig(model_path=str(folder), options={"moments_dtype": moments}, **settings | changes)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def folder(request, tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("moments") / request.param, request.param)


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("moments") / "qwen3")


def likelihood(tokens):
    return -tokens.logprobs_N.sum() / tokens.total_tokens, {}


def train(engine, make_groups, seeds):
    losses = []
    for seed in seeds:
        losses.append(engine.forward_backward(make_groups(seed=seed), likelihood)["loss"].value)
        engine.step()
    return losses


def weights_of(engine):
    return {name: tensor.clone() for name, tensor in engine.weights()}


@pytest.mark.parametrize(("moments", "bound"), [("bfloat16", 0.002), ("int8", 0.01)])
def test_fifty_steps_lose_little_of_what_float32_moments_learn(plain_folder, make_groups, moments, bound):
    """Losses of the same batches in the same order; bound: of their largest difference, in nats a token.

    Measured: from 5.94 to 1.578 with float32 moments; bfloat16 is never off by more than 0.0004, int8 by 0.0025.
    """
    exact, found = (
        train(TorchTrainEngine.create(config(plain_folder, each)), make_groups, [step % 5 for step in range(50)])
        for each in ("float32", moments)
    )
    differences = [abs(one - other) for one, other in zip(exact, found, strict=True)]
    assert exact[-1] < 0.5 * exact[0], "there is something to lose"
    assert max(differences) < bound


@pytest.mark.parametrize("moments", NARROW)
@pytest.mark.parametrize("rank", [0, 64], ids=["full", "lora"])
def test_a_resumed_run_is_the_undisturbed_run_bit_for_bit(folder, tmp_path, make_groups, moments, rank):
    settings = config(folder, moments, lora_rank=rank)
    engine = TorchTrainEngine.create(settings)
    train(engine, make_groups, range(3))
    engine.save(tmp_path)
    undisturbed = train(engine, make_groups, range(3, 6))
    resumed = TorchTrainEngine.create(settings)
    resumed.load(tmp_path)
    engine.sleep(2)
    engine.wake()
    assert train(resumed, make_groups, range(3, 6)) == undisturbed
    assert train(resumed, make_groups, [6]) == train(engine, make_groups, [6])
    for (name, one), (_, other) in zip(engine.weights(), resumed.weights(), strict=True):
        assert torch.equal(one, other), name
    held = {str(each.dtype).removeprefix("torch.") for each in engine._optimizer.moments()}
    assert held - {"float32"} == {"uint8" if moments == "int8" else "bfloat16"}


@pytest.mark.parametrize("moments", NARROW)
def test_a_checkpoint_holds_float32_moments_which_any_setting_reads(folder, tmp_path, make_groups, moments):
    engine = TorchTrainEngine.create(config(folder, moments))
    train(engine, make_groups, range(2))
    engine.save(tmp_path / "narrow")
    exact = TorchTrainEngine.create(config(folder, "float32"))
    exact.load(tmp_path / "narrow")
    for name in exact._optimizer.parameters:
        for key, values in engine._optimizer.state_of(name).items():
            assert torch.equal(values, exact._optimizer.state_of(name)[key]), (name, key)
    train(exact, make_groups, [2])
    exact.save(tmp_path / "exact")
    engine.load(tmp_path / "exact")
    slack = {"bfloat16": 2**-8, "int8": 0.0071}[moments]
    for name in exact._optimizer.parameters:
        for key, values in exact._optimizer.state_of(name).items():
            found = engine._optimizer.state_of(name)[key]
            assert float((found - values).abs().max()) <= slack * float(values.abs().max()) + 1e-12, (name, key)


@pytest.fixture(scope="module")
def of_one_process(folder, make_groups):
    found = {}
    for moments in NARROW:
        engine = TorchTrainEngine.create(config(folder, moments))
        found[moments] = train(engine, make_groups, range(2)), weights_of(engine)
    return found


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=str, indirect=["mesh"])
@pytest.mark.parametrize("moments", NARROW)
def test_ranks_train_as_one_process_does(folder, mesh, make_groups, of_one_process, moments):
    """Sums over ranks differ in their last bits, after which here and there a moment is rounded to its other side.

    Along tp, matrices that are cut by columns have other blocks of 8 bits than one process, where rows are as short as
    here: then the losses are near, and the weights are not compared.
    """
    if mesh.axes["tp"] > 1 and "moe" in str(folder):
        pytest.skip("experts are not cut over tp")
    engine = TorchTrainEngine.create(config(folder, moments), mesh)
    losses, weights = of_one_process[moments]
    has_other_blocks = moments == "int8" and mesh.axes["tp"] > 1
    assert train(engine, make_groups, range(2)) == pytest.approx(losses, abs=5e-3 if has_other_blocks else 1e-4)
    found = weights_of(engine)
    far = sum(int(((found[name] - each).abs() > 1e-5).sum()) for name, each in weights.items())
    share = far / sum(each.numel() for each in weights.values())
    assert share < 1e-3 or has_other_blocks


@pytest.mark.parametrize("mesh", [{"dp": 2}], ids=str, indirect=["mesh"])
@pytest.mark.parametrize("moments", NARROW)
def test_ranks_resume_bit_for_bit(plain_folder, mesh, make_groups, moments, tmp_path_factory):
    engine = TorchTrainEngine.create(config(plain_folder, moments), mesh)
    train(engine, make_groups, range(2))
    saved = tmp_path_factory.mktemp("saved") if engine.leader else None
    [saved, _] = engine._ranks.exchange(str(saved))
    engine.save(Path(saved))
    resumed = TorchTrainEngine.create(config(plain_folder, moments), mesh)
    resumed.load(Path(saved))
    assert train(resumed, make_groups, [2]) == train(engine, make_groups, [2])
    for (name, one), (_, other) in zip(engine.weights(), resumed.weights(), strict=True):
        assert torch.equal(one, other), name


def test_the_plan_and_the_estimate_count_the_bytes_that_are_held(plain_folder, make_groups):
    shape, found = read_shape(str(plain_folder)), {}
    for moments in ("float32", *NARROW):
        settings = config(plain_folder, moments)
        layout = TorchTrainEngine.plan(settings)
        estimate = train_memory(settings, layout, shape, on_cpu=True).estimate(shape).parts["optimizer"]
        engine = TorchTrainEngine.create(settings)
        train(engine, make_groups, [0])
        held = sum(each.numel() * each.itemsize for each in engine._optimizer.moments())
        found[moments] = layout.optimizer_bytes, estimate / held
    assert {each: size for each, (size, _) in found.items()} == {"float32": 8.0, "bfloat16": 4.0, "int8": 2.03125}
    assert found["float32"][1] == pytest.approx(1.0)
    # In a model so small vectors and small matrices, with float32 moments, are a tenth of the weights.
    assert all(0.6 < found[moments][1] <= 1.0 for moments in NARROW)


def test_a_format_that_moments_do_not_have_is_refused(plain_folder):
    with pytest.raises(ConfigError, match="moments_dtype"):
        TorchTrainEngine.plan(dataclasses.replace(config(plain_folder, "float32"), options={"moments_dtype": "fp8"}))
