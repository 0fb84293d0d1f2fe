"""Engines that a user asks for during the run: as many as there is room for, a few at a time."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpo_runs import Main, values_of
from role_faults import accounting_complaints

from grpo_async_app._config.resolved import resolve
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.engines import JOINING_AT_ONCE, Engines
from grpo_async_app._fleet.fleet import Fleet
from grpo_async_app._run.scaling import ask_for_engines, scale_as_asked, take_asked_engines
from offbeat_actors import KeepAlive, RestartBudget
from offbeat_core import ConfigError, EngineHealth, PeerFailedError, RoleName, UserError, load_config
from offbeat_run import RunFolder
from offbeat_testing import RunningCommand


@pytest.mark.nightly
def test_more_engines_than_there_is_room_for_are_refused_and_the_run_goes_on(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with RunningCommand(forked_main, "train", config, "--out", run, "--data.epochs=4") as process:
        process.wait_until(lambda: values_of(run, "train/reward"), "the first update")
        for number in (100_000, 3_000):
            with RunningCommand(forked_main, "scale", run, "--engines", number) as asking:
                assert asking.wait() == 2, asking.output
                assert f"--engines {number}" in asking.output
                assert "room for" in asking.output or "65536" in asking.output
        assert process.wait() == 0, process.output
        assert "have room for" in process.output, "the driver says so too"
        assert "has joined" not in process.output
    assert accounting_complaints(run, 20, 4, per_update=4) == []


class Handle:
    """As much of an `ActorHandle` as an engine that only waits is looked after with."""

    address = "127.0.0.1"

    def __init__(self, name: str) -> None:
        self.name, self.role, self._gone = name, RoleName.parse(name), asyncio.Event()

    @property
    def alive(self) -> bool:
        return not self._gone.is_set()

    def kill(self) -> None:
        self._gone.set()

    async def wait_dead(self) -> str:
        await self._gone.wait()
        return "it was killed"

    async def stop(self) -> None:
        self.kill()

    async def call(self, method: str, *_: Any, **__: Any) -> Any:
        assert method == "health"
        return EngineHealth(version=0, num_running=0, num_waiting=0, num_tokens=0, busy_s=0.0, uptime_s=1.0)


class Starts:
    """Starts engines when the test lets it, and counts how many are being started."""

    def __init__(self) -> None:
        self.waiting: dict[str, asyncio.Future[Any]] = {}
        self.most = 0

    async def __call__(self, role: RoleName) -> Any:
        name = str(role)
        self.waiting[name] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, len(self.waiting))
        try:
            return await self.waiting[name]
        finally:
            del self.waiting[name]

    def end(self, name: str) -> None:
        self.waiting[name].set_result(Handle(name))


def run(scenario: Callable[[Engines, Starts], Any], config: Path) -> None:
    async def within() -> None:
        starts = Starts()
        keep = KeepAlive(budget=RestartBudget(5, 3600), silent_after_s=60.0, notify=lambda _: None)
        engines = Engines(load_config(config, GrpoConfig), starts, keep)
        engines.add(Handle("rollout-0"))  # type: ignore[arg-type]
        engines.let_others_join()
        async with asyncio.timeout(60):
            await scenario(engines, starts)
        await engines.close()

    asyncio.run(within())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_engines_join_a_few_at_a_time_under_the_lowest_free_names(config: Path) -> None:
    async def scenario(engines: Engines, starts: Starts) -> None:
        engines.scale(50)
        while len(engines.names) < 50:
            await settle()
            for name in list(starts.waiting)[:2]:
                starts.end(name)
        assert starts.most == JOINING_AT_ONCE
        assert engines.names == [f"rollout-{number}" for number in range(50)]
        engines.scale(2)
        while len(engines.members) > 2:
            await asyncio.sleep(0.01)
        engines.scale(3)
        await settle()
        assert list(starts.waiting) == ["rollout-2"], "its place on a device is free again"

    run(scenario, config)


def test_an_engine_that_cannot_be_started_any_more_sends_none_of_the_others_away(config: Path) -> None:
    async def scenario(engines: Engines, starts: Starts) -> None:
        engines.scale(2)
        await settle()
        engines.scale(1)  # while the second one is started
        starts.waiting["rollout-1"].set_exception(PeerFailedError("rollout-1", "no memory left"))
        await settle()
        assert engines.names == ["rollout-0"]

    run(scenario, config)


def test_joining_ends_at_the_first_engine_that_cannot_be_started(config: Path) -> None:
    async def scenario(engines: Engines, starts: Starts) -> None:
        engines.scale(50)
        await settle()
        first, *others = list(starts.waiting)
        starts.waiting[first].set_exception(PeerFailedError(first, "no memory left"))
        await settle()
        assert list(starts.waiting) == others
        for name in others:
            starts.end(name)
        await settle()
        assert not starts.waiting
        assert len(engines.names) == JOINING_AT_ONCE

    run(scenario, config)


def refuse_more_than_four(number: int) -> None:
    if number > 4:
        raise ConfigError("there is room for 4")


def test_a_note_that_is_left_while_another_is_taken_is_not_lost(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    note = folder.path / "scale.json"
    note.write_text(json.dumps({"engines": 3}))
    assert take_asked_engines(folder, refuse_more_than_four, pytest.fail) == 3
    assert list(folder.path.glob("scale.*")) == []
    note.write_text("no number")
    notices: list[str] = []
    assert take_asked_engines(folder, refuse_more_than_four, notices.append) is None
    assert "use the command `scale`" in notices[0]


def test_whoever_asks_for_too_many_hears_why_from_the_driver(tmp_path: Path) -> None:
    folder, notices, scaled = RunFolder.create(tmp_path / "run"), list[str](), list[int]()

    async def scenario() -> None:
        looking = asyncio.create_task(scale_as_asked(folder, refuse_more_than_four, scaled.append, notices.append))
        await settle()
        with pytest.raises(UserError, match="--engines 5: there is room for 4"):
            await asyncio.to_thread(ask_for_engines, folder, 5)
        await asyncio.to_thread(ask_for_engines, folder, 4)
        looking.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert scaled == [4]
    assert notices == ["5 rollout engines are refused: there is room for 4"]
    assert list(folder.path.glob("scale.*")) == []


NOTES = {
    "of no bottom": b"[" * 4_000,
    "of infinity": b'{"engines": 1e400}',
    "of a negative number": b'{"engines": -1}',
    "of a number of many digits": b'{"engines": ' + b"9" * 3_000 + b"}",
    "of half an engine": b'{"engines": 1.5}',
    "of no Unicode": b"\xff\xfe",
    "of a gibibyte": None,
    "of a pipe": None,
}


@pytest.mark.parametrize("kind", NOTES)
def test_no_note_holds_up_the_driver_or_ends_its_looking(kind: str, tmp_path: Path) -> None:
    folder, notices, scaled = RunFolder.create(tmp_path / "run"), list[str](), list[int]()

    async def scenario() -> None:
        looking = asyncio.create_task(scale_as_asked(folder, refuse_more_than_four, scaled.append, notices.append))
        await settle()
        note = folder.path / "scale.json"
        if kind == "of a pipe":
            os.mkfifo(note)
        elif kind == "of a gibibyte":
            with note.open("wb") as file:
                file.truncate(2**30)
        else:
            note.write_bytes(NOTES[kind] or b"")
        await asyncio.to_thread(ask_for_engines_once_free, folder, note)
        looking.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert scaled == [2]
    assert len(notices) == 1
    assert len(notices[0]) < 400
    assert "use the command `scale`" in notices[0]


def ask_for_engines_once_free(folder: RunFolder, note: Path) -> None:
    while note.exists():
        pass
    ask_for_engines(folder, 2)


def test_the_driver_has_the_room_check_of_train(config: Path, model: Path, tmp_path: Path) -> None:
    fleet = Fleet(resolve(load_config(config, GrpoConfig)), str(model), tmp_path)
    fleet.check_engines(2)
    with pytest.raises(UserError, match=r"rollout\.num_engines = 5000: 5001 processes .* have room for"):
        fleet.check_engines(5000)
