"""Weights on the trainer's device on their way into engines: into vLLM's workers, and fused for others."""

import json
from concurrent.futures import Future

import npu_standin
import pytest
import torch

from offbeat_core import ModelFolder, WeightSyncError
from offbeat_rollout_vllm._updates import WeightLoader
from offbeat_rollout_vllm._workers import Arena, Workers
from offbeat_testing import tiny_model
from offbeat_weightsync import InProcessStream, NameMap, describe_tensors

ALONE = pytest.mark.ranks(1, join=False, deadline_s=90)


class WorkerInProcess:
    """One worker on the other side of an arena. As a packed product does, it can show subnormal numbers as zero.

    Args:
        flushes: it shows them so.
    """

    def __init__(self, *, flushes):
        self._flushes, self.held = flushes, {}

    def call_workers(self, text, deadline_s):
        call = json.loads(text)
        value = getattr(self, call["method"], lambda **_: None)(**call["arguments"])
        future = Future()
        future.set_result([json.dumps({"number": call["number"], "rank": 0, "value": value})])
        return future

    def attach(self, address, num_bytes):
        self._arena = Arena.attach(address, num_bytes)

    def load(self, tensors):
        for name, dtype, shape, offset in tensors:
            self.held[name] = self._arena.tensor(offset, dtype, tuple(shape)).clone()

    def locate(self, names, adapter):
        found = [self.held[name] for name in names]
        return [[list(held.shape), 0, [[0, len(held)]], str(held.dtype).removeprefix("torch.")] for held in found]

    def read(self, tensors, adapter):
        for name, offset, dtype in tensors[0]:
            held = self.held[name]
            if self._flushes:
                held = torch.where(held.abs() < torch.finfo(held.dtype).tiny, 0.0, held)
            self._arena.tensor(offset, dtype, tuple(held.shape)).copy_(held)


def updated(folder, change=lambda held: None, *, on_cpu):
    """Load weights that lie on the device, some of them subnormal, and prove them."""
    model = ModelFolder(folder)
    draw = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in model.shapes.items()}
    name = next(iter(tensors))
    tensors[name].view(-1)[:3] = torch.tensor([-0.0, 1e-39, -1e-40])
    stream = InProcessStream([(each, tensor.to("npu")) for each, tensor in tensors.items()], 3)
    worker = WorkerInProcess(flushes=on_cpu)

    def finish():  # answers nothing, as vLLM's worker: an answer travels as JSON
        change(worker.held[name].view(-1))

    worker.finish = finish
    loader = WeightLoader(Workers(worker, 1, 10.0), model, 1 << 20, "float32", on_cpu=on_cpu)
    proof = loader.load(stream, 3)
    for each, tensor in tensors.items():
        assert torch.equal(worker.held[each].view(torch.int32), tensor.view(torch.int32)), each
    return proof


@ALONE
@pytest.mark.parametrize("on_cpu", [True, False], ids=["workers on CPUs", "workers on devices"])
def test_subnormal_weights_of_a_trainer_on_a_device_are_proved(standin, tmp_path, on_cpu):
    npu_standin.install(standin)
    folder = tiny_model(tmp_path / "model", hidden_size=32)
    assert updated(folder, on_cpu=on_cpu).num_tensors == len(ModelFolder(folder).shapes)
    with pytest.raises(WeightSyncError, match="the engine holds other bytes than were sent"):
        updated(folder, lambda held: held[5:6].fill_(0.5), on_cpu=on_cpu)


@ALONE
def test_a_worker_on_a_device_must_hold_subnormal_numbers_as_they_were_sent(standin, tmp_path):
    """Only a product on a CPU hides them: a device's memory is read back as it is."""
    npu_standin.install(standin)
    folder = tiny_model(tmp_path / "model", hidden_size=32)
    with pytest.raises(WeightSyncError, match="the engine holds other bytes than were sent"):
        updated(folder, lambda held: held[1:2].fill_(0.0), on_cpu=False)


@ALONE
def test_tied_tensors_on_a_device_are_compared_where_they_are_fused(standin):
    npu_standin.install(standin)
    table = torch.arange(12.0).view(4, 3)
    named = {"model.embed_tokens.weight": table.to("npu"), "lm_head.weight": table.to("npu")}
    names = NameMap.build(describe_tensors(named.items()), tied={"lm_head.weight": "model.embed_tokens.weight"})
    (fused,) = names.fuse(named.items()).values()
    assert torch.equal(fused, table)
    with pytest.raises(WeightSyncError, match="their values differ"):
        names.fuse((named | {"lm_head.weight": named["lm_head.weight"] + 1}).items())
