"""Trainer and engines on the same devices, for real: they take turns, memory changes hands in order, runs continue."""

import asyncio
import json
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from role_faults import accounting_complaints, last_value, role_pids, signal_role, updates
from test_grpo_app_engines import Handle, run, settings

from grpo_async_app._config.parking import Parking
from grpo_async_app._fleet.colocation import ColocationSchedule
from grpo_async_app._fleet.engines import Engine
from grpo_async_app._fleet.events import LoggedEvents
from offbeat_core import OffbeatError
from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_run import read_metrics, read_timeline
from offbeat_testing import CommandLine, RunningCommand, tiny_model

Main = Callable[[], object]
NUM_TRAIN = 20
IN_TURN = ("--async.staleness_threshold=0", "--async.partial_rollout=false")
COLOCATED = (*IN_TURN, "--cluster.colocate=true", "--rollout.num_engines=2")
MIB = 2**20


def steps_of(run: Path) -> list[tuple[str, str, float, float, int]]:
    """(role, step, start_s, end_s, resident bytes) of all that roles did, in order."""
    events = read_timeline(run / "timeline.json")
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [
        (tracks[event["tid"]], event["name"], event["ts"], event["ts"] + event["dur"], event["args"])
        for event in events
        if event["ph"] == "X" and tracks[event["tid"]] != "weight sync" and not event["name"].startswith("take weights")
    ]
    return sorted(
        ((role, step, start, end, args.get("resident_bytes", 0)) for role, step, start, end, args in spans),
        key=lambda span: span[2],
    )


def turns_of(steps: list[tuple[str, str, float, float, int]]) -> list[str]:
    """The steps without their roles' numbers, each row of equal ones once."""
    words = [f"{role.partition('-')[0]} {step}" for role, step, *_ in steps]
    return [word for place, word in enumerate(words) if place == 0 or words[place - 1] != word]


def learned(run: Path) -> list[Any]:
    """Everything of a run that time does not change: what was sampled and trained on, and how that went."""
    lines = [json.loads(line) for line in (run / "generations" / "train.jsonl").read_text().splitlines()]
    groups = sorted((line["step"], line["prompt"], line["completion"], line["reward"]) for line in lines)
    about_time = ("perf/", "async/", "validation/", "engines/", "scoring/")
    metrics = [
        (line.step, {name: value for name, value in line.values.items() if not name.startswith(about_time)})
        for line in read_metrics(run / "metrics.jsonl")
    ]
    return [groups, metrics]


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough to be seen in the resident memory of a process."""
    return tiny_model(tmp_path_factory.mktemp("larger"), hidden_size=768, num_layers=4)


BETWEEN_TWO_TURNS = [
    "trainer sleep 1",
    "rollout wake weights",
    "trainer sleep 2",
    "rollout wake kv_cache",
    "rollout generate",
    "rollout sleep",
    "trainer wake",
    "trainer train",
]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_colocated_run_is_the_synchronous_run_with_memory_handed_over_in_order(
    forked_main: Main, config: Path, tmp_path: Path, larger_model: Path
) -> None:
    words = ["train", config, f"--model.path={larger_model}", "--eval.every_updates=0", "--checkpoint.every=0"]
    runs = {"apart": (*IN_TURN, "--rollout.num_engines=2"), "colocated": COLOCATED}
    for name, more in runs.items():
        with RunningCommand(forked_main, *words, "--out", tmp_path / name, *more) as process:
            assert process.wait() == 0, process.output
    run = tmp_path / "colocated"
    assert learned(run) == learned(tmp_path / "apart")
    assert accounting_complaints(run, NUM_TRAIN, 1, per_update=4) == []
    assert last_value(run, "perf/handover_s") > 0

    steps = steps_of(run)
    turns = turns_of(steps)
    assert turns[:3] == ["trainer sleep 2", "rollout sleep", "trainer wake"], "one after the other from the start"
    assert turns[3:-6] == BETWEEN_TWO_TURNS * 5
    last_checkpoint = ["rollout sleep", "trainer wake"]
    assert turns[-6:] == [*BETWEEN_TWO_TURNS[:4], *last_checkpoint], "the engines end with the last weights"
    by_step = [(f"{role.partition('-')[0]} {step}", start, end) for role, step, start, end, _ in steps]
    for (one, _, end), (other, start, _) in pairwise(by_step):
        assert one == other or end <= start, f"{other} began before the end of {one}"
    weights_bytes = (larger_model / "model.safetensors").stat().st_size
    assert weights_bytes > 50 * MIB, "it stands out from what a process holds anyway"
    assert_memory_went_back_and_forth(steps, weights_bytes)


def assert_memory_went_back_and_forth(steps: list[tuple[str, str, float, float, int]], weights_bytes: int) -> None:
    held = {f"{role} {step}": resident for role, step, _, _, resident in steps if resident}
    assert held["trainer-0 wake"] - held["trainer-0 sleep 1"] > 1.5 * weights_bytes, "two moments"
    assert held["trainer-0 sleep 1"] - held["trainer-0 sleep 2"] > 0.7 * weights_bytes
    for name in ("rollout-0", "rollout-1"):
        assert held[f"{name} wake kv_cache"] - held[f"{name} sleep"] > 0.7 * weights_bytes


async def _hangs(engine: TorchRolloutEngine, level: int) -> None:
    await asyncio.sleep(3600)


async def _refuses(engine: TorchRolloutEngine, level: int) -> None:
    raise OffbeatError("the allocator holds what cannot be given back")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("falls_asleep", "code", "texts"),
    [
        (_hangs, 4, ["sleep", "waited 8 s for rollout-0, rollout-1", "rollout-0.sleep"]),
        (_refuses, 3, ["rollout-0 cannot sleep: the allocator holds what cannot be given back"]),
    ],
    ids=["hangs", "refuses"],
)
def test_an_engine_that_does_not_sleep_is_named_within_its_deadline(
    forked_main: Main, config: Path, tmp_path: Path, falls_asleep: Any, code: int, texts: list[str]
) -> None:
    sleep = TorchRolloutEngine.sleep

    async def sleep_once(engine: TorchRolloutEngine, level: int) -> None:
        """The first time, at the start, it does."""
        await (falls_asleep if hasattr(engine, "has_slept") else sleep)(engine, level)
        engine.has_slept = True  # type: ignore[attr-defined]

    def main() -> None:
        TorchRolloutEngine.sleep = sleep_once  # type: ignore[method-assign]
        forked_main()

    with RunningCommand(
        main, "train", config, "--out", tmp_path / "run", *COLOCATED, "--cluster.turn_timeout_s=8"
    ) as process:
        assert process.wait() == code, process.output
        for each in texts:
            assert each in process.output
        assert "Traceback" not in process.output


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_roles_that_keep_their_memory_take_turns_all_the_same(forked_main: Main, config: Path, tmp_path: Path) -> None:
    words = ["train", config, "--eval.every_updates=0", "--checkpoint.every=0"]
    for name, more in {"apart": (*IN_TURN, "--rollout.num_engines=2"), "colocated": COLOCATED}.items():
        with RunningCommand(forked_main, *words, "--out", tmp_path / name, *more, "--cluster.sleep_level=0") as process:
            assert process.wait() == 0, process.output
    run = tmp_path / "colocated"
    assert learned(run) == learned(tmp_path / "apart")
    assert last_value(run, "perf/handover_s") == 0
    steps = steps_of(run)
    assert {step for _, step, *_ in steps} == {"generate", "train"}
    for (one, step, _, end, _), (other, next_step, start, _, _) in pairwise(steps):
        assert step == next_step or end <= start, f"{other} {next_step} began before the end of {one} {step}"


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("level", [1, 2])
def test_engines_whose_memory_stays_at_its_addresses_sample_the_same(
    forked_main: Main, config: Path, tmp_path: Path, level: int
) -> None:
    words = ["train", config, "--eval.every_updates=0", "--checkpoint.every=0", f"--cluster.sleep_level={level}"]
    options = "--rollout.options={static_rows = true, pack_weights = false}"
    for name, more in {"apart": (*IN_TURN, "--rollout.num_engines=2"), "colocated": COLOCATED}.items():
        with RunningCommand(forked_main, *words, "--out", tmp_path / name, *more, options) as process:
            assert process.wait() == 0, process.output
    assert learned(tmp_path / "colocated") == learned(tmp_path / "apart")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["rollout-1", pytest.param("trainer-0", marks=pytest.mark.nightly)])
def test_a_colocated_role_that_is_killed_is_started_again_when_it_is_its_turn(
    forked_main: Main, config: Path, tmp_path: Path, role: str
) -> None:
    run = tmp_path / "run"
    words = [*COLOCATED, "--data.epochs=6", "--cluster.sleep_level=1"]
    with RunningCommand(forked_main, "train", config, "--out", run, *words) as process:
        process.wait_until(lambda: len(updates(run)) >= 3, "3 updates")
        gone = signal_role(process, role, signal.SIGKILL)
        process.wait_until(lambda: role_pids(process).get(role, gone) != gone, f"a new {role}")
        assert process.wait() == 0, process.output
    assert accounting_complaints(run, NUM_TRAIN, 6, per_update=4) == []


def test_what_cannot_take_turns_is_refused_before_anything_starts(
    command: CommandLine, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", config, "--out", tmp_path / "run", "--cluster.colocate=true"]
    ended = command(*words)
    assert ended.code == 2
    assert "async is partial (staleness_threshold = 0.5, trigger_parameter_sync_step = 1): set them to 0" in ended.err
    from offbeat_engine_torch import TorchTrainEngine

    monkeypatch.delattr(TorchTrainEngine, "sleep")
    ended = command(*words, *IN_TURN)
    assert ended.code == 2
    assert "engine.backend = 'torch' cannot give its memory back between updates" in ended.err


def test_while_the_trainer_has_the_devices_no_engine_is_given_work_and_none_starts(config: Path) -> None:
    async def scenario() -> None:
        engine, trainer = Engine(Handle("rollout-0")), Handle("trainer-0")  # type: ignore[arg-type]
        turns = ColocationSchedule(settings(config), lambda: trainer, LoggedEvents())  # type: ignore[arg-type, return-value]

        async def start() -> None:
            async with turns.starting("rollout-1"):
                pass

        await turns.to_generation([engine])
        assert engine.serves.is_set()
        await turns.to_training([engine])
        assert not engine.serves.is_set()
        starting = asyncio.create_task(start())
        await asyncio.sleep(0.01)
        assert not starting.done()
        await turns.to_generation([engine])
        await starting

    run(scenario)


def test_no_memory_is_handed_over_where_all_roles_fit(config: Path) -> None:
    async def scenario() -> None:
        handle, trainer = Handle("rollout-0"), Handle("trainer-0")
        engine = Engine(handle)  # type: ignore[arg-type]
        turns = ColocationSchedule(settings(config, "--cluster.sleep_level=0"), lambda: trainer, LoggedEvents())  # type: ignore[arg-type, return-value]
        await turns.trainer_started()
        await turns.engines_started()
        for _ in range(2):
            await turns.show_weights()
            await turns.make_room(handle)  # type: ignore[arg-type]
            await turns.to_generation([engine])
            assert engine.serves.is_set()
            await turns.to_training([engine])
            assert not engine.serves.is_set()
        assert (trainer.calls, handle.calls) == ([], ["resume", "pause"] * 2)
        assert turns.take_spent_s() == 0

    run(scenario)


def test_the_trainers_weights_stay_where_the_engines_have_room_beside_them(config: Path) -> None:
    async def scenario() -> None:
        handle, trainer = Handle("rollout-0"), Handle("trainer-0")
        engine, parking = Engine(handle), Parking(engines=1, trainer=1, why="the estimate")  # type: ignore[arg-type]
        words = settings(config, "--cluster.sleep_level=1")
        turns = ColocationSchedule(words, lambda: trainer, LoggedEvents(), parking)  # type: ignore[arg-type, return-value]
        await turns.trainer_started()
        await turns.engines_started()
        assert trainer.calls == ["sleep", "wake"], "room for the start of the engines"
        for _ in range(2):
            trainer.calls.clear()
            await turns.show_weights()
            assert trainer.calls == ["sleep"]
            await turns.to_generation([engine])
            assert trainer.calls == ["sleep"], "the moments alone went"
            await turns.to_training([engine])
            assert trainer.calls == ["sleep", "wake"]

    run(scenario)


def test_a_role_without_room_names_what_was_estimated(config: Path) -> None:
    class Full(Handle):
        async def call(self, method: str, *arguments: Any, **words: Any) -> Any:
            raise OffbeatError("its weights take 9 GiB of the device, and 8 GiB are free")

    async def scenario() -> None:
        trainer = Full("trainer-0")
        parking = Parking(why="of 80 GiB a device then needs 60 GiB in the trainer's turn")
        turns = ColocationSchedule(settings(config), lambda: trainer, LoggedEvents(), parking)  # type: ignore[arg-type, return-value]
        turns._is_training = False
        with pytest.raises(
            OffbeatError,
            match=r"trainer-0 cannot wake: its weights take 9 GiB of the device, and 8 GiB are free "
            r"\(cluster.sleep_level = -1: of 80 GiB a device then needs 60 GiB in the trainer's turn\)",
        ):
            await turns.to_training([])

    run(scenario)


def test_seconds_of_handing_over_are_those_since_they_were_last_asked_for(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `perf/handover_s` of each update."""
    now_s = 0.0

    class Slow(Handle):
        async def call(self, method: str, *arguments: Any, **words: Any) -> Any:
            nonlocal now_s
            now_s += 2.0
            return await super().call(method, *arguments, **words)

    async def scenario() -> None:
        trainer = Slow("trainer-0")
        turns = ColocationSchedule(settings(config), lambda: trainer, LoggedEvents())  # type: ignore[arg-type, return-value]
        for _ in range(2):
            await turns.to_generation([])
            await turns.to_training([])
            assert turns.take_spent_s() == 4.0

    monkeypatch.setattr("grpo_async_app._fleet.colocation.clock_s", lambda: now_s)
    run(scenario)
