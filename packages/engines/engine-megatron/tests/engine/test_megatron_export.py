"""The stream of weights: bit for bit, in one order, and with less than two buckets of memory beside the weights."""

import weakref

import pytest
import torch
from megatron_layouts import Layout, copied, same
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

SPARSE = Layout(model="qwen3-moe")


class Memory(TorchDispatchMode):
    """Counts the bytes of tensors that have been made and are still there, but for views of the weights."""

    def __init__(self, engine):
        super().__init__()
        self.held, self.peak = {}, 0
        self._weights = {parameter.untyped_storage()._cdata for parameter in engine._policy.weights.parameters.values()}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage):
        place = storage._cdata
        if place not in self.held and place not in self._weights:
            self.held[place] = storage.nbytes()
            weakref.finalize(storage, self.held.pop, place, None)
            self.peak = max(self.peak, sum(self.held.values()))


@pytest.mark.parametrize(
    "mesh",
    [
        {"pp": 2, "dp": 2, "ep": 2},
        {"tp": 2, "pp": 2},
        pytest.param({"tp": 2, "dp": 2, "ep": 2}, marks=pytest.mark.nightly),
    ],
    ids=str,
    indirect=True,
)
@pytest.mark.mesh
def test_experts_and_cut_tensors_come_bit_for_bit_in_buckets_of_any_size(create, models, mesh, monkeypatch):
    """1000 bytes: every tensor is larger than a bucket, and travels in rows."""
    engine = create(SPARSE, mesh)
    wanted = load_file(models["qwen3-moe"] / "model.safetensors")
    for bucket_bytes in (1000, 20_000, 2**25):
        monkeypatch.setattr("offbeat_engine_megatron._weights.BUCKET_BYTES", bucket_bytes)
        found = copied(engine)
        assert list(found) == [slot.name for slot in engine._policy.weights.slots]
        assert same(found, wanted), bucket_bytes


@pytest.mark.mesh(tp=2, pp=2, compare=False)
@pytest.mark.mesh(tp=2, dp=2, ep=2, compare=False)
def test_a_rank_holds_less_than_two_buckets_beside_its_weights(create, mesh, monkeypatch):
    """The largest tensor, the table of 320 tokens, is 40 KiB: half a bucket."""
    bucket_bytes = 2 * 320 * 32 * 4
    monkeypatch.setattr("offbeat_engine_megatron._weights.BUCKET_BYTES", bucket_bytes)
    engine = create(SPARSE, mesh)
    peaks = []
    for _ in range(4):  # gloo's threads let go of what they have sent a moment late: the least is what the export needs
        num_bytes = 0
        with Memory(engine) as memory:
            for _, tensor in engine.weights():
                num_bytes += tensor.nbytes
        peaks.append(memory.peak)
    assert num_bytes > 2 * bucket_bytes
    assert bucket_bytes / 2 <= min(peaks) < 2 * bucket_bytes, peaks
