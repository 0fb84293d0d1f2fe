"""Moments in bfloat16 and 8 bits: what is held, what a step does with it, and that it does not depend on cuts."""

import numpy as np
import pytest
import torch
from torch import nn

from offbeat_core import TrainEngineConfig
from offbeat_training import ClippedAdamW, moment_bytes
from offbeat_training._optimizers.moments import (
    BLOCK,
    Bfloat16Moments,
    Int8Moments,
    Noise,
    draw_noise,
    dynamic_codes,
    is_small,
)

torch.set_num_threads(1)

CPU = torch.device("cpu")
SHAPE = (40, 300)  # two blocks a row, the second one short
NARROW = ["bfloat16", "int8"]


def config_of(**changes):
    return TrainEngineConfig(model_path="unused", learning_rate=1e-2, **{"weight_decay": 0.1, **changes})


def make_parameters(seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = {"matrix": SHAPE, "experts": (6, 30, 64), "small": (8, 8), "vector": (5000,)}
    return {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in shapes.items()}


def differentiate(parameters, seed):
    """Give every parameter gradients whose rows differ in size by six decades, with zeros between."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        grad = torch.randn(parameter.shape, generator=draw) * 10 ** -(
            6 * torch.rand(parameter.shape[0], generator=draw)
        ).view(-1, *[1] * (parameter.ndim - 1))
        parameter.grad = grad * (torch.rand(parameter.shape, generator=draw) > 0.1)


def copy_state(optimizer, name):
    return {key: values.clone() for key, values in optimizer.state_of(name).items()}


def train(optimizer, parameters, seeds):
    for seed in seeds:
        differentiate(parameters, seed)
        optimizer.step(1.0)


@pytest.mark.parametrize("signed", [True, False])
def test_8_bits_hold_the_nearest_code_of_the_papers_tree_by_block(signed):
    """Every number against all 256 codes, one at a time, in float64."""
    codes = dynamic_codes(signed=signed).double().numpy()
    assert len(set(codes)) == 256
    assert (codes[0], codes[-1]) == ((-1.0 if signed else 0.0), 1.0)
    draw = np.random.default_rng(0)
    values = draw.normal(size=SHAPE) * 10.0 ** draw.uniform(-9, 0, SHAPE)
    values[3], values[4, :7] = 0.0, 0.0
    values = torch.from_numpy(values if signed else np.abs(values)).float()
    form = Int8Moments(CPU, signed=signed)
    held = form.hold(*SHAPE, CPU)
    form.write(held, values)
    found = form.read(held).double().numpy()
    for row in range(SHAPE[0]):
        for start in range(0, SHAPE[1], BLOCK):
            block = values[row, start : start + BLOCK].double().numpy()
            scale = np.abs(block).max()
            for place, value in enumerate(block):
                allowed = codes if signed or value == 0.0 else codes[1:]
                wanted = scale * allowed[np.abs(value - scale * allowed).argmin()]
                got = found[row, start + place]
                closest = abs(value - wanted)
                assert abs(value - got) <= closest * (1 + 1e-5) + 1e-7 * abs(value), (row, start + place)
                assert signed or (got == 0.0) == (value == 0.0), "a second moment that is not 0 is not held as 0"
    again = form.hold(*SHAPE, CPU)
    form.write(again, form.read(held))
    assert all(torch.equal(one, other) for one, other in zip(held, again, strict=True)), "reading loses nothing"


def test_bfloat16_is_rounded_to_a_neighbour_and_right_in_the_mean():
    form, noise = Bfloat16Moments(), Noise("a", SHAPE, ((0, SHAPE[0]), (0, SHAPE[1])), CPU)
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 1e-4
    ulp = 2.0 ** (torch.floor(torch.log2(values.abs())) - 7)
    total, draws = torch.zeros(SHAPE, dtype=torch.float64), 400
    for step in range(draws):
        held = form.hold(*SHAPE, CPU)
        form.write(held, values, draw_noise(*noise.keys(0, step, 0, SHAPE[0]))[step % 2])
        assert ((form.read(held) - values).abs() < ulp).all()
        total += (form.read(held) - values) / ulp
    mean = total / draws
    assert mean.abs().max() < 5 * 0.5 / draws**0.5, "five standard deviations of an element's mean"
    assert abs(mean.mean()) < 5 * 0.5 / (draws * mean.numel()) ** 0.5, "and of that of all"
    form.write(held, form.read(held))
    form.write(held, held[0].float(), draw_noise(*noise.keys(0, 9, 0, SHAPE[0]))[0])
    assert ((held[0].float() - values).abs() < ulp).all(), "what bfloat16 has is not rounded"


@pytest.mark.parametrize("moments", NARROW)
def test_second_moments_fall_as_they_should_when_gradients_stop(moments):
    """With beta2 = 0.999 the nearest bfloat16 of what a step leaves is the old one; after 300 steps 26 % are gone."""
    parameters = {"a": nn.Parameter(torch.zeros(64, 256))}
    optimizer = ClippedAdamW(parameters, config_of(adam_beta2=0.999, max_grad_norm=0.0), moments=moments)
    parameters["a"].grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    optimizer.step(1.0)
    before = optimizer.state_of("a")["exp_avg_sq"].double().sum()
    parameters["a"].grad.zero_()
    for _ in range(300):
        optimizer.step(1.0)
    after = optimizer.state_of("a")["exp_avg_sq"].double().sum()
    assert float(after / before) == pytest.approx(0.999**300, rel=0.02)


@pytest.mark.parametrize("moments", NARROW)
def test_a_step_is_that_of_adamw_from_the_moments_that_were_held(moments):
    """In float64, from what is held before a step; and what is held after it is within a code of the right number."""
    config = config_of(max_grad_norm=0.0)
    parameters = make_parameters()
    optimizer = ClippedAdamW(parameters, config, moments=moments)
    for step in range(1, 4):
        old = {name: each.detach().double().clone() for name, each in parameters.items()}
        held = {name: copy_state(optimizer, name) for name in parameters} if step > 1 else None
        differentiate(parameters, step)
        optimizer.step(1.0)
        for name, parameter in parameters.items():
            grad, decays = parameter.grad.double(), parameter.ndim >= 2
            first, second = (
                torch.zeros_like(grad) if held is None else held[name][key].double()
                for key in ("exp_avg", "exp_avg_sq")
            )
            first = 0.9 * first + 0.1 * grad
            second = 0.95 * second + 0.05 * grad**2
            denominator = (second / (1 - 0.95**step)).sqrt() + 1e-8
            wanted = old[name] * (1 - 1e-3 * decays) - 1e-2 * first / (1 - 0.9**step) / denominator
            torch.testing.assert_close(parameter.detach().double(), wanted, rtol=2e-5, atol=1e-6)
            if is_small(parameter.shape):
                continue
            now = optimizer.state_of(name)
            for key, value in (("exp_avg", first), ("exp_avg_sq", second)):
                # A number of the code's largest decade is off by 0.7 % of the block's largest at most.
                slack = 2**-7 if moments == "bfloat16" else 0.0071
                most = value.abs() if moments == "bfloat16" else value.abs().amax(-1, keepdim=True)
                assert ((now[key].double() - value).abs() <= slack * most + 1e-30).all(), (name, key)


@pytest.mark.parametrize(("moments", "per_element"), [("float32", 8.0), ("bfloat16", 4.0), ("int8", 2.0)])
def test_the_bytes_of_moments_are_counted(moments, per_element):
    """Two scales of 4 bytes for each block come on top of the 2 bytes; vectors and small matrices have 8 bytes."""
    parameters = make_parameters()
    optimizer = ClippedAdamW(parameters, config_of(), moments=moments)
    train(optimizer, parameters, [0])
    held = sum(each.numel() * each.itemsize for each in optimizer.moments())
    scales = 2 * 4 * (40 * 2 + 6 * 30) if moments == "int8" else 0
    large, small = 40 * 300 + 6 * 30 * 64, 8 * 8 + 5000
    assert held == large * per_element + scales + small * 8
    assert moment_bytes(moments) == per_element / 2 + (4 / 256 if moments == "int8" else 0)


@pytest.mark.parametrize("moments", NARROW)
def test_what_is_loaded_goes_on_bit_for_bit(moments):
    config, parameters = config_of(seed=3), make_parameters()
    optimizer = ClippedAdamW(parameters, config, moments=moments)
    train(optimizer, parameters, range(3))
    copies = {name: nn.Parameter(each.detach().clone()) for name, each in parameters.items()}
    resumed = ClippedAdamW(copies, config, moments=moments)
    train(resumed, make_parameters(9), [9])
    states = [(name, optimizer.steps_of(name), copy_state(optimizer, name)) for name in parameters]
    resumed.load_state(states, optimizer.steps_taken)
    for each, held in ((optimizer, parameters), (resumed, copies)):
        train(each, held, range(3, 6))
    for name, parameter in parameters.items():
        assert torch.equal(parameter, copies[name]), name
        for key, values in optimizer.state_of(name).items():
            assert torch.equal(values, resumed.state_of(name)[key]), (name, key)


@pytest.mark.parametrize("moments", NARROW)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parts_of_rows_are_updated_as_the_whole_is_bit_for_bit(moments, num_ranks, monkeypatch):
    """As FSDP cuts: a rank's part may be small, and the rows that are updated at a time are others."""
    config, whole = config_of(max_grad_norm=0.0), make_parameters()
    optimizer = ClippedAdamW(whole, config, moments=moments)
    starts = {name: [len(each) * rank // num_ranks for rank in range(num_ranks + 1)] for name, each in whole.items()}
    first = {name: each.detach().clone() for name, each in whole.items()}
    train(optimizer, whole, range(3))
    monkeypatch.setattr("offbeat_training._optimizers.moments.CHUNK_ELEMENTS", 700)
    for rank in range(num_ranks):
        box = {name: slice(each[rank], each[rank + 1]) for name, each in starts.items()}
        parts = {name: nn.Parameter(each[box[name]].clone()) for name, each in first.items()}
        places = {
            name: (each.shape, ((box[name].start, box[name].stop), *((0, size) for size in each.shape[1:])))
            for name, each in whole.items()
        }
        mine = ClippedAdamW(parts, config, moments=moments, places=places)
        for seed in range(3):
            differentiate(whole, seed)
            for name, part in parts.items():
                part.grad = whole[name].grad[box[name]].clone()
            mine.step(1.0)
        for name, part in parts.items():
            if is_small(whole[name].shape):
                continue  # torch's own AdamW rounds what is left over of its vectors in another way
            assert torch.equal(part, whole[name][box[name]]), name
            for key, values in mine.state_of(name).items():
                assert torch.equal(values, optimizer.state_of(name)[key][box[name]]), (name, key)


def test_columns_that_ranks_share_are_rounded_with_the_noise_of_the_whole():
    whole = Noise("a", SHAPE, ((0, 40), (0, 300)), CPU)
    part = Noise("a", SHAPE, ((10, 20), (100, 300)), CPU)
    wanted = draw_noise(*whole.keys(1, 2, 12, 15))
    found = draw_noise(*part.keys(1, 2, 2, 5))
    assert all(torch.equal(one[:, 100:], other) for one, other in zip(wanted, found, strict=True))
    for changed in (
        part.keys(1, 3, 2, 5),
        part.keys(2, 2, 2, 5),
        Noise("b", SHAPE, ((10, 20), (100, 300)), CPU).keys(1, 2, 2, 5),
    ):
        assert not torch.equal(draw_noise(*changed)[0], found[0])
