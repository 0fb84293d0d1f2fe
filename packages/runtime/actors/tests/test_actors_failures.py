"""Whatever goes wrong in a role reaches the caller, typed and by name, and nothing is left behind."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import Launchers, ray_at_night
from role_processes import role_processes

from offbeat_actors import ActorHandle, RoleSpec, _local
from offbeat_actors._local import LocalProcess
from offbeat_core import (
    ConfigError,
    DeadlineError,
    OffbeatError,
    PeerFailedError,
    RoleName,
    RunFolderError,
    ShapeError,
    WeightSyncError,
)

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc and pidfd")


@contextmanager
def ends(pid: int, within_s: float) -> Iterator[None]:
    """Require that a process, of whatever parent, ends by the end of the block or soon after."""
    fd = os.pidfd_open(pid)
    try:
        yield
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(within_s * 1000), f"process {pid} is still there"
    finally:
        os.close(fd)


async def error_of(role: ActorHandle, method: str, *args: Any, **kwargs: Any) -> OffbeatError:
    with pytest.raises(OffbeatError) as caught:
        await role.call(method, *args, **kwargs)
    return caught.value


def test_offbeat_errors_keep_type_text_and_exit_code(start_role: Any) -> None:
    async def scenario() -> None:
        async with start_role("Faulty") as role:
            error = await error_of(role, "config_error")
            assert type(error) is ConfigError
            assert str(error) == "rollout.dtype must be one of float32: got 'float7'"
            assert error.exit_code == 2
            assert error.__notes__ == ["raised in rollout-0"]
            assert type(await error_of(role, "shape_error")) is ShapeError
            deadline = await error_of(role, "deadline_error")
            assert isinstance(deadline, DeadlineError)
            assert (deadline.waiting, deadline.on, deadline.deadline_s) == ("queue.get", "scorer-0", 3.0)
            peer = await error_of(role, "peer_error")
            assert isinstance(peer, PeerFailedError)
            assert (peer.peer, peer.log_tail) == ("scorer-0", "its last line")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "method", ["no_memory_for_an_async_error", "no_memory_for_a_callback", "no_memory_in_a_thread"]
)
def test_a_role_without_the_memory_to_answer_ends_and_keeps_no_caller_waiting(start_role: Any, method: str) -> None:
    async def scenario() -> None:
        async with start_role("Faulty") as role:
            error = await error_of(role, method, deadline_s=20.0)
            assert isinstance(error, PeerFailedError), error
            assert "exited with code 71" in str(error)
            assert not role.alive

    asyncio.run(scenario())


def test_an_offbeat_error_of_unknown_type_arrives_as_its_nearest_known_base(start_role: Any) -> None:
    async def scenario() -> None:
        async with start_role("Faulty") as role:
            error = await error_of(role, "own_error")
            assert type(error) is WeightSyncError
            assert str(error) == "no other process knows my type"

    asyncio.run(scenario())


def test_other_errors_name_peer_and_cause_with_the_roles_traceback(start_role: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with start_role("Faulty") as role:
            for method, reason in {
                "value_error": "ValueError: 7 is not even",
                "async_value_error": "ValueError: 8 is even",
                "cancelled_error": "CancelledError",
                "stop_iteration": "StopIteration",
                "system_exit": "SystemExit: 5",
                "async_system_exit": "SystemExit: 5",
            }.items():
                error = await error_of(role, method, deadline_s=10)
                assert isinstance(error, PeerFailedError)
                assert (error.peer, error.reason) == ("rollout-0", reason)
                assert f"in {method}" in error.log_tail
                assert "offbeat_actors" not in error.log_tail
            unsendable = await error_of(role, "unsendable")
            assert "a call carries plain data" in str(unsendable)

    asyncio.run(scenario())
    assert "ValueError: 7 is not even" in (tmp_path / "rollout-0.log").read_text()


@needs_linux
@pytest.mark.parametrize(
    ("method", "args", "reason"),
    [
        ("leave", (3,), "its process{} exited with code 3"),
        ("leave", (0,), "its process{} exited with code 0"),
        ("crash", (), "its process{} was killed by SIGSEGV"),
    ],
)
def test_a_role_that_dies_fails_every_pending_call(
    launchers: Launchers, start_role: Any, method: str, args: tuple[int, ...], reason: str
) -> None:
    reason = reason.format(launchers.place)

    async def scenario() -> None:
        async with start_role("Faulty") as role:
            waiting = [asyncio.create_task(error_of(role, "hang")) for _ in range(3)]
            await asyncio.sleep(0.1)
            errors = [await error_of(role, method, *args), *await asyncio.gather(*waiting)]
            errors.append(await error_of(role, "hang"))  # a call after the death
            for error in errors:
                assert isinstance(error, PeerFailedError)
                assert (error.peer, error.reason) == ("rollout-0", reason)
            expected = "these are my last words" if method == "leave" else "Fatal Python error: Segmentation fault"
            assert expected in errors[0].log_tail  # type: ignore[attr-defined]
            assert not role.alive
            assert await role.wait_dead() == reason

    asyncio.run(scenario())


def test_kill_9_of_a_role_is_seen_at_once(launchers: Launchers, start_role: Any) -> None:
    async def scenario() -> None:
        async with start_role("Patient") as role:
            waiting = [asyncio.create_task(error_of(role, "wait_long")) for _ in range(3)]
            waiting.append(asyncio.create_task(error_of(role, "compute", 100.0)))
            os.kill(await role.call("pid", returns=int), signal.SIGKILL)
            async with asyncio.timeout(5):
                errors = await asyncio.gather(*waiting)
            reason = f"rollout-0 failed: its process{launchers.place} was killed by SIGKILL"
            assert all(reason in str(error) for error in errors)
            assert "out of memory?" in str(errors[0])

    asyncio.run(scenario())


def test_a_role_that_dies_does_not_disturb_another(start_role: Any) -> None:
    async def scenario() -> None:
        async with start_role("Patient") as role, start_role("Patient", name="rollout-1") as other:
            role.kill()
            await role.wait_dead()
            assert await other.call("started", returns=bool)

    asyncio.run(scenario())


def test_a_call_past_its_deadline_names_role_method_and_seconds(start_role: Any) -> None:
    async def scenario() -> None:
        async with start_role("Faulty") as role:
            error = await error_of(role, "hang", deadline_s=0.2)
            assert isinstance(error, DeadlineError)
            assert str(error).startswith("rollout-0.hang: waited 0.2 s for rollout-0, which did not come; it is alive")
            assert "rollout-0.log" in error.advice
            assert "7 is not even" in str(await error_of(role, "value_error"))  # the role continues

    asyncio.run(scenario())


def test_an_answer_that_came_while_the_caller_was_stalled_misses_no_deadline(start_role: Any) -> None:
    async def scenario() -> None:
        async with start_role("Patient") as role:
            call = asyncio.ensure_future(role.call("compute", 0.1, returns=str, deadline_s=2.0))
            await asyncio.sleep(0.1)
            time.sleep(3.0)  # a process that was stopped, or a long step in its event loop
            assert await call == "computed"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("target", "kwargs", "kind", "words"),
    [
        ("RefusesConfig", {"text": "no such model"}, ConfigError, "^no such model"),
        ("RefusesValue", {}, PeerFailedError, "rollout-0 failed: ValueError: no value is good enough"),
        ("RefusesConfig", {}, PeerFailedError, "missing a required argument: 'text'"),
        ("StartFails", {}, OffbeatError, "the engine does not start"),
        ("Absent", {}, PeerFailedError, "has no attribute 'Absent'"),
        ("DiesEarly", {}, PeerFailedError, r"killed by SIGKILL[^\n]*\n[^\n]*\nabout to die"),
    ],
)
def test_a_role_that_cannot_start_says_why(
    start_role: Any, target: str, kwargs: dict[str, Any], kind: type[OffbeatError], words: str
) -> None:
    async def scenario() -> None:
        async with start_role(target, kwargs):
            pass

    with pytest.raises(kind, match=words) as caught:
        asyncio.run(scenario())
    assert type(caught.value) is kind


@needs_linux
@ray_at_night
def test_a_role_that_is_not_ready_in_time_is_ended(
    launchers: Launchers, role_env: dict[str, str], tmp_path: Path
) -> None:
    log_path = tmp_path / "deep" / "log"
    spec = RoleSpec(RoleName("slow"), "actor_roles:NeverReady", env=role_env, log_path=log_path)

    before = children()

    async def scenario() -> None:
        async with launchers.make() as launcher:
            with pytest.raises(DeadlineError, match=r"starting slow-0: waited 1.5 s for slow-0.*start_timeout_s"):
                await launcher.start(spec, deadline_s=1.5)
            assert launchers.kind == "ray" or children() <= before
            assert not role_processes(tmp_path)

    asyncio.run(scenario())


def children() -> set[str]:
    """Process ids of this process's children, zombies too."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize("target", ["actor_roles", ":Echo", "a.b:"])
def test_a_target_of_the_wrong_form_is_refused(launchers: Launchers, target: str) -> None:
    async def scenario() -> None:
        async with launchers.make() as launcher:
            await launcher.start(RoleSpec(RoleName("a"), target))

    with pytest.raises(ConfigError, match="a target reads"):
        asyncio.run(scenario())


def test_two_roles_of_one_name_are_refused(launchers: Launchers, role_env: dict[str, str]) -> None:
    spec = RoleSpec(RoleName("a"), "actor_roles:Echo", env=role_env)

    async def scenario() -> None:
        async with launchers.make() as launcher:
            first = await launcher.start(spec)
            with pytest.raises(ConfigError, match="'a-0' is running already"):
                await launcher.start(spec)
            await first.stop()
            await launcher.start(spec)  # but its name is free again

    asyncio.run(scenario())


def test_a_log_that_cannot_be_written_is_refused(launchers: Launchers, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    async def scenario() -> None:
        async with launchers.make() as launcher:
            await launcher.start(RoleSpec(RoleName("a"), "x:Y", log_path=tmp_path / "file" / "log"))

    with pytest.raises(RunFolderError, match="a-0 needs a log file at"):
        asyncio.run(scenario())


@needs_linux
def test_stopping_closes_the_role_and_leaves_nothing(launchers: Launchers, start_role: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace"

    before = children()

    async def scenario() -> None:
        files = sorted(os.listdir("/proc/self/fd"))
        async with start_role("Patient", {"trace": trace}) as role:
            await role.stop()
            await role.stop()  # again does no harm
            assert trace.read_text() == "closed\n"
            assert await role.wait_dead() == "stopped by its launcher"
            with pytest.raises(PeerFailedError, match="stopped by its launcher"):
                await role.call("started")
        assert not role_processes(tmp_path)
        if launchers.kind == "local":  # Ray has files of its own open, and no children
            assert children() <= before
            assert sorted(os.listdir("/proc/self/fd")) == files

    asyncio.run(scenario())


def test_an_error_while_closing_reaches_the_caller_of_stop(start_role: Any) -> None:
    async def scenario() -> None:
        async with start_role("CloseFails") as role:
            with pytest.raises(OffbeatError, match="the disk is full"):
                await role.stop()
            assert not role.alive

    asyncio.run(scenario())


@needs_linux
@ray_at_night
@pytest.mark.parametrize(
    ("target", "busy"),
    [
        ("Stubborn", ""),
        pytest.param("Patient", "compute", marks=pytest.mark.nightly),
        pytest.param("Faulty", "hold_lock", marks=pytest.mark.nightly),
    ],
)
def test_a_role_that_does_not_leave_is_killed_within_the_deadline(
    start_role: Any, tmp_path: Path, target: str, busy: str
) -> None:
    async def scenario() -> None:
        async with start_role(target) as role:
            call = asyncio.create_task(error_of(role, busy, *([100.0] if busy == "compute" else []))) if busy else None
            await asyncio.sleep(0.2)
            async with asyncio.timeout(10):
                await role.stop(deadline_s=1)
            assert not role_processes(tmp_path)
            if call is not None:
                assert "stopped by its launcher" in str(await call)

    asyncio.run(scenario())


@needs_linux
@ray_at_night
def test_a_launcher_closes_within_its_deadline_or_at_once_when_asked_to_kill(
    launchers: Launchers, role_env: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(close: Callable[[Any], Awaitable[None]]) -> None:
        launcher = launchers.make(stop_timeout_s=1000)
        specs = [
            RoleSpec(RoleName.parse(name), f"actor_roles:{target}", env=role_env)
            for name, target in (("trainer-0", "Patient"), ("rollout-0", "Stubborn"))
        ]
        trainer, _ = await asyncio.gather(*(launcher.start(spec) for spec in specs))
        update = asyncio.create_task(error_of(trainer, "compute", 1000.0))
        await asyncio.sleep(0.2)
        async with asyncio.timeout(30):
            await close(launcher)
            assert "stopped by its launcher" in str(await update)
        assert not role_processes(tmp_path)

    async def kill_while_closing(launcher: Any) -> None:
        closing = asyncio.create_task(launcher.close())
        await asyncio.sleep(0.2)
        launcher.kill()
        await closing

    asyncio.run(scenario(lambda launcher: launcher.close(1.0)))
    asyncio.run(scenario(kill_while_closing))
    assert not caplog.records  # a role that is not waited for is nothing to warn of


@needs_linux
def test_killing_a_role_ends_what_it_has_started(start_role: Any) -> None:
    async def scenario() -> None:
        async with start_role("Patient") as role:
            with ends(await role.call("start_subprocess", returns=int), within_s=5):
                role.kill()
                await role.wait_dead()

    asyncio.run(scenario())


def test_roles_leave_ctrl_c_to_the_driver(start_role: Any) -> None:
    async def scenario() -> None:
        async with start_role("Patient") as role:
            pid = await role.call("pid", returns=int)
            assert os.getsid(pid) != os.getsid(0)
            os.kill(pid, signal.SIGINT)
            assert await role.call("started", returns=bool)

    asyncio.run(scenario())


@needs_linux
def test_cancelling_a_start_ends_the_process(launchers: Launchers, role_env: dict[str, str], tmp_path: Path) -> None:
    spec = RoleSpec(RoleName("slow"), "actor_roles:NeverReady", env=role_env, log_path=tmp_path / "log")

    async def scenario() -> None:
        async with launchers.make(start_timeout_s=60) as launcher:
            starting = asyncio.create_task(launcher.start(spec))
            await asyncio.sleep(0.3)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert not role_processes(tmp_path)

    asyncio.run(scenario())


DRIVER = """
import asyncio, sys
from offbeat_actors import ClusterConfig, RoleSpec
from offbeat_core import RoleName
from offbeat_core import load_backend

async def main(kind, address):
    launcher = load_backend("offbeat.launcher", kind)("test", ClusterConfig(launcher=kind, address=address))
    for index, (target, method, *args) in enumerate([
        ("Patient", "wait_long"), ("Patient", "compute", 100.0), ("Faulty", "hold_lock"), ("Stubborn", None)
    ]):
        role = await launcher.start(RoleSpec(RoleName("role", index), f"actor_roles:{target}"))
        if method:
            asyncio.create_task(role.call(method, *args))
        print(role.pid, flush=True)
    await asyncio.sleep(100)

asyncio.run(main(*sys.argv[1:]))
"""


@needs_linux
@ray_at_night
def test_kill_9_of_the_driver_ends_every_role(launchers: Launchers, role_env: dict[str, str]) -> None:
    command = [sys.executable, "-c", DRIVER, launchers.kind, launchers.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **role_env}) as driver:
        assert driver.stdout is not None
        pids = [int(driver.stdout.readline()) for _ in range(4)]
        time.sleep(0.3)  # let the last calls begin
        within_s = 5 if launchers.kind == "local" else 20  # Ray ends what a job has left when it sees its driver gone
        with ends(pids[0], within_s), ends(pids[1], within_s), ends(pids[2], within_s), ends(pids[3], within_s):
            driver.kill()


def test_a_process_that_sigkill_does_not_end_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_local, "_KILL_S", 0.2)

    async def scenario() -> None:
        # It leads no process group, so the signal to its group does not reach it: as one in the kernel, it runs on.
        child = await asyncio.create_subprocess_exec("sleep", "60")
        try:
            process = LocalProcess(child)
            waiting = asyncio.create_task(process.wait())
            process.send_signal(signal.SIGKILL)
            async with asyncio.timeout(30):
                assert f"its process {child.pid} has not ended 0.2 s after SIGKILL" in str(await waiting)
        finally:
            child.kill()
            assert await process.wait() == -signal.SIGKILL

    asyncio.run(scenario())
