"""The engine's side of a weight update, without an engine: replies, folders, shared memory, what no product shows."""

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from offbeat_core import (
    DeadlineError,
    ModelError,
    ModelFolder,
    PeerFailedError,
    RolloutEngineConfig,
    WeightProof,
    WeightSyncError,
)
from offbeat_rollout_vllm import _updates
from offbeat_rollout_vllm._options import environment, remove_shared_memory, start_variables
from offbeat_rollout_vllm._updates import WeightLoader, tiny_elements
from offbeat_rollout_vllm._workers import Arena, Workers
from offbeat_testing import FakeWeightStream, tiny_model


class ScriptedWorkers:
    """Answers as scripted; stands for vLLM's transport, which the tests in engine/ use for real."""

    def __init__(self, *answers):
        self.calls, self.deadlines_s, self._answers = [], [], list(answers)

    def call_workers(self, text, deadline_s):
        self.calls.append(json.loads(text))
        self.deadlines_s.append(deadline_s)
        answer = self._answers.pop(0)
        future = Future()
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result([json.dumps(one) if isinstance(one, dict) else one for one in answer])
        return future


def reply(rank, number=0, **rest):
    return {"rank": rank, "number": number, **rest}


def test_answers_come_by_rank():
    form = ScriptedWorkers([reply(0, value="a"), reply(1, value="b")])
    assert Workers(form, 2, 5.0).call("describe", x=1) == ["a", "b"]
    assert form.calls == [{"number": 0, "method": "describe", "arguments": {"x": 1}}]


def test_a_refusal_is_an_error_and_the_workers_go_on():
    workers = Workers(ScriptedWorkers([reply(0), reply(1, error="no room")], [reply(0, 1), reply(1, 1)]), 2, 5.0)
    with pytest.raises(WeightSyncError, match="rank 1 could not load: no room"):
        workers.call("load")
    assert workers.call("load") == [None, None]


def test_the_worker_that_failed_by_itself_is_named():
    heard = reply(0, error="trainer-0 gave up: rollout-0.worker-1 gave up: no room", is_peers=True)
    workers = Workers(ScriptedWorkers([heard, reply(1, error="no room", is_peers=False)]), 2, 5.0)
    with pytest.raises(WeightSyncError, match="rank 1 could not receive: no room") as caught:
        workers.call("receive")
    assert not caught.value.is_peers


PART = ["weight", [0, 0], [2, 3], [7]]


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("step", ["receive", "confirm"])
def test_workers_that_fail_to_receive_give_up_and_say_whether_they_wrote(step, written):
    """Half of a version must not be served; what failed before its first tensor has changed nothing."""
    failed, done = [reply(0), reply(1, error="no room")], [reply(0, value=[PART]), reply(1, value=[PART])]
    answers = [failed] if step == "receive" else [done, [reply(0, 1), reply(1, 1, error="no room")]]
    number = len(answers)
    form = ScriptedWorkers(*answers, [reply(0, number, value=False), reply(1, number, value=written)])
    loader = WeightLoader(Workers(form, 2, 5.0), _folder_with({"weight": (2, 3)}), 256, "float32", on_cpu=False)
    with pytest.raises(WeightSyncError, match=f"rank 1 could not {step}: no room"):
        loader.receive("nccl", ["@trainer"], 3, 60.0, "rollout-0")
    assert loader.touched == written
    assert [call["method"] for call in form.calls] == [*["receive", "confirm"][:number], "give_up"]
    assert "no room" in form.calls[-1]["arguments"]["reason"]


def test_each_worker_gets_the_sums_of_all_and_both_calls_share_the_deadline_of_the_sync(monkeypatch):
    clock = iter([100.0, 140.0])  # the workers have received for 40 s
    monkeypatch.setattr(_updates, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    proof = [1, ["00" * 8]]
    form = ScriptedWorkers(
        [reply(0, value=[PART]), reply(1, value=[PART])], [reply(0, 1, value=proof), reply(1, 1, value=proof)]
    )
    loader = WeightLoader(Workers(form, 2, 5.0), _folder_with({"weight": (2, 3)}), 256, "float32", on_cpu=False)
    found = loader.receive("nccl", ["@trainer"], 3, 60.0, "rollout-0")
    assert found == WeightProof(version=3, num_tensors=1, checksums=("00" * 8,))
    receive, confirm = (call["arguments"] for call in form.calls)
    assert (receive["deadline_s"], receive["addresses"], receive["name"]) == (60.0, ["@trainer"] * 2, "rollout-0")
    assert confirm["sums"] == [PART, PART]
    assert form.deadlines_s == [63.0, 23.0], "of 5 s for other calls"


@pytest.mark.parametrize(
    "answer",
    [
        [reply(0), reply(1, number=7)],
        [reply(0), "something else"],
        [reply(0), reply(0)],
        [reply(0)],
        RuntimeError("Worker failed with error 'boom'"),
    ],
    ids=["stale", "foreign", "twice", "missing", "raised"],
)
def test_workers_that_answer_another_call_are_not_asked_again(answer):
    form = ScriptedWorkers(answer, [reply(0, 1), reply(1, 1)])
    workers = Workers(form, 2, 5.0)
    for _ in range(2):
        with pytest.raises(PeerFailedError):
            workers.call("load")
    assert len(form.calls) == 1


def test_workers_that_do_not_answer_are_named(monkeypatch):
    monkeypatch.setattr("offbeat_rollout_vllm._workers.GRACE_S", 0.0)

    class Silent:
        def call_workers(self, text, deadline_s):
            return Future()

    workers = Workers(Silent(), 2, 0.01)
    with pytest.raises(DeadlineError, match=r"rollout-vllm.load: waited 0.01 s for vLLM's workers"):
        workers.call("load")
    with pytest.raises(PeerFailedError, match="make a new engine"):
        workers.call("load")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [None, 30_000], ids=["one file", "several files"])
def test_a_folder_says_what_an_update_must_bring(tmp_path, tied, shard_bytes):
    from offbeat_testing import reference_model

    path = tiny_model(tmp_path / "model", tied=tied, max_shard_bytes=shard_bytes)
    folder = ModelFolder(path)
    model = reference_model(path)
    assert folder.shapes == {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert folder.optional == ({"lm_head.weight": (320, 64)} if tied else {})
    assert (folder.eos_ids, folder.vocab_size) == (frozenset([2]), 320)


def test_names_of_a_folder_and_of_the_model_in_memory_are_one():
    """Qwen2.5-VL: old names on disk, new ones in transformers and so in a stream. Qwen3-VL: new ones in both."""
    old = _folder_with({"model.norm.weight": (4,), "visual.merger.weight": (2, 3)}, optional={"lm_head.weight": (9, 4)})
    for name in ("model.norm.weight", "model.language_model.norm.weight"):
        assert (old.stored_name(name), old.shape_of(name)) == ("model.norm.weight", (4,))
    for name in ("visual.merger.weight", "model.visual.merger.weight"):
        assert (old.stored_name(name), old.shape_of(name)) == ("visual.merger.weight", (2, 3))
    assert old.shape_of("lm_head.weight") == (9, 4)
    new = _folder_with({"model.language_model.norm.weight": (4,), "model.visual.merger.weight": (2, 3)})
    assert new.stored_name("model.visual.merger.weight") == "model.visual.merger.weight"
    for name in ("model.norm.weight", "visual.merger.weight", "unknown"):
        assert (new.stored_name(name), new.shape_of(name)) == (name, None)


def _folder_with(shapes, optional=None):
    folder = ModelFolder.__new__(ModelFolder)
    folder.path, folder.shapes, folder.optional = Path("m"), shapes, optional or {}
    return folder


@pytest.mark.parametrize("spoil", ["config.json", "model.safetensors"])
def test_a_folder_that_lacks_a_file_or_has_half_of_it_is_refused(tmp_path, spoil):
    path = tiny_model(tmp_path / "model")
    (path / spoil).write_bytes((path / spoil).read_bytes()[:5])
    with pytest.raises(ModelError, match=spoil):
        ModelFolder(path)
    (path / spoil).unlink()
    with pytest.raises(ModelError, match=spoil):
        ModelFolder(path)


def test_another_process_sees_the_arena_and_no_file_system_does():
    arena = Arena.create(4096)
    arena.tensor(64, "float32", (2, 3)).copy_(_ramp())
    code = (
        "import sys; from offbeat_rollout_vllm._workers import Arena; arena = Arena.attach(sys.argv[1], 4096)\n"
        "tensor = arena.tensor(64, 'float32', (2, 3)); print(tensor.tolist()); tensor.mul_(2)"
    )
    done = subprocess.run([sys.executable, "-c", code, arena.address], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == str(_ramp().tolist()), done.stderr
    assert arena.tensor(64, "float32", (2, 3)).tolist() == (2 * _ramp()).tolist()
    assert not [name for name in os.listdir("/dev/shm") if "offbeat-rollout-vllm" in name]
    arena.close()


def _ramp():
    import torch

    return torch.arange(6, dtype=torch.float32).view(2, 3)


class LateWorker:
    """Does what it is asked in order, and not before an answer is waited for, as a worker that is behind."""

    def __init__(self):
        self.held, self._asked = {}, []

    def call_workers(self, text, deadline_s):
        self._asked.append((json.loads(text), LateAnswer(self)))
        return self._asked[-1][1]

    def work_until(self, answer):
        while not answer.done():
            call, its_answer = self._asked.pop(0)
            value = getattr(self, f"_{call['method']}", lambda **_: None)(**call["arguments"])
            its_answer.set_result([json.dumps(reply(0, call["number"], value=value))])

    def _attach(self, address, num_bytes):
        self._arena = Arena.attach(address, num_bytes)

    def _load(self, tensors):
        for name, dtype, shape, offset in tensors:
            self.held[name] = self._arena.tensor(offset, dtype, tuple(shape)).clone()

    def _locate(self, names, adapter):
        found = [self.held[name] for name in names]
        return [[list(held.shape), 0, [[0, len(held)]], str(held.dtype).removeprefix("torch.")] for held in found]

    def _read(self, tensors, adapter):
        for name, offset, dtype in tensors[0]:
            self._arena.tensor(offset, dtype, tuple(self.held[name].shape)).copy_(self.held[name])


class LateAnswer(Future):
    def __init__(self, worker):
        super().__init__()
        self._worker = worker

    def result(self, timeout=None):
        self._worker.work_until(self)
        return super().result(timeout)


def test_a_bucket_stays_as_it_is_until_a_worker_that_is_behind_has_read_it():
    """There are seven buckets, and one is larger than the arena was."""
    import torch

    shapes = {f"layers.{number}.weight": (5, 8) for number in range(7)} | {"layers.4.weight": (20, 8)}
    draw = torch.Generator().manual_seed(0)
    tensors = [(name, torch.randn(shape, generator=draw)) for name, shape in shapes.items()]
    stream, worker = FakeWeightStream(tensors, 3), LateWorker()
    loader = WeightLoader(Workers(worker, 1, 5.0), _folder_with(shapes), 256, "float32", on_cpu=False)
    assert loader.load(stream, 3) == stream.expected()
    assert all(torch.equal(worker.held[name], tensor) for name, tensor in tensors)
    loader.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_elements_that_no_product_shows_are_found(dtype):
    import torch

    number_format = getattr(torch, dtype)
    tiny = torch.finfo(number_format).tiny
    tensor = torch.tensor([[0.0, -0.0, 1.0], [tiny, tiny / 2, -tiny / 4]], dtype=number_format)
    assert tiny_elements(tensor).tolist() == [1, 4, 5]
    assert tiny_elements(tensor.abs().clamp_min(tiny)) is None
    assert tiny_elements(torch.zeros(3, dtype=torch.int32)) is None


def test_the_environment_is_as_it_was_afterwards(monkeypatch):
    monkeypatch.setenv("OFFBEAT_KEPT", "user")
    monkeypatch.setenv("OFFBEAT_FORCED", "user")
    with environment({"OFFBEAT_KEPT": "ours", "OFFBEAT_NEW": "ours"}, {"OFFBEAT_FORCED": "ours"}):
        found = [os.environ[f"OFFBEAT_{name}"] for name in ("KEPT", "NEW", "FORCED")]
        os.environ["OFFBEAT_BY_VLLM"] = "x"
        del os.environ["OFFBEAT_KEPT"]
    assert found == ["user", "ours", "ours"]
    assert os.environ["OFFBEAT_KEPT"] == os.environ["OFFBEAT_FORCED"] == "user"
    assert not {"OFFBEAT_NEW", "OFFBEAT_BY_VLLM"} & os.environ.keys()


def test_ranks_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 6, 7})
    config = RolloutEngineConfig(model_path="m", device="cpu")
    assert start_variables(config, 2, is_cpu=True)["VLLM_CPU_OMP_THREADS_BIND"] == "2,3|6,7"
    assert start_variables(config, 1, is_cpu=True)["VLLM_CPU_OMP_THREADS_BIND"] == "2,3,6,7"
    one = RolloutEngineConfig(model_path="m", device="cpu", num_threads=1)
    assert start_variables(one, 2, is_cpu=True)["VLLM_CPU_OMP_THREADS_BIND"] == "2|6"
    assert len(start_variables(config, 8, is_cpu=True)["VLLM_CPU_OMP_THREADS_BIND"].split("|")) == 8
    assert "VLLM_CPU_OMP_THREADS_BIND" not in start_variables(RolloutEngineConfig(model_path="m"), 1, is_cpu=False)


def test_only_the_shared_memory_of_the_engine_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("offbeat_rollout_vllm._options.SHARED_MEMORY", tmp_path)
    for name in ("vllm_dist_1-tp", "vllm_dist_2-tp"):
        (tmp_path / name).touch()
    remove_shared_memory("")
    remove_shared_memory("vllm_dist_1")
    assert [path.name for path in tmp_path.iterdir()] == ["vllm_dist_2-tp"]
