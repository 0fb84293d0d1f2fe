"""A model comes from its folder slice by slice, and goes back: no rank ever holds all of it."""

import pytest
import torch
from megatron_layouts import MODELS
from safetensors import safe_open
from torch.profiler import ProfilerActivity, profile

from offbeat_engine_megatron._megatron import CpuShim
from offbeat_testing import tiny_model
from offbeat_training import TensorFolder


@pytest.mark.mesh(tp=2, pp=2)
@pytest.mark.parametrize("family", MODELS)
def test_every_family_goes_in_and_out_bit_for_bit(create, mesh, models, shared, family):
    """From safetensors to safetensors, each tensor once, a tied head not at all."""
    engine = create(mesh=mesh, folder=models[family])
    engine.save_weights(shared / family)
    mesh.group(*mesh.axes).barrier()
    wanted, found = (stored(folder) for folder in (models[family], shared / family))
    assert found.keys() == wanted.keys() - ({"lm_head.weight"} if engine._plan.shape.tied else set())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


def stored(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    return found


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    return tiny_model(folder, num_layers=8, num_kv_heads=4, hidden_size=64, max_shard_bytes=200_000)


@pytest.mark.mesh(tp=2, pp=2)
@pytest.mark.mesh(tp=4)
def test_a_rank_reads_its_own_slices_and_holds_one_parameter_more(create, mesh, wide, monkeypatch):
    taken = []
    read = TensorFolder.read

    def reads(folder, name, box):
        tensor = read(folder, name, box)
        taken.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(TensorFolder, "read", reads)
    engine = create(mesh=mesh, folder=wide)
    parameters = [each.nbytes for each in engine._passes.tensors()]
    whole = sum(4 * slot.num_elements for slot in engine._policy.weights.slots)
    assert sum(taken) == sum(parameters) < 0.4 * whole, (sum(taken), sum(parameters), whole)
    with CpuShim():
        peak = peak_bytes(lambda: engine._policy.weights.read(wide), wide)
    assert max(parameters) <= peak < 2.5 * max(parameters) < 0.5 * whole, (peak, max(parameters), whole)


def peak_bytes(work, folder):
    """Most that torch's allocator held above what it held before; files that are mapped, not read, take no memory."""
    mapped = {path.stat().st_size for path in folder.glob("*.safetensors")}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    held = peak = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda each: each.start_ns()):
        if event.name() == "[memory]" and abs(event.nbytes()) not in mapped:
            held += event.nbytes()
            peak = max(peak, held)
    return peak
