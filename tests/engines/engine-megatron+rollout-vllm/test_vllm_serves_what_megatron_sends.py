"""Weights of ranks that share a model reach vLLM in a process of another environment, over each transport for that."""

import json
import os
import subprocess
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from megatron_layouts import Layout, engine_config, make_model
from megatron_yardstick import make_sequences, policy_loss

from offbeat_core import TrainSequence
from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_weightsync import (
    BucketPlan,
    DiskSender,
    GroupSender,
    describe_tensors,
    new_address,
    open_sender,
)

DEADLINE_S = 60.0
BUCKET_BYTES = 1 << 14
SCHEMAS = Path(__file__).parents[3] / "packages/engines/rollout-vllm/tests/engine/torchvision_schemas"
"""For a torchvision that is built for CUDA, beside a torch that is not."""


class Vllm:
    """The other process. Ranks that are forked from this one may talk to it too."""

    def __init__(self, folder, log):
        python, script = os.environ["OFFBEAT_PARTNER_PYTHON"], Path(__file__).with_name("vllm_server.py")
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [python, script, folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, "PYTHONPATH": str(SCHEMAS)},
                text=True,
            )

    def notify(self, **said):
        self._process.stdin.write(json.dumps(said) + "\n")
        self._process.stdin.flush()

    def answer(self):
        line = self._process.stdout.readline()
        assert line, f"vLLM's process has ended: {self._log.read_text()[-4000:]}"
        return json.loads(line)

    def close(self):
        try:
            self._process.stdin.close()
            assert self._process.wait(DEADLINE_S) == 0, self._log.read_text()[-4000:]
        finally:
            self._process.kill()


@pytest.fixture
def folder(request, tmp_path):
    return make_model(tmp_path / "model", request.param)


@pytest.fixture
def vllm(folder, tmp_path):
    server = Vllm(folder, tmp_path / "vllm.log")
    yield server
    server.close()


def send(vllm, plan, weights, version, open_it):
    with open_it(plan) as sender:
        vllm.notify(version=version, address=sender.address)
        sender.send(weights, version, 1, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
@pytest.mark.mesh(tp=2, pp=2, deadline_s=100, compare=False)
def test_vllm_samples_with_the_log_probabilities_of_the_trainer(mesh, folder, vllm, tmp_path):
    check_updates(mesh, folder, vllm, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("folder", ["qwen3-moe"], indirect=True)
@pytest.mark.mesh(tp=2, pp=2, ep=2, deadline_s=100, compare=False)
def test_experts_of_different_ranks_are_joined_in_vllms_stacks(mesh, folder, vllm, tmp_path):
    check_updates(mesh, folder, vllm, tmp_path)


def check_updates(mesh, folder, vllm, tmp_path):
    """One over each transport: vLLM samples with the log-probabilities of the trainer."""
    transports = {
        "disk": lambda plan: DiskSender(new_address("127.0.0.1"), plan, tmp_path / "versions"),
        "group": lambda plan: GroupSender(new_address("127.0.0.1"), plan),
        "shared memory": lambda plan: open_sender(new_address(), plan),
        "tcp": lambda plan: open_sender(new_address("127.0.0.1"), plan),
    }
    ranks = mesh.group("dp", "cp", "tp", "pp")
    engine = MegatronTrainEngine.create(engine_config(folder, Layout()), mesh)
    plan = BucketPlan.build(describe_tensors(engine.weights(), "float32"), BUCKET_BYTES)
    assert ranks.decide(vllm.answer) == "started"
    for version, (name, open_it) in enumerate(transports.items(), 1):
        engine.forward_backward(make_sequences(version), policy_loss)
        engine.step()
        if mesh.rank == 0:
            send(vllm, plan, engine.weights(), version, open_it)
        else:
            deque(engine.weights(), maxlen=0)
        sampled = ranks.decide(vllm.answer)
        sequences = [sequence_of(**each) for each in sampled]
        served = np.concatenate([each["logprobs"] for each in sampled])
        now, first = (
            np.concatenate([each[s.loss_mask] for each, s in zip(found, sequences, strict=True)])
            for found in (engine.logprobs(sequences), engine.logprobs(sequences, reference=True))
        )
        np.testing.assert_allclose(served, now, rtol=0, atol=1e-3, err_msg=name)
        assert np.abs(now - first).max() > 0.1, "the updates have changed nothing"
    engine.close()


def sequence_of(prompt, ids, logprobs):
    return TrainSequence(ids=np.array(prompt + ids, np.int32), loss_mask=np.arange(len(prompt + ids)) >= len(prompt))
