"""Calls to a role in a real process: typed both ways, many at once, cancellable."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat_actors import ActorHandle
from offbeat_actors._launcher import drop_settings
from offbeat_core import (
    Completion,
    EngineHealth,
    GenerateRequest,
    Metric,
    Metrics,
    PeerFailedError,
    RolloutEngineConfig,
    SamplingParams,
    TrainSequence,
    VersionSegment,
    WeightProof,
)

COMPLETION = Completion(
    ids=np.array([5, 6, 7], np.int32),
    logprobs=np.array([-0.1, -0.2, -0.3], np.float32),
    segments=(VersionSegment(version=1, num_tokens=1), VersionSegment(version=2, num_tokens=2)),
    stop_reason="eos",
    text="e=mc²",
)
EMPTY = Completion(ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), segments=(), stop_reason="aborted")
REQUEST = GenerateRequest(
    request_id="r1",
    prompt_ids=np.array([1, 2], np.int32),
    num_samples=4,
    params=SamplingParams(stop=("a", "b"), stop_token_ids=(3,), seed=9),
)
SEQUENCE = TrainSequence(
    ids=np.array([1, 2, 3], np.int32),
    loss_mask=np.array([False, True, True]),
    extras={"advantages": np.array([0, 0.5, -0.5], np.float32)},
)
METRICS = {"loss": Metric(value=0.25, weight=3), "lag": Metric(value=2, how="max"), "odd": Metric(value=float("inf"))}
PROOF = WeightProof(version=3, num_tensors=2, checksums=("00ff" * 4, "abcd" * 4))
HEALTH = EngineHealth(version=1, num_running=2, num_waiting=3, num_tokens=4, busy_s=0.5, uptime_s=1.5)


def assert_same(before: object, after: object) -> None:
    assert type(after) is type(before)
    np.testing.assert_equal(vars(after), vars(before))


def test_every_wire_type_arrives_as_itself(start_role: Any) -> None:
    async def scenario() -> None:
        async with start_role("Echo") as role:
            completions = await role.call("completions", [COMPLETION, EMPTY], returns=list[Completion])
            assert_same(COMPLETION, completions[0])
            assert_same(EMPTY, completions[1])
            assert completions[0].ids.dtype == np.int32
            assert_same(REQUEST, await role.call("request", REQUEST, returns=GenerateRequest))
            assert_same(SEQUENCE, (await role.call("sequences", [SEQUENCE], returns=list[TrainSequence]))[0])
            assert await role.call("metrics", METRICS, returns=Metrics) == METRICS
            assert await role.call("proof", value=PROOF, returns=WeightProof) == PROOF
            assert await role.call("health", HEALTH, returns=EngineHealth) == HEALTH
            assert await role.call("path", Path("/a/b"), returns=Path) == Path("/a/b")
            mixed = {"a": [1, 2.5, None, "x"], "b": {"c": True}}
            assert await role.call("anything", mixed, returns=dict) == mixed
            assert await role.call("kinds", 1, 2, 3.5, name="x", returns=list[str]) == ["int", "float", "float", "str"]

    asyncio.run(scenario())


def test_an_answer_that_came_while_the_caller_was_stalled_is_not_late(start_role: Any) -> None:
    """A long step of the caller, such as a garbage collection, does not make a role that has answered late."""

    name = "x" * 2**20  # an answer that is read in several steps

    async def scenario() -> list[str]:
        async with start_role("Echo") as role:
            call = asyncio.create_task(role.call("note", name, 0.3, returns=list[str], deadline_s=0.6))
            await asyncio.sleep(0.1)  # the question is on its way
            time.sleep(1.0)  # the event loop is blocked past the deadline
            return await call

    assert asyncio.run(scenario()) == [f"{name} begins", f"{name} ends"]


def test_the_constructor_takes_dataclasses_and_arrays(start_role: Any) -> None:
    config = RolloutEngineConfig(model_path="m", options={"a": [1]})
    kwargs = {"config": config, "weights": np.array([[1.5]], np.float32)}

    async def scenario() -> None:
        async with start_role("Echo", kwargs) as role:
            assert await role.call("get_config", returns=RolloutEngineConfig) == config
            weights = await role.call("get_weights", returns=np.ndarray)
            np.testing.assert_array_equal(weights, [[1.5]])

    asyncio.run(scenario())


@pytest.mark.nightly
def test_a_hundred_megabytes_go_there_and_back(start_role: Any) -> None:
    async def scenario() -> None:
        async with start_role("Echo") as role:
            array = np.arange(12_500_000, dtype=np.int64)
            doubled = await role.call("double", array, returns=np.ndarray)
            np.testing.assert_array_equal(doubled, array * 2)

    asyncio.run(scenario())


def test_sync_methods_run_one_at_a_time_in_order(start_role: Any) -> None:
    async def scenario() -> list[str]:
        async with start_role("Echo") as role:
            answers = await asyncio.gather(*(role.call("note", name, 0.02, returns=list[str]) for name in "abc"))
            return answers[-1]  # type: ignore[no-any-return]

    assert asyncio.run(scenario()) == [f"{name} {what}" for name in "abc" for what in ("begins", "ends")]


@pytest.mark.parametrize("main_thread", [False, True])
def test_health_answers_while_a_long_method_computes(start_role: Any, main_thread: bool) -> None:
    async def scenario() -> None:
        async with start_role("Patient", main_thread=main_thread) as role:
            assert await role.call("in_main_thread", returns=list[bool]) == [main_thread] * 2
            computing = asyncio.create_task(role.call("wait_released", returns=str))
            for _ in range(20):
                assert await role.call("started", returns=bool)
            assert not computing.done()
            await role.call("release")
            assert await computing == "released"

    asyncio.run(scenario())


def test_a_thousand_calls_in_flight_get_their_own_answers(start_role: Any) -> None:
    async def scenario() -> list[int]:
        async with start_role("Echo") as role:
            calls = [role.call("anything", number, returns=int) for number in range(1000)]
            return list(await asyncio.gather(*calls))

    assert asyncio.run(scenario()) == list(range(1000))


async def cancel(call: "asyncio.Task[Any]") -> None:
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


def test_cancelling_a_call_cancels_the_async_method(start_role: Any) -> None:
    async def scenario() -> None:
        async with start_role("Patient") as role:
            call = asyncio.create_task(role.call("wait_long"))
            await role.call("waiting")
            await cancel(call)
            assert await role.call("was_cancelled", returns=bool)

    asyncio.run(scenario())


def test_cancelling_a_call_takes_it_off_the_queue(start_role: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace"

    async def scenario() -> None:
        async with start_role("Patient", {"trace": trace}) as role:
            first = asyncio.create_task(role.call("wait_released", returns=str))
            second = asyncio.create_task(role.call("compute", 0.0))
            assert await role.call("started", returns=bool)  # so both have been sent
            await cancel(second)
            await role.call("release")
            assert await first == "released"

    asyncio.run(scenario())
    assert trace.read_text().splitlines() == ["closed"]


async def refused(role: ActorHandle, method: str, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(PeerFailedError) as caught:
        await role.call(method, *args, **kwargs)
    assert await role.call("anything", 1, returns=int) == 1  # the role continues
    return caught.value.reason


def test_a_wrong_call_is_refused_and_named(start_role: Any) -> None:
    async def scenario() -> None:
        async with start_role("Echo") as role:
            assert "has no method 'generat'; it has anything, array" in await refused(role, "generat")
            assert "has no method '__init__'" in await refused(role, "__init__")
            assert "has no method 'order'" in await refused(role, "order")
            assert "missing a required argument: 'value'" in await refused(role, "path")
            assert "unexpected keyword argument 'colour'" in await refused(role, "path", "x", colour="red")
            assert "argument 'value': Expected `object`, got `int`" in await refused(role, "request", 3)
            assert "argument 'first': Expected `int`, got `str`" in await refused(role, "kinds", "x")
            with pytest.raises(TypeError, match="a call carries plain data"):
                await role.call("anything", object())
            with pytest.raises(PeerFailedError, match="something else than declared"):
                await role.call("anything", "text", returns=int)

    asyncio.run(scenario())


def test_threads_that_wait_sleep_where_roles_share_cpus(start_role: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    for name in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)

    async def scenario() -> None:
        active = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "7"}
        unset = {"OMP_WAIT_POLICY": "", "KMP_BLOCKTIME": ""}
        for shares_cpus, wanted in ((True, active), (False, unset)):
            async with start_role("Patient", shares_cpus=shares_cpus) as role:
                assert {name: await role.call("environment", name, returns=str) for name in wanted} == wanted

    asyncio.run(scenario())


@pytest.mark.nightly
def test_num_threads_holds_for_torch(start_role: Any) -> None:
    pytest.importorskip("torch", reason="the package does without torch")

    async def scenario() -> tuple[str, int]:
        async with start_role("Patient", num_threads=1) as role:
            return await role.call("thread_settings", returns=tuple[str, int])  # type: ignore[no-any-return]

    assert asyncio.run(scenario()) == ("1", 1)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("expandable_segments:True,max_split_size_mb:128", "max_split_size_mb:128"),
        ("roundup_power2_divisions:[256:1,512:2], expandable_segments:True", "roundup_power2_divisions:[256:1,512:2]"),
        ("expandable_segments:True", ""),
        ("max_split_size_mb:128", "max_split_size_mb:128"),
    ],
)
def test_settings_that_a_process_refuses_are_left_out_and_no_others(given: str, found: str) -> None:
    kept = drop_settings({"CONF": given, "OTHER": given}, {"CONF": ["expandable_segments"], "NONE": ["x"]})
    assert kept == {"OTHER": given} | ({"CONF": found} if found else {})


def test_a_role_does_not_inherit_a_setting_that_it_refuses(start_role: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # what a role here inherits

    async def scenario() -> list[str]:
        given = {"PYTORCH_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"}
        refused = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), ("expandable_segments",))
        async with start_role("Patient", env=given, dropped_settings=refused) as role:
            return [await role.call("environment", name, returns=str) for name in refused]

    assert asyncio.run(scenario()) == ["max_split_size_mb:128", ""]


def test_a_role_knows_its_run_and_inherits_no_files(start_role: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        with (tmp_path / "private").open("w"):
            async with start_role("Patient", env={"COLOUR": "red"}) as role:
                assert await role.call("environment", "OFFBEAT_RUN", returns=str) == "test-run"
                assert await role.call("environment", "OFFBEAT_ROLE", returns=str) == "rollout-0"
                assert await role.call("environment", "COLOUR", returns=str) == "red"
                files = await role.call("open_files", returns=list[str])
                assert not [file for file in files if "private" in file]
                assert sum(file.startswith("socket:") for file in files) <= 3  # ours, and the loop's own pair

    asyncio.run(scenario())
