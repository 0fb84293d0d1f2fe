"""`where` says which node holds which role of a run: while it trains, after a role was killed, and afterwards."""

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from grpo_runs import Main, role_of, values_of, where, where_once

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.fleet import Fleet
from grpo_async_app._run.log.run_logger import RunLogger
from grpo_async_app._run.places import PlacesFile
from offbeat_actors import RolePlace
from offbeat_core import RoleName, load_config
from offbeat_run import RunFolder
from offbeat_testing import CommandLine, RunningCommand


@pytest.mark.timeout(300)
def test_where_follows_roles_through_a_kill_and_to_the_end(
    config: Path, tmp_path: Path, command: CommandLine, forked_main: Main
) -> None:
    run = tmp_path / "run"
    words = ["train", config, "--out", run, "--engine.max_updates=4000", "--data.epochs=1000", "--eval.every_updates=0"]
    with RunningCommand(forked_main, *words) as process:
        started = where_once(
            process,
            command,
            run,
            lambda seen: (role_of(seen, "rollout-0")["version"] or 0) >= 1,
            "weights of an update",
        )
        assert started["driver"] == process.pid
        assert started["driver_lives"] is True
        assert started["next_driver"] is None
        pids = {role["role"]: role["pid"] for role in started["roles"]}
        assert {"trainer-0", "rollout-0", "scorer-0"} <= pids.keys()
        assert set(pids.values()) <= set(process.descendants())
        assert {role["state"] for role in started["roles"]} == {"ready"}
        assert {role["node"] for role in started["roles"]} == {os.uname().nodename}
        assert role_of(started, "trainer-0")["version"] >= 1

        os.kill(pids["rollout-0"], signal.SIGKILL)
        again = where_once(
            process,
            command,
            run,
            lambda seen: (
                role_of(seen, "rollout-0")["restarts"] == 1 and role_of(seen, "rollout-0")["version"] is not None
            ),
            "another engine with weights",
        )
        assert role_of(again, "rollout-0")["pid"] != pids["rollout-0"]
        engine = role_of(again, "rollout-0")
        assert engine["pid"] in process.descendants()
        assert engine["restarts"] == 1
        assert engine["since_s"] > role_of(started, "rollout-0")["since_s"]
        shown = command("where", run).out
        assert f"driver: process {process.pid} on {os.uname().nodename} is running" in shown
        assert re.search(rf"{re.escape(engine['node'])} +rollout-0 +{engine['pid']} +CPU +ready .* 1 +\d+\n", shown)

        process.kill()
        process.wait()
        left = command("where", run).out
        assert "has ended, and every role with it" in left
        assert re.search(rf"rollout-0 +{engine['pid']} +CPU +gone with the driver", left)

        with RunFolder.open(run) as resumed:  # another driver takes the run up, here this process
            taken_up = command("where", run).out
            assert f"process {process.pid} on {os.uname().nodename} has ended" in taken_up
            assert (
                f"process {os.getpid()} on {os.uname().nodename} has taken the run up and has placed no role"
                in taken_up
            )
            assert re.search(rf"rollout-0 +{engine['pid']} +CPU +gone with the driver", taken_up)
            places = where(command, run)
            assert (places["driver_lives"], places["next_driver"]["pid"]) == (False, os.getpid())
            # A container gives its driver the same process id again: the time says that it is another one.
            held = json.loads(resumed.places.read_text())
            resumed.places.write_text(json.dumps({**held, "driver": os.getpid()}))
            assert where(command, run)["driver_lives"] is False
            with PlacesFile(resumed, cast(Fleet, None), cast(GrpoConfig, None), cast(RunLogger, None)):
                places = where(command, run)
            assert (places["driver"], places["driver_lives"], places["roles"]) == (os.getpid(), True, [])
    assert values_of(run, "train/reward")


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_where_after_a_run_that_ended_well(config: Path, tmp_path: Path, command: CommandLine) -> None:
    run = tmp_path / "run"
    assert command("train", config, "--out", run, "--engine.max_updates=1", "--eval.every_updates=0").code == 0
    places = where(command, run)
    assert places["driver_lives"] is False
    assert {role["state"] for role in places["roles"]} == {"ended"}
    assert role_of(places, "trainer-0")["version"] == 1


def test_where_names_every_device_that_a_role_takes_by_number(
    config: Path, tmp_path: Path, command: CommandLine
) -> None:
    words = [
        *("--engine.device=cuda:1", "--rollout.device=cuda:2", "--rollout.tensor_parallel=2"),
        *("--teacher.path=t", "--teacher.device=cuda:4", "--teacher.tensor_parallel=3"),
        *("--reward.name=reward_model", "--reward.reward_model={path = 'r', device = 'cuda:7'}"),
    ]
    places = [RolePlace(role=RoleName(kind), node="n") for kind in ("trainer", "rollout", "teacher", "reward_model")]
    engines = SimpleNamespace(versions={"rollout-0": 0})
    fleet: Any = SimpleNamespace(places=lambda: places, engines=engines, num_restarts=lambda _: 0)
    logger: Any = SimpleNamespace(version=0)
    run = tmp_path / "run"

    async def scenario() -> None:
        with RunFolder.create(run) as folder:
            (run / "config.toml").write_text(config.read_text())
            with PlacesFile(folder, fleet, load_config(config, GrpoConfig, words), logger) as places_file:
                async with places_file.following():
                    pass

    asyncio.run(scenario())
    assert {role["role"]: role["devices"]["n"] for role in where(command, run)["roles"]} == {
        "trainer-0": ["cuda 1"],
        "rollout-0": ["cuda 2", "cuda 3"],
        "teacher-0": ["cuda 4", "cuda 5", "cuda 6"],
        "reward_model-0": ["cuda 7"],
    }


def test_where_without_places_says_why(config: Path, tmp_path: Path, command: CommandLine) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(config.read_text())
    ended = command("where", tmp_path / "run")
    assert ended.code == 2
    assert "no role was placed yet" in ended.err
    (tmp_path / "run" / "places.json").write_text('{"roles": 3}')
    ended = command("where", tmp_path / "run")
    assert ended.code == 2
    assert "cannot be read" in ended.err
