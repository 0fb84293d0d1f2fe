"""Moments wait in main memory and pass through the device in each step: the same updates, bit for bit."""

import pytest
import torch
from late_lane import LateDevice

from offbeat_core import TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_placement import TrainMemory, read_shape, train_memory
from offbeat_testing import tiny_model


def config(folder, *, offloads=True, **changes):
    options = {"offload_optimizer": offloads, **changes.pop("options", {})}
    settings = {"learning_rate": 1e-3, "device": "cpu", "max_grad_norm": 0.1, "weight_decay": 0.01}
    return TrainEngineConfig(model_path=str(folder), options=options, **settings | changes)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def folder(request, tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("offload") / request.param, request.param)


@pytest.fixture
def late(monkeypatch):
    device = LateDevice()
    monkeypatch.setattr("offbeat_engine_torch._engine.open_device", lambda *_: device)
    return device


def train(engine, make_groups, loss, seeds=range(3)):
    found = []
    for seed in seeds:
        engine.forward_backward(make_groups(seed=seed), loss)
        found.append(engine.step()["grad_norm"].value)
    return found


def state_of(engine):
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    optimizer = engine._optimizer
    moments = {
        f"{moment}.{name}": values.clone()
        for name in optimizer.parameters
        if optimizer.steps_of(name) is not None
        for moment, values in optimizer.state_of(name).items()
    }
    return weights | moments


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


WAYS = {
    "float32": {},
    "bfloat16": {"options": {"moments_dtype": "bfloat16"}},
    "int8": {"options": {"moments_dtype": "int8"}},
    "muon": {"options": {"optimizer": "muon", "moments_dtype": "int8"}},
    "lora": {"lora_rank": 64},
}


@pytest.mark.parametrize("way", WAYS)
def test_updates_are_those_of_moments_that_stay(way, folder, tmp_path, make_groups, weighted_loss, late):
    """Checkpoints of either are resumed by the other, and sleep has nothing to move."""
    stays, leaves = (TorchTrainEngine.create(config(folder, offloads=each, **WAYS[way])) for each in (False, True))
    assert train(leaves, make_groups, weighted_loss) == train(stays, make_groups, weighted_loss)
    assert leaves._optimizer.moments()
    assert not any(each.untyped_storage().nbytes() for each in leaves._optimizer.moments())
    assert_equal(state_of(leaves), state_of(stays))
    for number, engine in enumerate((stays, leaves)):
        engine.save(tmp_path / str(number))
    stays.load(tmp_path / "1")
    leaves.load(tmp_path / "0")
    assert not any(each.untyped_storage().nbytes() for each in leaves._optimizer.moments())
    for engine in (leaves, stays):  # both, for sleep moves weights to memory where sums may have other last bits
        engine.sleep(2)
        engine.wake()
    more = [train(engine, make_groups, weighted_loss, range(3, 5)) for engine in (leaves, stays)]
    assert more[0] == more[1]
    assert_equal(state_of(leaves), state_of(stays))
    assert sum(lane.num_copies for lane in late.lanes) > 0


def test_moments_of_two_parameters_are_on_the_device_at_a_time(folder, make_groups, weighted_loss, late):
    engine = TorchTrainEngine.create(config(folder))
    train(engine, make_groups, weighted_loss, [0])
    state, counts = engine._optimizer._adam.state, []

    def count(*_):
        counts.append(sum(bool(each["exp_avg"].untyped_storage().nbytes()) for each in state.values()))

    for lane in late.lanes:
        lane.copy = (lambda copy: lambda *args: (count(), copy(*args))[1])(lane.copy)
    train(engine, make_groups, weighted_loss, [1])
    assert len(counts) == 4 * len(state), "two moments in, and out"
    assert max(counts) == 2


def test_a_step_that_is_refused_moves_nothing(folder, make_groups, weighted_loss, late):
    engine = TorchTrainEngine.create(config(folder))
    train(engine, make_groups, weighted_loss, [0])
    before, copies = state_of(engine), sum(lane.num_copies for lane in late.lanes)
    engine.forward_backward(make_groups(seed=1), lambda tokens: (tokens.logprobs_N.sum() * float("nan"), {}))
    assert engine.step()["steps_refused"].value == 1
    assert sum(lane.num_copies for lane in late.lanes) >= copies
    assert_equal(state_of(engine), before)


@pytest.mark.mesh(dp=2)
@pytest.mark.parametrize("way", ["float32", "muon"])
def test_ranks_make_the_same_updates(way, mesh, tmp_path, make_groups, weighted_loss, late):
    folder = tiny_model(tmp_path / "model", "qwen3_moe")
    late.torch_device = mesh.device.torch_device
    stays, leaves = (
        TorchTrainEngine.create(config(folder, offloads=each, **WAYS[way]), mesh) for each in (False, True)
    )
    assert train(leaves, make_groups, weighted_loss) == train(stays, make_groups, weighted_loss)
    assert_equal(state_of(leaves), state_of(stays))
    assert not any(each.untyped_storage().nbytes() for each in leaves._optimizer.moments())


@pytest.mark.parametrize("way", WAYS)
def test_the_plan_counts_the_main_memory_that_moments_wait_in(way, folder, make_groups, weighted_loss, late):
    settings, shape = config(folder, **WAYS[way]), read_shape(str(folder))
    engine = TorchTrainEngine.create(settings)
    train(engine, make_groups, weighted_loss, [0])
    main = train_memory(settings, TorchTrainEngine.plan(settings), shape, on_cpu=True).estimate(shape).main
    assert main.keys() == {"optimizer"}
    # Vectors have moments in float32 in every way, and counts of steps are of 4 bytes.
    assert main["optimizer"] == pytest.approx(late.pinned_bytes, rel=0.01 if way in ("float32", "lora") else 0.1)


def test_the_plan_counts_two_parameters(folder):
    settings, shape = config(folder), read_shape(str(folder))
    layout = TorchTrainEngine.plan(settings)
    parts = train_memory(settings, layout, shape, on_cpu=True).estimate(shape).parts
    assert layout.offloads_optimizer
    assert parts["optimizer"] == 8 * (shape.vocabulary * shape.hidden + shape.block_parameters)
    whole = TrainMemory(lora_rank=1).estimate(shape).parts["optimizer"]
    assert TrainMemory(lora_rank=1, offloads_optimizer=True).estimate(shape).parts["optimizer"] == whole, "so small"
