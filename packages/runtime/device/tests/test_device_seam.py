import inspect
import json
import threading

import pytest
import torch
from torch.profiler import record_function

from offbeat_core import ConfigError, TracePlan, available_devices, load_backend
from offbeat_device import (
    StepTracer,
    StreamLane,
    TraceFiles,
    _cuda,
    accelerator_kind,
    copy_to_device,
    open_device,
    rank_device,
)
from offbeat_device._cuda import CudaDevice


def test_auto_takes_the_preferred_kind_that_is_here():
    assert open_device("auto").kind == next(iter(available_devices()))


@pytest.mark.parametrize(
    ("name", "kind"), [("cpu", ""), ("cuda", "GPU"), ("cuda:3", "GPU"), ("xpu", "XPU"), ("xpu:1", "XPU")]
)
def test_a_name_tells_the_kind_as_a_cluster_calls_it(name, kind):
    assert accelerator_kind(name) == kind


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


def test_what_is_copied_to_the_host_is_what_a_tensor_held_then():
    tensor = torch.ones(3)
    wait = open_device("cpu").copy_to_host(tensor)
    tensor.zero_()
    assert wait().tolist() == [1.0, 1.0, 1.0]


def test_a_cpu_records_no_work():
    assert open_device("cpu").work_graphs() is None


def test_torch_records_cuda_graphs_by_the_names_that_are_used_here():
    """No GPU is needed to ask; 2.11 to 2.13 have them."""
    assert {"pool", "stream", "capture_error_mode"} <= inspect.signature(torch.cuda.graph).parameters.keys()
    assert callable(torch.cuda.CUDAGraph.replay)
    assert callable(torch.cuda.graph_pool_handle)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_recorded_work_is_done_by_one_call_on_what_lies_there_then():
    device = open_device("cuda:0")
    graphs = device.work_graphs()
    x, y = (torch.ones(1000, device=device.torch_device) for _ in range(2))

    def work():
        y.copy_(x * 2 + y)

    work()
    run = graphs.record(work)
    assert y[0] == 3
    x.fill_(5.0)
    run()
    wait = device.copy_to_host(y)
    y.zero_()
    assert wait()[0] == 13


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
    monkeypatch.setattr("offbeat_device._device.open_device", lambda name: TwoAccelerators())
    monkeypatch.setattr("offbeat_device._device.available_devices", lambda: {"abacus": 2, "cpu": 1})
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


def test_a_profile_shows_all_threads(tmp_path):
    """An engine computes in a thread of its own."""
    ended = threading.Event()

    def compute():
        block = torch.randn(32, 32)
        while not ended.wait(0.001):
            with record_function("work of another thread"):
                torch.mm(block, block)

    thread = threading.Thread(target=compute)
    thread.start()
    profiler = open_device("cpu").profiler()
    profiler.start()
    ended.wait(0.2)
    profiler.stop()
    ended.set()
    thread.join()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "work of another thread" in names_in(tmp_path / "trace.json")


def names_in(path):
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def tracer(folder, max_bytes=1 << 24, role="trainer-0"):
    plan = TracePlan(role=role, folder=str(folder), first=1, last=3, max_bytes=max_bytes)
    return StepTracer(open_device("cpu"), plan)


def run_steps(traced, numbers=range(4)):
    for number in numbers:
        with traced.step(number):
            torch.mm(torch.ones(4, 4), torch.ones(4, 4))


def test_steps_are_traced_each_into_a_file_of_its_own(tmp_path):
    traced = tracer(tmp_path / "profile")
    run_steps(traced)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["trainer-0-1.json", "trainer-0-2.json"]
    for number in (1, 2):
        found = names_in(tmp_path / "profile" / f"trainer-0-{number}.json")
        assert {f"update {number}", "aten::mm"} <= found
        assert f"update {3 - number}" not in found
    assert traced.left_out == ""


def test_a_step_that_fails_is_traced_and_its_error_passes(tmp_path):
    def fail():
        torch.mm(torch.ones(4, 4), torch.ones(4, 4))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), tracer(tmp_path).step(1):
        fail()
    assert "aten::mm" in names_in(tmp_path / "trainer-0-1.json")


def test_traces_have_a_bound_that_the_former_process_has_used_too(tmp_path, capsys):
    run_steps(tracer(tmp_path), numbers=[1])
    size = (tmp_path / "trainer-0-1.json").stat().st_size
    (tmp_path / "rollout-0-1.json").write_text(" " * 10 * size)  # another role's: not counted
    traced = tracer(tmp_path, max_bytes=size + 10)
    run_steps(traced, numbers=[2, 1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollout-0-1.json", "trainer-0-1.json"]
    assert "10 of" in traced.left_out
    assert traced.left_out in capsys.readouterr().out


def test_a_step_of_several_processes_is_kept_whole_or_not_at_all(tmp_path):
    def written(step, num_bytes):
        paths = [files.unfinished(step).with_suffix(f".{rank}") for rank in range(2)]
        for path in paths:
            path.write_bytes(bytes(num_bytes))
        return paths

    files = TraceFiles(TracePlan(role="rollout-0", folder=str(tmp_path), first=0, last=9, max_bytes=100))
    files.keep(1, written(1, 30))
    files.keep(2, written(2, 21))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollout-0-1.json", "rollout-0-1.rank1.json"]
    assert "step 2 has 42 bytes, and 40 of 100" in files.left_out
    assert not files.wants(3)


@pytest.mark.parametrize(("kind", "variable"), [("cpu", ""), ("cuda", "CUDA_VISIBLE_DEVICES")])
def test_a_kind_says_which_variable_shows_a_process_its_devices(kind, variable):
    assert load_backend("offbeat.device", kind).visible_variable == variable


class Nvml:
    """Stands for libnvidia-ml, called through ctypes: two GPUs, of 80 and 24 GiB; `fails` answers with an error."""

    # ruff: noqa: N802

    def __init__(self, fails="", mig=0):
        self._fails, self._mig, self.open = fails, mig, 0

    def nvmlInit_v2(self):
        self.open += 1
        return self._error("init")

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2
        return self._error("count")

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = 100 + index
        return self._error("handle")

    def nvmlDeviceGetMigMode(self, handle, current, pending):
        current._obj.value = self._mig
        return self._error("mig")

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total = {100: 80, 101: 24}[handle.value] << 30
        return self._error("memory")

    def _error(self, call):
        return 999 if call == self._fails else 0


def test_the_memory_of_the_smallest_gpu_is_known_without_a_context(monkeypatch):
    monkeypatch.setattr(_cuda.ctypes, "CDLL", lambda name: library)
    library = Nvml()
    assert CudaDevice.memory_of_smallest() == 24 << 30
    assert not library.open
    library = Nvml(mig=1)
    assert CudaDevice.memory_of_smallest() == 0, "processes see parts"
    library = Nvml(fails="mig")
    assert CudaDevice.memory_of_smallest() == 24 << 30, "older GPUs have no parts"
    for call in ("init", "count", "handle", "memory"):
        library = Nvml(fails=call)
        assert CudaDevice.memory_of_smallest() == 0

    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(_cuda.ctypes, "CDLL", absent)
    assert CudaDevice.memory_of_smallest() == 0
    assert not torch.cuda.is_initialized()


def test_a_copy_to_the_cpu_is_the_tensor_itself_and_one_to_another_kind_waits_for_nothing(monkeypatch):
    tensor = torch.arange(3)
    assert copy_to_device(tensor, torch.device("cpu")) is tensor
    asked = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **how: asked.append((device, how)))
    copy_to_device(tensor, torch.device("xpu"))
    assert asked == [(torch.device("xpu"), {"non_blocking": True})]


class Streams:
    """Streams of a device as `torch.cuda` names them, which note what is queued on each, in order."""

    def __init__(self):
        self.queued, self.current = [], "compute"

    def Stream(self, device):
        return _Stream(self, f"lane of {device}")

    def current_stream(self, device):
        return _Stream(self, self.current)

    def stream(self, stream):
        runtime, before = self, self.current

        class Entered:
            def __enter__(self):
                runtime.current = stream.name

            def __exit__(self, *_):
                runtime.current = before

        return Entered()


class _Stream:
    def __init__(self, runtime, name):
        self.runtime, self.name = runtime, name

    def wait_stream(self, other):
        self.runtime.queued.append((self.name, f"wait for {other.name}"))

    def record_event(self):
        event = f"event {len(self.runtime.queued)}"
        self.runtime.queued.append((self.name, event))
        return event

    def wait_event(self, event):
        self.runtime.queued.append((self.name, f"wait for {event}"))


class Noting(torch.Tensor):
    """A tensor that notes on which stream it is copied to."""

    def copy_(self, source, non_blocking=False):
        self.runtime.queued.append((self.runtime.current, f"copy, blocking {not non_blocking}"))
        return super().copy_(source)


def test_a_copy_on_a_lane_is_between_what_was_queued_before_it_and_what_waits_for_it():
    runtime, to = Streams(), torch.zeros(3).as_subclass(Noting)
    to.runtime = runtime
    lane = StreamLane(runtime, torch.device("cuda", 0))
    wait = lane.copy(to, torch.ones(3))
    assert runtime.queued == [
        ("lane of cuda:0", "wait for compute"),
        ("lane of cuda:0", "copy, blocking False"),
        ("lane of cuda:0", "event 2"),
    ]
    wait()
    assert runtime.queued[3:] == [("compute", "wait for event 2")]


def test_a_processor_copies_at_once():
    to = torch.zeros(3)
    open_device("cpu").copy_lane().copy(to, torch.ones(3))
    assert to.sum() == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_copies_beside_what_it_computes():
    device = open_device("cuda:0")
    lane, host = device.copy_lane(), device.pinned_memory(4 * 2**20).view(torch.float32)
    here = torch.ones(2**20, device=device.torch_device)
    lane.copy(host, here)()
    here += 1
    lane.copy(here, host)()
    assert float((here * 2).sum()) == 2 * 2**20
