"""The stream of weights: bit for bit, in one order, and with less than two buckets of memory beside the weights."""

import weakref

import pytest
import torch
from megatron_layouts import make_model
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_types import TrainEngineConfig


@pytest.fixture(scope="session")
def sparse_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("megatron") / "sparse", "qwen3-moe")


def create(folder, mesh):
    return MegatronTrainEngine.create(TrainEngineConfig(model_path=str(folder), device="cpu"), mesh)


class Memory(TorchDispatchMode):
    """Counts the bytes of tensors that have been made and are still there, but for views of the weights."""

    def __init__(self, engine):
        super().__init__()
        self.held, self.peak = {}, 0
        self._weights = {parameter.untyped_storage()._cdata for parameter in engine._held._parameters.values()}

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
def test_experts_and_cut_tensors_come_bit_for_bit_in_buckets_of_any_size(sparse_folder, mesh, monkeypatch):
    """1000 bytes: every tensor is larger than a bucket, and travels in rows."""
    engine = create(sparse_folder, mesh)
    wanted = load_file(sparse_folder / "model.safetensors")
    for bucket_bytes in (1000, 20_000, 2**25):
        monkeypatch.setattr("offbeat_engine_megatron._weights.BUCKET_BYTES", bucket_bytes)
        found = {name: tensor.clone() for name, tensor in engine.weights()}
        assert list(found) == [slot.name for slot in engine._held.slots]
        assert found.keys() == wanted.keys()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items()), bucket_bytes
    engine.close()


@pytest.mark.mesh(tp=2, pp=2, compare=False)
@pytest.mark.mesh(tp=2, dp=2, ep=2, compare=False)
def test_a_rank_holds_less_than_two_buckets_beside_its_weights(sparse_folder, mesh, monkeypatch):
    """The largest tensor, the table of 320 tokens, is 40 KiB: half a bucket."""
    bucket_bytes = 2 * 320 * 32 * 4
    monkeypatch.setattr("offbeat_engine_megatron._weights.BUCKET_BYTES", bucket_bytes)
    engine = create(sparse_folder, mesh)
    peaks = []
    for _ in range(4):  # gloo's threads let go of what they have sent a moment late: the least is what the export needs
        num_bytes = 0
        with Memory(engine) as memory:
            for _, tensor in engine.weights():
                num_bytes += tensor.nbytes
        peaks.append(memory.peak)
    assert num_bytes > 2 * bucket_bytes
    assert bucket_bytes / 2 <= min(peaks) < 2 * bucket_bytes, peaks
    engine.close()
