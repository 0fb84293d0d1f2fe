"""A call to many roles names those that do not answer, and tells a stopped process from a slow one."""

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conftest import Launchers, ray_at_night
from test_actors_failures import error_of, needs_linux

from offbeat_actors import ActorGroup, ActorHandle, LocalLauncher, RoleSpec, call_all
from offbeat_actors._spec import Wait
from offbeat_actors._supervision import group as group_module
from offbeat_core import ConfigError, DeadlineError, PeerFailedError, RoleName


async def start_all(launcher: Any, target: str, names: list[str], env: dict[str, str]) -> list[Any]:
    return await asyncio.gather(
        *(
            launcher.start(RoleSpec(RoleName.parse(name), f"actor_roles:{target}", env=env), deadline_s=60)
            for name in names
        )
    )


def test_all_answers_come_in_the_order_of_the_roles(launchers: Launchers, role_env: dict[str, str]) -> None:
    async def scenario() -> None:
        async with launchers.make() as launcher:
            roles = await start_all(launcher, "Patient", ["rollout-0", "rollout-1"], role_env)
            pids = await call_all(roles, "pid", returns=int, deadline_s=30)
            assert pids == [role.pid for role in roles]
            assert await call_all([], "pid", returns=int, deadline_s=30) == []

    asyncio.run(scenario())


def test_a_group_says_how_far_it_is_while_it_works_and_no_longer(
    role_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "_PROGRESS_EVERY_S", 0.01)
    reported: list[str] = []

    async def scenario() -> None:
        async with LocalLauncher("test") as launcher:
            group = ActorGroup(await start_all(launcher, "Counting", ["trainer-0", "trainer-1"], role_env), 30.0)
            async with group.reporting_progress(reported.append):
                await group.call("work", 4, 0.2, deadline_s=60)
            num_reported = len(reported)
            await asyncio.sleep(0.1)
            assert len(reported) == num_reported
            await group.forget()

    asyncio.run(scenario())
    steps = [so_far for so_far in dict.fromkeys(reported) if so_far]
    assert steps == sorted(steps)
    assert len(steps) > 1, reported
    assert set(steps) <= {f"{number} of 4" for number in range(1, 5)}


def test_a_role_that_dies_at_work_is_named_by_the_call_and_not_by_the_questions(role_env: dict[str, str]) -> None:
    async def scenario() -> None:
        async with LocalLauncher("test") as launcher:
            group = ActorGroup(await start_all(launcher, "Counting", ["trainer-0"], role_env), 30.0)
            async with group.reporting_progress(lambda _: None):
                working = asyncio.create_task(group.call("work", 100, 1.0, deadline_s=60))
                await asyncio.sleep(0.2)
                group.actors[0].kill()
                with pytest.raises(PeerFailedError, match="SIGKILL"):
                    await working

    asyncio.run(scenario())


@needs_linux
@ray_at_night
def test_sleep_on_all_engines_names_each_that_does_not_answer(launchers: Launchers, role_env: dict[str, str]) -> None:
    async def scenario() -> None:
        async with launchers.make() as launcher:
            roles = await start_all(launcher, "Sleeper", ["rollout-0", "rollout-1", "rollout-2"], role_env)
            await call_all(roles, "sleep", 1, deadline_s=30)
            assert launcher.waits() == []
            await roles[1].call("get_stuck")
            os.kill(roles[2].pid, signal.SIGSTOP)
            sleeping = asyncio.create_task(call_all(roles, "sleep", 2, deadline_s=3))
            await roles[0].call("sleep", 2)
            assert {wait.name for wait in launcher.waits()} >= {"rollout-1.sleep", "rollout-2.sleep"}
            with pytest.raises(DeadlineError) as waited:
                await sleeping
            assert waited.value.waiting == "sleep of 3 roles"
            assert waited.value.on == "rollout-1, rollout-2"
            assert "rollout-1: it is alive" in waited.value.advice
            assert "rollout-2: its process is stopped (SIGSTOP" in waited.value.advice
            roles[2].kill()  # a stopped one ends too
            async with asyncio.timeout(20):
                await roles[2].wait_dead()

    asyncio.run(scenario())


def test_the_first_error_of_any_role_ends_the_wait(launchers: Launchers, role_env: dict[str, str]) -> None:
    async def scenario() -> None:
        async with launchers.make() as launcher:
            roles = await start_all(launcher, "Faulty", ["rollout-0", "rollout-1"], role_env)
            with pytest.raises(ConfigError, match="float7"):
                await call_all(roles, "config_error", deadline_s=100)

    asyncio.run(scenario())


def test_a_deadline_inside_a_role_is_not_taken_for_silence(launchers: Launchers, role_env: dict[str, str]) -> None:
    async def scenario() -> None:
        async with launchers.make() as launcher:
            roles = await start_all(launcher, "Faulty", ["rollout-0", "rollout-1"], role_env)
            with pytest.raises(DeadlineError) as waited:
                await call_all(roles, "deadline_error", deadline_s=30)
            assert waited.value.waiting == "queue.get"
            assert "rollout-0.hang" in str(await error_of(roles[0], "hang", deadline_s=0.2))

    asyncio.run(scenario())


def test_of_those_that_are_waited_for_the_longest_come_first() -> None:
    """Errors name the first few."""
    launcher = LocalLauncher("test-run")
    for name, lasted_s in (("rollout-0", 1.0), ("rollout-1", 9.0), ("rollout-2", 4.0)):
        wait = Wait(on=name, method="sleep", lasted_s=lasted_s, deadline_s=30.0)
        launcher._actors[name] = cast("ActorHandle", SimpleNamespace(waits=lambda wait=wait: [wait]))
    assert [wait.on for wait in launcher.waits()] == ["rollout-1", "rollout-2", "rollout-0"]
