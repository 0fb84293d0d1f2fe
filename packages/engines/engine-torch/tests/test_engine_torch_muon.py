"""Muon in a whole trainer: torch's own in one process, the same on ranks, with its own moments in checkpoints."""

from pathlib import Path

import pytest
import torch
from test_engine_torch_moments import likelihood, train, weights_of

from offbeat_core import ConfigError, ModelError, TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_placement import read_shape, train_memory
from offbeat_testing import tiny_model
from offbeat_training import MUON_MOMENTS, slices


def config(folder, optimizer="muon", *, moments="float32", **changes):
    settings = {"learning_rate": 1e-3, "adam_eps": 1e-5, "device": "cpu", "weight_decay": 0.01, "max_grad_norm": 0.5}
    options = {"optimizer": optimizer, "moments_dtype": moments}
    return TrainEngineConfig(model_path=str(folder), options=options, **settings | changes)


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("muon") / "qwen3", tied=False)


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("muon") / "moe", "qwen3_moe")


def test_matrices_are_updated_by_torchs_muon_and_the_rest_by_adamw(dense_folder, make_groups):
    engine = TorchTrainEngine.create(config(dense_folder, max_grad_norm=0.0))
    others = {name: torch.nn.Parameter(each) for name, each in weights_of(engine).items()}
    is_matrix = {name: each.ndim == 2 and "layers" in name for name, each in others.items()}
    assert set(is_matrix) - {n for n, each in is_matrix.items() if each} >= {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    matrices = [each for name, each in others.items() if is_matrix[name]]
    muon = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    rest = [each for name, each in others.items() if not is_matrix[name]]
    groups = [
        {"params": [each for each in rest if each.ndim == num_dims], "weight_decay": decay}
        for num_dims, decay in ((2, 0.01), (1, 0.0))
    ]
    adam = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, fused=True)
    for seed in range(3):
        engine.forward_backward(make_groups(seed=seed), likelihood)
        for name, parameter in engine._optimizer.parameters.items():
            others[name].grad = parameter.grad.clone()
        engine.step()
        muon.step()
        adam.step()
        for name, each in engine.weights():
            torch.testing.assert_close(each, others[name].detach(), rtol=0, atol=1e-7, msg=name)


def update(engine, shapes):
    """Make two updates of the same gradients, whatever the ranks; return the weights."""
    for seed in range(2):
        draw = torch.Generator().manual_seed(seed)
        grads = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        for piece in engine._policy.pieces:
            if piece.name in engine._optimizer.parameters:
                engine._optimizer.parameters[piece.name].grad = grads[piece.name][slices(piece.box)].clone()
        engine._optimizer.step(1.0)
    engine._clear_gradients()
    return weights_of(engine)


@pytest.fixture(scope="module")
def of_one_process(dense_folder, moe_folder, make_groups):
    """By folder: first weights, weights after updates of the same gradients, losses after that, and weights."""
    found = {}
    for folder in (dense_folder, moe_folder):
        engine = TorchTrainEngine.create(config(folder))
        first = weights_of(engine)
        updated = update(engine, {name: each.shape for name, each in first.items()})
        found[folder] = first, updated, train(engine, make_groups, range(2)), weights_of(engine)
    return found


def assert_ranks_do_the_same(folder, mesh, make_groups, of_one_process):
    """Updates of the same gradients are the same bit for bit; those of their own near, in the norm of the update.

    Muon gives the smallest singular values of a momentum the size of the largest ones. So the last bits of gradients,
    which differ between numbers of ranks, show in all of an update.
    """
    first, updated, losses, weights = of_one_process[folder]
    engine = TorchTrainEngine.create(config(folder), mesh)
    for name, each in update(engine, {name: each.shape for name, each in first.items()}).items():
        assert torch.equal(each, updated[name]), name
    assert train(engine, make_groups, range(2)) == pytest.approx(losses, abs=1e-4)
    for name, each in engine.weights():
        far = float((each - weights[name]).norm() / (weights[name] - updated[name]).norm())
        assert far < 0.1, name


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"cp": 2}], ids=str, indirect=["mesh"])
def test_ranks_train_as_one_process_does(dense_folder, mesh, make_groups, of_one_process):
    assert_ranks_do_the_same(dense_folder, mesh, make_groups, of_one_process)


@pytest.mark.parametrize("mesh", [{"dp": 3}], ids=str, indirect=["mesh"])
def test_a_rank_that_has_no_row_of_a_matrix_takes_part_in_its_update(moe_folder, mesh, make_groups, of_one_process):
    """Routers of four experts lie on two of three ranks, and so do the experts, which are gathered by none."""
    assert_ranks_do_the_same(moe_folder, mesh, make_groups, of_one_process)


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_a_resumed_run_is_the_undisturbed_run_bit_for_bit(moe_folder, tmp_path, make_groups, moments):
    settings = config(moe_folder, moments=moments)
    engine = TorchTrainEngine.create(settings)
    train(engine, make_groups, range(2))
    engine.save(tmp_path)
    resumed = TorchTrainEngine.create(settings)
    resumed.load(tmp_path)
    assert engine._optimizer.moments_of("model.layers.0.mlp.experts.gate_up_proj") == MUON_MOMENTS
    engine.sleep(1)
    engine.wake()
    assert train(resumed, make_groups, range(2, 4)) == train(engine, make_groups, range(2, 4))
    for (name, one), (_, other) in zip(engine.weights(), resumed.weights(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("mesh", [{"dp": 2}], ids=str, indirect=["mesh"])
def test_ranks_resume_bit_for_bit(dense_folder, mesh, make_groups, tmp_path_factory):
    engine = TorchTrainEngine.create(config(dense_folder), mesh)
    train(engine, make_groups, [0])
    saved = Path(engine._ranks.exchange(str(tmp_path_factory.mktemp("saved")))[0])
    engine.save(saved)
    resumed = TorchTrainEngine.create(config(dense_folder), mesh)
    resumed.load(saved)
    assert train(resumed, make_groups, [1]) == train(engine, make_groups, [1])
    for (name, one), (_, other) in zip(engine.weights(), resumed.weights(), strict=True):
        assert torch.equal(one, other), name


def test_a_checkpoint_of_the_other_optimizer_is_refused(dense_folder, tmp_path, make_groups):
    for mine, other in (("muon", "adamw"), ("adamw", "muon")):
        engine = TorchTrainEngine.create(config(dense_folder, mine))
        train(engine, make_groups, [0])
        engine.save(tmp_path / mine)
        with pytest.raises(ModelError, match=r"of another optimizer: .*set option optimizer"):
            TorchTrainEngine.create(config(dense_folder, other)).load(tmp_path / mine)


def test_muon_of_adapters_is_refused(dense_folder):
    for make in (TorchTrainEngine.plan, TorchTrainEngine.create):
        with pytest.raises(ConfigError, match=r'optimizer = "muon" has no matrix .* lora_rank = 4'):
            make(config(dense_folder, lora_rank=4))


def test_the_estimate_counts_one_moment_of_matrices_and_two_of_the_vocabulary(dense_folder, make_groups):
    settings, shape = config(dense_folder), read_shape(str(dense_folder))
    estimate = train_memory(settings, TorchTrainEngine.plan(settings), shape, on_cpu=True).estimate(shape)
    engine = TorchTrainEngine.create(settings)
    train(engine, make_groups, [0])
    held = sum(each.numel() * each.itemsize for each in engine._optimizer.moments())
    vectors = sum(each.numel() for each in engine._optimizer.parameters.values() if each.ndim == 1)
    assert estimate.parts["optimizer"] == held - 4 * vectors, "of vectors it counts one too, which have two"
