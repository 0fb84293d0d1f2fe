"""The host waits for the device once a pass, however many micro-batches it has."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat_core import DeferredMetrics, Metric, TrainEngineConfig, TrainSequence
from offbeat_engine_torch import TorchTrainEngine

LENGTH = 12


class Reads(TorchDispatchMode):
    """Counts what would wait on an accelerator: reads of one number, sizes that depend on values, copies to the host.

    A copy to the host is one of a tensor on the device; on a CPU, where there is none, `Tensor.cpu` is counted.
    """

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "is_nonzero")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        chosen = name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        if name in self.WAITS or chosen:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch):
    """Collects the reads of a call."""
    copy = torch.Tensor.cpu

    def count(call):
        mode = Reads()
        monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (mode.found.append("cpu"), copy(tensor))[1])
        with mode:
            call()
        monkeypatch.undo()
        return mode.found

    return count


def measured(tokens):
    """A policy gradient with metrics that are left on the device, one of them a tensor."""
    loss = -(tokens.logprobs_N * tokens.extras["advantage"]).sum() / tokens.total_tokens
    numbers = [loss.detach().reshape(1), tokens.entropy_N]
    means = DeferredMetrics(numbers, lambda values: {"mine": Metric(value=values[1].mean() + values[0][0])})
    return loss, means | {"plain": Metric(value=1.0)}


def sequences(num):
    """Sequences of one length, of which a micro-batch takes one."""
    rng = np.random.default_rng(3)
    ids = rng.integers(3, 300, (num, LENGTH)).astype(np.int32)
    extras = {"advantage": rng.normal(size=LENGTH).astype(np.float32)}
    return [TrainSequence(ids=each, loss_mask=np.arange(LENGTH) >= 5, extras=extras) for each in ids]


@pytest.fixture(scope="module")
def engine(model_folder):
    settings = {"device": "cpu", "max_tokens_per_microbatch": 16, "options": {"share_prompts": False}}
    return TorchTrainEngine.create(TrainEngineConfig(model_path=str(model_folder), **settings))


def test_the_reads_of_an_update_do_not_grow_with_its_micro_batches(engine, reads):
    found = []
    for num_micro_batches in (1, 8):
        update, metrics = sequences(num_micro_batches), {}
        passed = reads(lambda update=update, metrics=metrics: metrics.update(engine.forward_backward(update, measured)))
        assert metrics["num_microbatches"].value == num_micro_batches
        found.append((passed, reads(engine.step)))
    assert found[0] == found[1]
    assert found[0][0] == ["cpu"]


def test_the_reads_of_log_probabilities_do_not_grow_with_their_micro_batches(engine, reads):
    found = [reads(lambda num=num: engine.logprobs(sequences(num))) for num in (1, 8)]
    assert found == [["cpu"], ["cpu"]]
