"""The log of a role that prints without end stays in bounds, and holds its last words."""

import asyncio
from pathlib import Path

import pytest

from offbeat_actors import LocalLauncher, RoleSpec
from offbeat_types import PeerFailedError

BOUND = 100_000


def test_a_bounded_log_has_the_beginning_and_the_end(role_env: dict[str, str], tmp_path: Path) -> None:
    log, told = tmp_path / "chatty-0.log", list[tuple[str, str]]()

    async def scenario() -> None:
        async with LocalLauncher("test-run", on_output=lambda *said: told.append(said)) as launcher:
            for _ in range(4):
                spec = RoleSpec("chatty-0", "actor_roles:Chatty", {}, env=role_env, log_path=log, max_log_bytes=BOUND)
                role = await launcher.start(spec, deadline_s=60)
                with pytest.raises(PeerFailedError) as caught:
                    await role.call("chat", 3_000_000, deadline_s=60)
                assert "these are my last words" in str(caught.value)

    asyncio.run(scenario())
    text = log.read_text()
    assert text.startswith("\x1b[1mfirst words xxx")
    assert len(text) < 3 * BOUND + 2 * 65 * 1024, "also over processes that are started again"
    assert len(told) == 4
    assert told[0][0] == "chatty-0"
    assert told[0][1].startswith("[1mfirst words")
    assert len(told[0][1]) <= 200


def test_who_kills_a_role_is_not_told_to_look_for_the_killer(role_env: dict[str, str]) -> None:
    async def scenario() -> str:
        async with LocalLauncher("test-run") as launcher:
            role = await launcher.start(RoleSpec("chatty-0", "actor_roles:Chatty", {}, env=role_env), deadline_s=60)
            role.kill()
            return await role.wait_dead()

    assert asyncio.run(scenario()) == "its process was killed by SIGKILL"
