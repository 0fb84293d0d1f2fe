"""Calls to roles are edges in the graph of processes that wait for each other, on every launcher."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Launchers, ray_at_night

import offbeat_liveness as liveness
from offbeat_actors import RoleSpec
from offbeat_core import RoleName


@pytest.mark.skipif(sys.platform != "linux", reason="processes meet through /proc and a folder")
@ray_at_night
def test_a_circle_of_waits_through_calls_is_named(
    launchers: Launchers, role_env: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "liveness"
    spec = RoleSpec(RoleName("trainer"), "actor_roles:Watched", {"name": "trainer-0", "folder": folder}, env=role_env)

    async def scenario() -> Any:
        found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        monitor = liveness.watch(
            stall_after_s=1,
            directory=folder,
            name="driver",
            on_verdict=lambda verdict: loop.call_soon_threadsafe(_once(found), verdict),
        )
        try:
            async with launchers.make() as launcher:
                trainer = await launcher.start(spec, deadline_s=90)
                update = asyncio.create_task(trainer.call("wait_for", "prompts.get", "driver", deadline_s=1000))
                async with asyncio.timeout(90):
                    verdict = await found
                update.cancel()
                return verdict
        finally:
            monitor.close()

    verdict = asyncio.run(scenario())
    assert verdict.kind == "wait-cycle"
    assert "driver waits for trainer-0 in trainer-0.wait_for" in verdict.headline
    assert "trainer-0 waits for driver in prompts.get" in verdict.headline


@pytest.mark.skipif(sys.platform != "linux", reason="a death is noticed through /proc")
@ray_at_night
def test_roles_that_share_no_folder_meet_at_the_monitor_of_the_driver(
    launchers: Launchers, role_env: dict[str, str], tmp_path: Path
) -> None:
    """One of them dies on the way and is started again: no process may wait for the dead one."""

    def spec(name: str) -> RoleSpec:
        kwargs, log_path = {"name": name, "folder": tmp_path / name}, tmp_path / f"{name}.log"
        return RoleSpec(RoleName.parse(name), "actor_roles:Watched", kwargs, env=role_env, log_path=log_path)

    async def scenario() -> Any:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Any] = loop.create_future()
        keep_first = _once(found)
        monitor = liveness.watch(
            stall_after_s=1, name="driver", on_verdict=lambda verdict: loop.call_soon_threadsafe(keep_first, verdict)
        )
        try:
            async with launchers.make() as launcher, asyncio.timeout(90):
                trainer, rollout = await asyncio.gather(
                    *(launcher.start(spec(name)) for name in ("trainer-0", "rollout-0"))
                )
                await _known(monitor, {"trainer-0", "rollout-0"})
                rollout.kill()
                await rollout.wait_dead()
                rollout = await launcher.start(spec("rollout-0"))
                calls = [
                    asyncio.create_task(trainer.call("wait_for", "weights.confirm", "rollout-0", deadline_s=1000)),
                    asyncio.create_task(rollout.call("wait_for", "weights.get", "trainer-0", deadline_s=1000)),
                ]
                verdict = await found
                for call in calls:
                    call.cancel()
                return verdict
        finally:
            monitor.close()

    verdict = asyncio.run(scenario())
    assert verdict.kind == "wait-cycle"
    assert "trainer-0 waits for rollout-0 in weights.confirm" in verdict.headline
    assert "rollout-0 waits for trainer-0 in weights.get" in verdict.headline


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads through /proc")
def test_a_role_of_a_watched_driver_is_watched_under_its_name_and_one_of_another_is_not(
    launchers: Launchers, role_env: dict[str, str], tmp_path: Path
) -> None:
    async def num_threads(name: str) -> int:
        async with launchers.make() as launcher:
            spec = RoleSpec(
                RoleName.parse(name), "actor_roles:Patient", env=role_env, log_path=tmp_path / f"{name}.log"
            )
            role = await launcher.start(spec, deadline_s=launchers.start_s)
            if (monitor := liveness.current_monitor()) is not None:
                async with asyncio.timeout(30):
                    await _known(monitor, {name})
            assert await role.call("environment", "OFFBEAT_ROLE", returns=str) == name
            return len(list(Path(f"/proc/{role.pid}/task").iterdir()))

    alone = asyncio.run(num_threads("rollout-0"))
    monitor = liveness.watch(stall_after_s=30, name="driver")
    try:
        watched = asyncio.run(num_threads("rollout-1"))
    finally:
        monitor.close()
    assert watched <= alone + 2
    assert "liveness" not in (tmp_path / "rollout-1.log").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="processes meet through /proc")
@ray_at_night
def test_a_role_that_stands_still_in_a_method_is_named_with_the_line_it_stands_in(
    launchers: Launchers, role_env: dict[str, str], tmp_path: Path
) -> None:
    async def scenario() -> Any:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Any] = loop.create_future()

        def notify(verdict: Any) -> None:
            if not found.done():
                found.set_result(verdict)

        monitor = liveness.watch(
            stall_after_s=1, name="driver", on_verdict=lambda verdict: loop.call_soon_threadsafe(notify, verdict)
        )
        try:
            async with launchers.make() as launcher, asyncio.timeout(90):
                spec = RoleSpec(RoleName("rollout"), "actor_roles:Blocking", env=role_env)
                role = await launcher.start(spec, deadline_s=launchers.start_s)
                call = asyncio.create_task(role.call("generate", deadline_s=1000))
                verdict = await found
                assert role.alive, "a role that is stuck is its supervisor's to end"
                role.kill()
                await asyncio.gather(call, return_exceptions=True)
                return verdict
        finally:
            monitor.close()

    verdict = asyncio.run(scenario())
    assert "rollout-0" in verdict.headline
    assert "rollout-0.generate" in verdict.headline
    [stuck] = [party for party in verdict.parties if party.name == "rollout-0"]
    assert "actor_roles.py" in str(stuck.stack[0])
    assert "generate" in str(stuck.stack[0])


async def _known(monitor: Any, names: set[str]) -> None:
    """Wait until the monitor knows processes of these names."""
    while not names <= {address.name for address in monitor._peers.others().values()}:
        await asyncio.sleep(0.05)


def _once(found: "asyncio.Future[Any]") -> Callable[[Any], None]:
    """Keep the first fatal verdict: under load a straggler may come before it."""
    return lambda verdict: found.set_result(verdict) if verdict.may_end and not found.done() else None
