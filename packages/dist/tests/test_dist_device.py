import pytest
import torch

from offbeat_dist import available_devices, open_device, rank_device
from offbeat_types import ConfigError, installed_backends


def test_cpu_and_cuda_are_registered():
    assert {"cpu", "cuda"} <= set(installed_backends("offbeat.device"))


def test_auto_takes_the_preferred_kind_that_is_here():
    assert open_device("auto").kind == next(iter(available_devices()))


def test_cpu_answers_every_question():
    device = open_device("cpu:0")
    device.synchronize()
    assert device.torch_device == torch.device("cpu")
    assert device.collective_backend == "gloo"
    assert torch.bfloat16 in device.autocast_dtypes
    assert torch.distributed.is_gloo_available()


def test_cpu_memory_sees_an_allocation_and_its_peak():
    device = open_device("cpu")
    device.reset_peak_memory()
    before = device.memory()
    block = torch.ones(16 * 2**20)  # 64 MiB
    during = device.memory()
    del block
    assert during.allocated_bytes - before.allocated_bytes > 50 * 2**20
    assert device.memory().peak_bytes >= during.allocated_bytes - 2**20
    assert during.total_bytes > during.allocated_bytes


def test_rng_state_goes_round():
    device = open_device("cpu")
    state = device.rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "cpu:1", "cpu:", "cpu:x", "auto:0", "", "cpu:-1"])
def test_a_device_that_is_not_here_is_refused_with_those_that_are(name):
    with pytest.raises(ConfigError, match=r"this machine has .*cpu"):
        open_device(name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_cuda_answers_every_question():
    device = open_device("cuda:0")
    device.reset_peak_memory()
    block = torch.ones(2**20, device=device.torch_device)
    device.synchronize()
    assert device.memory().peak_bytes >= block.numel() * 4
    state = device.rng_state()
    first = torch.rand(3, device=device.torch_device)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=device.torch_device), first)


class TwoAccelerators:
    """A machine with two devices of a kind that this one has not."""

    kind = "abacus"

    class torch_device:  # noqa: N801
        index = 0


def test_each_rank_takes_an_accelerator_of_its_own(monkeypatch):
    monkeypatch.setattr("offbeat_dist._device.open_device", lambda name: TwoAccelerators())
    monkeypatch.setattr("offbeat_dist._device.available_devices", lambda: {"abacus": 2, "cpu": 1})
    assert [rank_device("auto", rank, 2) for rank in (0, 1)] == ["abacus:0", "abacus:1"]
    assert rank_device("abacus:1", 0, 1) == "abacus:1"
    with pytest.raises(ConfigError, match="this machine has 2"):
        rank_device("abacus", 0, 3)
    with pytest.raises(
        ConfigError, match=r"device = abacus:1 is one device for 2 ranks: name the kind alone \(abacus\)"
    ):
        rank_device("abacus:1", 0, 2)


def test_ranks_share_the_cpu():
    assert [rank_device("cpu", rank, 4) for rank in range(4)] == ["cpu"] * 4
