"""The log of a role that prints without end stays in bounds, and holds its last words."""

import asyncio
import resource
from pathlib import Path

import pytest

from offbeat_actors import LocalLauncher, RoleSpec
from offbeat_core import PeerFailedError, RoleName

BOUND = 100_000


def test_a_bounded_log_has_the_beginning_and_the_end(role_env: dict[str, str], tmp_path: Path) -> None:
    log, notices = tmp_path / "chatty-0.log", list[tuple[str, str]]()

    async def scenario() -> None:
        async with LocalLauncher("test-run", on_output=lambda *notice: notices.append(notice)) as launcher:
            for _ in range(4):
                spec = RoleSpec(
                    RoleName("chatty"), "actor_roles:Chatty", {}, env=role_env, log_path=log, max_log_bytes=BOUND
                )
                role = await launcher.start(spec, deadline_s=60)
                with pytest.raises(PeerFailedError) as caught:
                    await role.call("chat", 3_000_000, deadline_s=60)
                assert "these are my last words" in str(caught.value)

    asyncio.run(scenario())
    text = log.read_text()
    assert text.startswith("\x1b[1mfirst words xxx")
    assert len(text) < 3 * BOUND + 2 * 65 * 1024, "also over processes that are started again"
    assert len(notices) == 4
    assert notices[0][0] == "chatty-0"
    assert notices[0][1].startswith("[1mfirst words")
    assert len(notices[0][1]) <= 200


def test_a_caller_that_kills_a_role_is_not_advised_to_look_for_the_killer(role_env: dict[str, str]) -> None:
    async def scenario() -> str:
        async with LocalLauncher("test-run") as launcher:
            spec = RoleSpec(RoleName("chatty"), "actor_roles:Chatty", {}, env=role_env)
            role = await launcher.start(spec, deadline_s=60)
            role.kill()
            return await role.wait_dead()

    assert asyncio.run(scenario()) == "its process was killed by SIGKILL"


def test_a_full_disk_keeps_no_role_from_starting_and_its_log_is_read_in_bounds(role_env: dict[str, str]) -> None:
    """`/dev/full` takes no byte, and gives bytes without end."""
    resource.setrlimit(resource.RLIMIT_AS, (2**33, resource.getrlimit(resource.RLIMIT_AS)[1]))

    async def scenario() -> str:
        async with LocalLauncher("test-run") as launcher:
            spec = RoleSpec(
                RoleName("chatty"),
                "actor_roles:Chatty",
                {},
                env=role_env,
                log_path=Path("/dev/full"),
                max_log_bytes=BOUND,
            )
            role = await launcher.start(spec, deadline_s=60)
            role.kill()
            with pytest.raises(PeerFailedError) as caught:
                await role.call("chat", 1, deadline_s=60)
            return str(caught.value)

    try:
        assert len(asyncio.run(scenario())) < 10_000
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_AS)[1]))
