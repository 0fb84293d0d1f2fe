"""Muon: equal to torch's own in one process, per expert, with momentum in fewer bytes, and orthogonal."""

import pytest
import torch
from torch import nn

from offbeat_core import TrainEngineConfig
from offbeat_training import MUON_MOMENTS, ClippedAdamW, HeldMoments, Muon
from offbeat_training._optimizers.muon import orthogonalize

torch.set_num_threads(1)
SHAPES = {"wide": (64, 96), "tall": (96, 64), "experts": (3, 64, 80), "embedding": (100, 64), "norm": (64,)}
MATRICES = ("wide", "tall", "experts")


def config_of(**changes):
    return TrainEngineConfig(model_path="unused", learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.0, **changes)


def make_parameters():
    draw = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in SHAPES.items()}


def differentiate(parameters, seed):
    draw = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=draw)


def make(parameters, config, moments="float32"):
    places = {name: (each.shape, tuple((0, size) for size in each.shape)) for name, each in parameters.items()}
    mine = {name: parameters[name] for name in MATRICES}
    places = {name: places[name] for name in MATRICES}
    held = HeldMoments(mine, places, MUON_MOMENTS, moments)
    muon = Muon(held, places, {"wide", "tall"}, config, lambda _, part: part, lambda names: [names])
    return ClippedAdamW(parameters, config, moments=moments, muon=muon)


def test_updates_are_torchs_own_and_of_each_expert_alone():
    """Matrices against torch.optim.Muon with AdamW's rate; the rest against torch.optim.AdamW."""
    config, parameters, others = config_of(), make_parameters(), make_parameters()
    optimizer = make(parameters, config)
    experts = [nn.Parameter(others["experts"][number].detach().clone()) for number in range(3)]
    muon = torch.optim.Muon(
        [others["wide"], others["tall"], *experts], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    groups = [{"params": [others["embedding"]], "weight_decay": 0.1}, {"params": [others["norm"]], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    for seed in range(3):
        differentiate(parameters, seed)
        differentiate(others, seed)
        for number, expert in enumerate(experts):
            expert.grad = others["experts"].grad[number]
        optimizer.step(1.0)
        muon.step()
        adam.step()
    for name in ("wide", "tall", "embedding", "norm"):
        torch.testing.assert_close(parameters[name], others[name], rtol=0, atol=1e-7, msg=name)
    torch.testing.assert_close(parameters["experts"], torch.stack(list(experts)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (3, 48, 80)])
def test_an_update_has_the_directions_of_the_matrix_and_about_equal_sizes(shape):
    """Against singular values and vectors in float64, of a matrix whose own sizes span two decades."""
    draw = torch.Generator().manual_seed(1)
    left, _, right = torch.linalg.svd(torch.randn(shape, generator=draw, dtype=torch.float64), full_matrices=False)
    sizes = torch.logspace(0, -1.5, min(shape[-2:]), dtype=torch.float64)
    found = orthogonalize(((left * sizes) @ right).bfloat16()).double()
    inside = left.mT @ found @ right.mT
    diagonal = inside.diagonal(dim1=-2, dim2=-1)
    assert ((diagonal > 0.5) & (diagonal < 1.4)).all()
    assert (inside - torch.diag_embed(diagonal)).abs().max() < 0.1


@pytest.mark.parametrize(("moments", "num_bytes"), [("float32", 4), ("bfloat16", 2), ("int8", 1)])
def test_a_matrix_has_one_moment_which_goes_on_bit_for_bit(moments, num_bytes):
    config, parameters = config_of(), make_parameters()
    optimizer = make(parameters, config, moments)
    for seed in range(2):
        differentiate(parameters, seed)
        optimizer.step(1.0)
    scales = 4 * (64 + 96 + 3 * 64) if moments == "int8" else 0
    held = sum(each.numel() * each.itemsize for each in optimizer._muon.held.memory())
    assert held == (2 * 64 * 96 + 3 * 64 * 80) * num_bytes + scales
    copies = {name: nn.Parameter(each.detach().clone()) for name, each in parameters.items()}
    resumed = make(copies, config, moments)
    states = [
        (name, optimizer.steps_of(name), {key: each.clone() for key, each in optimizer.state_of(name).items()})
        for name in parameters
    ]
    assert [list(state) for _, _, state in states[:3]] == [["momentum_buffer"]] * 3
    resumed.load_state(states, optimizer.steps_taken)
    for each, its in ((optimizer, parameters), (resumed, copies)):
        differentiate(its, 2)
        each.step(1.0)
    assert all(torch.equal(copies[name], each) for name, each in parameters.items())


def test_matrices_without_a_gradient_stay_as_they_are():
    parameters = make_parameters()
    optimizer = make(parameters, config_of())
    before = parameters["tall"].detach().clone()
    differentiate(parameters, 0)
    parameters["tall"].grad = None
    optimizer.step(1.0)
    assert torch.equal(parameters["tall"], before)
    assert optimizer.steps_of("tall") is None
