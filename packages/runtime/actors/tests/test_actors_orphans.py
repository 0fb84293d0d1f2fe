"""Processes that leave the group of their role delay nothing, and do not outlive the run."""

import asyncio
import sys
import time
from pathlib import Path

import pytest

from offbeat_actors import ActorHandle, ClusterConfig, LocalLauncher, RoleSpec
from offbeat_core import PeerFailedError, RoleName

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no subreapers")
QUICK_S = 10.0
"""Far below the 600 s that the processes would last, and the 60 s that a role may take to stop here."""


async def start(launcher: LocalLauncher, env: dict[str, str]) -> ActorHandle:
    return await launcher.start(RoleSpec(RoleName("scorer"), "actor_roles:Deserter", {}, env=env), deadline_s=60)


def is_there(pid: int) -> bool:
    """Return whether there is such a process, be it only a zombie."""
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("method", ["fork", "start_daemon"])
@pytest.mark.parametrize("end", ["stop", "kill", "exit"])
def test_a_child_in_a_session_of_its_own_delays_no_end_and_is_ended(
    role_env: dict[str, str], method: str, end: str
) -> None:
    async def scenario() -> None:
        async with LocalLauncher("test-run", ClusterConfig(stop_timeout_s=60)) as launcher:
            role = await start(launcher, role_env)
            child = await role.call(method, returns=int)
            begun_s = time.monotonic()
            if end == "stop":
                await role.stop()
            elif end == "kill":
                role.kill()
            else:
                with pytest.raises(PeerFailedError, match="exited with code 3"):
                    await role.call("end", deadline_s=60)
            await role.wait_dead()
            assert time.monotonic() - begun_s < QUICK_S
            assert is_there(child), "it may serve other roles until the run ends"
        assert not is_there(child)
        assert not is_there(role.pid)

    asyncio.run(scenario())


def test_a_launcher_ends_only_what_its_own_roles_have_left(role_env: dict[str, str]) -> None:
    async def scenario() -> None:
        async with LocalLauncher("test-run") as outer:
            kept = await (await start(outer, role_env)).call("start_daemon", returns=int)
            async with LocalLauncher("test-run") as inner:
                ended = await (await start(inner, role_env)).call("start_daemon", returns=int)
            assert not is_there(ended)
            assert is_there(kept)
        assert not is_there(kept)

    asyncio.run(scenario())
