"""What a role has started ends with the role and with the driver, however these end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import Launchers, ray_at_night
from role_processes import parent_of, role_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")

DRIVER = """
import asyncio, os, sys
from role_processes import MARK
from offbeat_actors import ClusterConfig, RoleSpec
from offbeat_core import RoleName, load_backend

async def main(kind, address):
    launcher = load_backend("offbeat.launcher", kind)("test", ClusterConfig(launcher=kind, address=address))
    role = await launcher.start(RoleSpec(RoleName("rollout"), "actor_roles:Patient", env={MARK: os.environ[MARK]}))
    polite = await role.call("start_subprocess", returns=int)
    stubborn = await role.call("start_subprocess", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", returns=int)
    print(role.pid, polite, stubborn, flush=True)
    await asyncio.sleep(100)

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def driver(launchers: Launchers, role_env: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A driver in a process of its own; and the ids of its role and of two processes that this has started."""
    command = [sys.executable, "-c", DRIVER, launchers.kind, launchers.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **role_env}) as process:
        assert process.stdout is not None
        try:
            yield process, [int(word) for word in process.stdout.readline().split()]
        finally:
            process.kill()


def wait_until_none(folder: Path, within_s: float) -> None:
    end_s = time.monotonic() + within_s
    while left := role_processes(folder):
        assert time.monotonic() < end_s, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]
        time.sleep(0.05)


def reaper_of(role: int, folder: Path) -> int:
    """The shell among the children of a role."""
    [pid] = (
        pid
        for pid in role_processes(folder)
        if parent_of(pid) == role and Path(f"/proc/{pid}/cmdline").read_text().startswith("/bin/sh")
    )
    return pid


def test_kill_9_of_the_driver_ends_what_its_roles_have_started(
    launchers: Launchers, role_env: dict[str, str], tmp_path: Path
) -> None:
    with driver(launchers, role_env) as (process, pids):
        assert set(pids) <= role_processes(tmp_path)
        process.kill()
        process.wait()
        wait_until_none(tmp_path, within_s=10 if launchers.kind == "local" else 30)


@ray_at_night
def test_kill_9_of_a_role_ends_what_it_has_started_also_under_a_driver_that_does_nothing(
    launchers: Launchers, role_env: dict[str, str], tmp_path: Path
) -> None:
    with driver(launchers, role_env) as (process, [role, *started]):
        process.send_signal(signal.SIGSTOP)
        os.kill(role, signal.SIGKILL)
        end_s = time.monotonic() + 10
        while left := role_processes(tmp_path) & set(started):
            assert time.monotonic() < end_s, left
            time.sleep(0.05)


def test_an_orderly_end_leaves_neither_reaper_nor_zombie(start_role: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with start_role("Patient") as role:
            reaper = reaper_of(role.pid, tmp_path)
            await role.stop()
            assert not Path(f"/proc/{reaper}").exists()
        assert not role_processes(tmp_path)

    asyncio.run(scenario())


def test_a_reaper_holds_one_pipe_and_less_than_a_megabyte(start_role: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with start_role("Patient") as role:
            reaper = reaper_of(role.pid, tmp_path)
            held = {fd: os.readlink(f"/proc/{reaper}/fd/{fd}") for fd in os.listdir(f"/proc/{reaper}/fd")}
            own_kib = sum(
                int(line.split()[1])
                for line in Path(f"/proc/{reaper}/smaps_rollup").read_text().splitlines()
                if line.startswith("Private")
            )
            assert held.pop("0").startswith("pipe:")
            assert set(held.values()) == {"/dev/null"}
            assert os.readlink(f"/proc/{reaper}/cwd") == "/"
            assert own_kib < 1024

    asyncio.run(scenario())


def test_signals_that_are_meant_for_the_role_do_not_end_its_reaper(start_role: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with start_role("Stubborn") as role:  # it does not leave on SIGTERM either
            reaper = reaper_of(role.pid, tmp_path)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                os.kill(reaper, number)
            os.killpg(role.pid, signal.SIGTERM)
            await asyncio.sleep(0.3)
            assert reaper_of(role.pid, tmp_path) == reaper
            assert role.alive
            role.kill()
            await role.wait_dead()

    asyncio.run(scenario())
