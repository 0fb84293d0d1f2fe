"""Inputs of layers wait in main memory: the same gradients, and those of two layers on the device."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from late_lane import LateDevice
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from offbeat_core import TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_engine_torch._layers.recompute import OffloadedInputs, recompute_layers
from offbeat_placement import ModelShape, TrainMemory, read_shape, train_memory
from offbeat_testing import tiny_model

NUM_LAYERS, TOKENS, WIDTH = 6, 50, 32


def config(folder, **changes):
    options = {"offload_activations": True, **changes.pop("options", {})}
    settings = {"device": "cpu", "max_tokens_per_microbatch": 48, "activation_checkpointing": True}
    return TrainEngineConfig(model_path=str(folder), options=options, **settings | changes)


class Layer(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, factor=1.0):
        return x + factor * self.linear(x.tanh()).tanh()


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, factor=0.5)
        return x


def stacks():
    torch.manual_seed(0)
    plain, ours = Stack(), Stack()
    ours.load_state_dict(plain.state_dict())
    device = LateDevice()
    recompute_layers(plain)
    recompute_layers(ours, OffloadedInputs(device))
    return plain, ours, device


def gradients(stack, inputs):
    stack.zero_grad()
    for x in inputs:
        stack(x).square().sum().backward()
    return [each.grad.clone() for each in stack.parameters()]


def test_gradients_are_the_same_bit_for_bit_whenever_the_copies_are_done():
    """Micro-batches of other lengths, whose memory is used again; and a forward pass that no backward pass follows."""
    plain, ours, device = stacks()
    inputs = [torch.randn(1, length, WIDTH) for length in (TOKENS, 7, TOKENS, 90)]
    pairs = zip(gradients(ours, inputs), gradients(plain, inputs), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    (lane,) = device.lanes
    back = NUM_LAYERS - 2
    assert lane.num_copies == len(inputs) * (NUM_LAYERS + back), "the last two come from where they still are"
    ours(inputs[0])  # dropped
    kept = ours(inputs[1])
    pairs = zip(gradients(ours, inputs), gradients(plain, inputs), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    kept.square().sum().backward()
    lane.finish()


def most_inputs(stack):
    """Return the most inputs of layers that were in memory while one computed, in both passes."""
    storages, counts = [], []

    def note(_, args):
        storage = args[0].untyped_storage()
        if not any(each() is storage for each in storages):
            storages.append(weakref.ref(storage))

    for layer in stack.layers:
        layer.register_forward_pre_hook(note)
        layer.linear.register_forward_pre_hook(lambda *_: counts.append(sum(each() is not None for each in storages)))
    stack(torch.randn(1, TOKENS, WIDTH)).sum().backward()
    assert len(counts) == 2 * NUM_LAYERS
    return max(counts)


def test_the_device_holds_the_inputs_of_two_layers():
    """And in this forward pass the first one, which the caller holds."""
    plain, ours, _ = stacks()
    assert most_inputs(plain) == NUM_LAYERS
    assert most_inputs(ours) <= 3


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def folder(request, tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("offload") / request.param, request.param)


def train(engine, make_groups, loss):
    losses = [engine.forward_backward(make_groups(seed=seed), loss)["loss"].value for seed in range(2)]
    norm = engine.step()["grad_norm"].value
    return losses, norm, {name: tensor.clone() for name, tensor in engine.weights()}


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4, "dtype": "bfloat16"}], ids=["full", "lora"])
def test_a_trainer_makes_the_same_updates_bit_for_bit(changes, folder, make_groups, weighted_loss, monkeypatch):
    plain = train(
        TorchTrainEngine.create(config(folder, options={"offload_activations": False}, **changes)),
        *(make_groups, weighted_loss),
    )
    device = LateDevice()
    monkeypatch.setattr("offbeat_engine_torch._engine.open_device", lambda *_: device)
    found = train(TorchTrainEngine.create(config(folder, **changes)), make_groups, weighted_loss)
    assert device.lanes[0].num_copies > 0
    assert found[:2] == plain[:2]
    assert all(torch.equal(tensor, plain[2][name]) for name, tensor in found[2].items())


@pytest.mark.mesh(dp=2)
def test_ranks_do_so_too(mesh, tmp_path, make_groups, weighted_loss):
    folder = tiny_model(tmp_path / "model", "qwen3")
    engines = [
        TorchTrainEngine.create(config(folder, options={"offload_activations": offloads}), mesh)
        for offloads in (False, True)
    ]
    plain, found = (train(engine, make_groups, weighted_loss) for engine in engines)
    assert found[:2] == plain[:2]
    assert all(torch.equal(tensor, plain[2][name]) for name, tensor in found[2].items())


def test_the_plan_counts_the_inputs_of_two_layers(folder):
    shape = read_shape(str(folder))
    sizes = [
        train_memory(settings, TorchTrainEngine.plan(settings), shape, on_cpu=True).estimate(shape).parts
        for settings in (config(folder), config(folder, options={"offload_activations": False}))
    ]
    assert shape.num_layers == 2, "nothing to save in a model so small"
    assert sizes[0] == sizes[1]
    deep = ModelShape(**{**vars(shape), "num_layers": 10})
    parts = [
        TrainMemory(tokens=100, recomputes=True, offloads_inputs=offloads).estimate(deep).parts["activations"]
        for offloads in (False, True)
    ]
    assert parts[0] - parts[1] == (10 - 2) * 100 * 4 * shape.hidden
    kept = TrainMemory(tokens=100, offloads_inputs=True).estimate(shape).parts["activations"]
    assert kept == TrainMemory(tokens=100).estimate(shape).parts["activations"], "all is kept without recomputing"


def test_the_plan_counts_the_main_memory_that_inputs_wait_in(folder, make_groups, weighted_loss, monkeypatch):
    device, settings, shape = LateDevice(), config(folder), read_shape(str(folder))
    monkeypatch.setattr("offbeat_engine_torch._engine.open_device", lambda *_: device)
    engine, sizes = TorchTrainEngine.create(settings), []
    keep = OffloadedInputs.memory
    monkeypatch.setattr(OffloadedInputs, "memory", lambda *args: (keep(*args), sizes.append(device.pinned_bytes))[0])
    engine.forward_backward(make_groups(), weighted_loss)
    memory = train_memory(settings, TorchTrainEngine.plan(settings), shape, on_cpu=True)
    main = memory.estimate(shape).main
    assert main == {"inputs of layers": 48 * shape.num_layers * shape.hidden * 4}
    assert 0.75 * main["inputs of layers"] <= max(sizes) <= main["inputs of layers"], "packs are nearly full"
    assert replace(memory, recomputes=False).estimate(shape).main == {}


def test_it_does_nothing_where_nothing_is_recomputed_and_says_so(folder, caplog, make_groups, weighted_loss):
    settings = config(folder, activation_checkpointing=False)
    engine = TorchTrainEngine.create(settings)
    assert "offload_activations does nothing" in caplog.text
    assert np.isfinite(engine.forward_backward(make_groups(), weighted_loss)["loss"].value)
