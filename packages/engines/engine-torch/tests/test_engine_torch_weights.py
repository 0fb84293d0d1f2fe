"""What a trainer hands out: merged, the base alone, the adapter alone; rounded before ranks gather it."""

import pytest
import torch

from offbeat_core import TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_mesh import Group

PEFT_PREFIX = "base_model.model."
RANK = 4


@pytest.fixture
def trained(model_folder, make_groups, weighted_loss):
    """Makes an engine on a mesh, and trains it one step."""

    def make(mesh, lora_rank):
        adapters = {"lora_rank": lora_rank, "lora_alpha": 3.0} if lora_rank else {}
        settings = TrainEngineConfig(model_path=str(model_folder), learning_rate=1e-2, device="cpu", **adapters)
        engine = TorchTrainEngine.create(settings, mesh)
        engine.forward_backward(make_groups(seed=1), weighted_loss)
        engine.step()
        return engine

    return make


def held(tensors):
    return {name: tensor.clone() for name, tensor in tensors}


@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2}, {"dp": 2, "tp": 2}], ids=str, indirect=True)
def test_the_parts_of_an_adapted_policy_make_up_the_whole(trained, mesh):
    engine = trained(mesh, RANK)
    merged, base, adapter = (held(engine.weights(part=part)) for part in ("merged", "base", "adapter"))
    assert list(base) == list(merged)
    changed = 0
    for name, tensor in merged.items():
        stem = PEFT_PREFIX + name.removesuffix(".weight")
        expected = base[name]
        if f"{stem}.lora_A.weight" in adapter:
            down, up = adapter.pop(f"{stem}.lora_A.weight"), adapter.pop(f"{stem}.lora_B.weight")
            expected = base[name] + 3.0 / RANK * up @ down
            changed += not torch.equal(tensor, base[name])
        torch.testing.assert_close(tensor, expected, atol=1e-7, rtol=1e-6)
    assert changed
    assert not adapter


@pytest.mark.parametrize("lora_rank", [0, RANK])
@pytest.mark.parametrize(
    "mesh", [{"dp": 2}, pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.nightly)], ids=str, indirect=True
)
def test_rounding_before_gathering_gives_the_same_and_gathers_half(trained, mesh, lora_rank, monkeypatch):
    engine, gathered, all_gather = trained(mesh, lora_rank), [0], Group.all_gather

    def count(self, tensor, **options):
        gathered[0] += tensor.nbytes
        return all_gather(self, tensor, **options)

    monkeypatch.setattr(Group, "all_gather", count)
    for part in ("base", "adapter", "merged"):
        gathered[0] = 0
        whole = held(engine.weights(part=part))
        plain, gathered[0] = gathered[0], 0
        rounded = held(engine.weights("bfloat16", part=part))
        assert list(rounded) == list(whole)
        assert all(torch.equal(rounded[name].bfloat16(), tensor.bfloat16()) for name, tensor in whole.items())
        if part == "merged" and lora_rank:
            assert plain / 2 < gathered[0] < plain
        else:
            assert gathered[0] == plain / 2
