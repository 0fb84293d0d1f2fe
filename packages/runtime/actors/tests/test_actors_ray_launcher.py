"""What is Ray's own: connecting, a cluster of our own on loopback, node agents that die, logs of other machines."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from ray_cluster import RayCluster
from role_processes import parent_of, role_processes
from test_actors_failures import error_of, needs_linux

from offbeat_actors import ClusterConfig, RoleSpec, _remote
from offbeat_actors._agent import LogFile
from offbeat_actors.ray import RayLauncher, cluster_nodes
from offbeat_actors.ray._cluster import own_folder
from offbeat_core import RoleName
from offbeat_placement import RankGroup, plan_placement

LISTEN = "0A"


def run_python(code: str, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=460, env={**os.environ, **(env or {})})


def listening(pids: set[int]) -> set[str]:
    """Hexadecimal address:port at which processes listen. Source: proc_pid_net(5) and proc_pid_fd(5)."""
    inodes: set[str] = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(file)))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1] for line in lines[1:] if line[3] == LISTEN and line[9] in inodes}


OWN_CLUSTER = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from role_processes import role_processes
from test_actors_ray_launcher import knows_token, listening
from offbeat_actors import ClusterConfig, RoleSpec
from offbeat_actors.ray import RayLauncher
from offbeat_core import RoleName

async def main():
    patient = ClusterConfig(launcher="ray", connect_timeout_s=400, start_timeout_s=440)
    async with RayLauncher("test", patient) as launcher:
        role = await launcher.start(RoleSpec(RoleName("rollout"), "actor_roles:Patient"))
        assert await role.call("started", returns=bool)
        servers = role_processes(Path(sys.argv[2])) - {role.pid}
        print("listening", *sorted(listening({*servers, role.pid, os.getpid()})))
        print("address", role.address, launcher.address)
        print("token", any(map(knows_token, servers)), knows_token(role.pid), "RAY_AUTH_TOKEN" in os.environ)
        print("running", flush=True)
        if sys.argv[3:] == ["stay"]:
            await asyncio.sleep(1000)

asyncio.run(main())
print("left", *role_processes(Path(sys.argv[2])))
"""


def knows_token(pid: int) -> bool:
    """Return whether a process has the token of a Ray cluster."""
    return b"RAY_AUTH_TOKEN=" in Path(f"/proc/{pid}/environ").read_bytes()


def command_of(pid: int) -> str:
    """Its command line; "" when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for Ray, which puts sockets into it: their paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="r-") as folder:
        yield Path(folder)


@pytest.mark.timeout(700)
@needs_linux
def test_a_cluster_of_our_own_listens_on_loopback_alone_and_leaves_nothing(
    role_env: dict[str, str], tmp_path: Path, short_folder: Path
) -> None:
    pytest.importorskip("ray")
    env = {**role_env, "TMPDIR": str(short_folder)}
    done = run_python(OWN_CLUSTER, str(Path(__file__).parent), str(tmp_path), env=env)
    assert done.returncode == 0, done.stderr
    said = {words[0]: words[1:] for words in map(str.split, done.stdout.splitlines())}
    sockets = [address.split(":") for address in said["listening"]]
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert sockets
    assert {address for address, _ in sockets} <= loopback
    assert not {int(port, 16) for _, port in sockets} & {8265, 10001}  # Ray's dashboard and client server
    assert said["address"] == ["127.0.0.1", "127.0.0.1"]
    assert said["token"] == ["True", "False", "False"]  # of Ray's processes; not of the role, nor of the driver
    assert said["left"] == []
    assert list(short_folder.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.timeout(700)
@needs_linux
def test_a_cluster_of_our_own_ends_with_a_driver_that_is_killed(
    role_env: dict[str, str], tmp_path: Path, short_folder: Path
) -> None:
    pytest.importorskip("ray")
    env = {**os.environ, **role_env, "TMPDIR": str(short_folder)}
    command = [sys.executable, "-c", OWN_CLUSTER, str(Path(__file__).parent), str(tmp_path), "stay"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as driver:
        assert driver.stdout is not None
        assert any(line == "running\n" for line in driver.stdout)
        driver.kill()
    end_s = time.monotonic() + 200
    while left := role_processes(tmp_path):
        assert time.monotonic() < end_s, [command_of(pid) for pid in left]
        time.sleep(0.1)
    with own_folder(short_folder) as folder:  # the next run clears away what this one could not
        assert list(short_folder.iterdir()) == [folder]


def test_folders_of_runs_that_live_are_left_alone(tmp_path: Path) -> None:
    with own_folder(tmp_path) as first:
        with own_folder(tmp_path) as second:
            assert {first, second} == {*tmp_path.iterdir()}
        assert [*tmp_path.iterdir()] == [first]


CONNECT = """
import sys
sys.modules.update({name: None for name in sys.argv[2:]})
from offbeat_actors import ClusterConfig
from offbeat_actors.ray import RayLauncher
try:
    RayLauncher.nodes(ClusterConfig(launcher="ray", address=sys.argv[1], connect_timeout_s=5))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("address", ["127.0.0.1:1", "head", "head:port"])
def test_an_address_where_no_cluster_is_is_refused(address: str) -> None:
    pytest.importorskip("ray")
    said = run_python(CONNECT, address).stdout
    assert said.startswith(f"ConfigError cluster.address {'= ' if ':1' in address else 'is '}"), said
    assert repr(address) in said


CLOSE_EARLY = """
import asyncio, sys, time
from offbeat_actors import ClusterConfig, RoleSpec
from offbeat_actors.ray import RayLauncher
from offbeat_core import RoleName

async def main():
    config = ClusterConfig(launcher="ray", address=sys.argv[1], connect_timeout_s=400)
    async with RayLauncher("test", config) as launcher:
        starting = asyncio.create_task(launcher.start(RoleSpec(RoleName("rollout"), "actor_roles:Patient")))
        await asyncio.to_thread(sys.stdin.readline)
        starting.cancel()

begin_s = time.monotonic()
asyncio.run(main())
print("ended", time.monotonic() - begin_s < 200)
"""


def test_a_launcher_that_is_closed_while_ray_connects_does_not_wait_for_it() -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts connections, and never answers
        command = [sys.executable, "-c", CLOSE_EARLY, f"127.0.0.1:{listener.getsockname()[1]}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
            listener.accept()[0].close()  # the check whether a server listens: now it connects
            assert driver.communicate("\n", timeout=300)[0] == "ended True\n"


def test_without_ray_the_error_has_the_install_line() -> None:
    said = run_python(CONNECT, "127.0.0.1:1", "ray").stdout
    line = 'pip install "offbeat-actors[ray]"'
    needs = 'cluster.launcher = "ray" needs Ray, which is not installed'
    assert said == f"BackendError {needs}; install it with: {line}\n"


def test_a_program_that_is_connected_already_is_not_connected_elsewhere(ray_cluster: RayCluster) -> None:
    assert {node.address for node in cluster_nodes(ClusterConfig(address=ray_cluster.address))} > {"127.0.0.2"}
    with pytest.raises(Exception, match="this process is connected to the Ray cluster at"):
        cluster_nodes(ClusterConfig(address="10.0.0.1:1"))
    assert ray_cluster.ray.is_initialized()


@pytest.mark.nightly
def test_a_agent_that_dies_takes_its_roles_along_and_is_replaced(
    ray_cluster: RayCluster, role_env: dict[str, str], tmp_path: Path
) -> None:
    spec = RoleSpec(RoleName("rollout"), "actor_roles:Faulty", env=role_env, log_path=tmp_path / "rollout-0.log")

    async def scenario() -> None:
        config = ClusterConfig(launcher="ray", address=ray_cluster.address)
        async with RayLauncher("test-run", config) as launcher:
            first = await launcher.start(spec)
            call = asyncio.create_task(error_of(first, "hang"))
            await error_of(first, "value_error")
            os.kill(parent_of(first.pid), signal.SIGKILL)
            assert "rollout-0 failed: its node agent, a Ray actor on " in str(await call)
            assert not first.alive
            for _ in range(100):
                if not role_processes(tmp_path):
                    break
                await asyncio.sleep(0.1)
            assert not role_processes(tmp_path)
            second = await launcher.start(spec)
            assert "7 is not even" in str(await error_of(second, "value_error"))

    asyncio.run(scenario())


def test_the_log_of_a_machine_that_does_not_share_files_comes_to_the_driver(
    ray_cluster: RayCluster, role_env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = _remote.describe_log
    monkeypatch.setattr(_remote, "describe_log", lambda path: replace_inode(described(path)))
    log_path = tmp_path / "logs" / "rollout-0.log"
    groups = [RankGroup(role="rollout", tensor_parallel=2, process_per_replica=True)]

    async def scenario() -> None:
        config = ClusterConfig(launcher="ray", address=ray_cluster.address)
        async with RayLauncher("test-run", config) as launcher:
            await launcher.place(plan_placement(cluster_nodes(config), groups), groups)
            spec = RoleSpec(RoleName("rollout"), "actor_roles:Faulty", env=role_env, log_path=log_path)
            role = await launcher.start(spec)
            await error_of(role, "value_error")
            for _ in range(100):
                if "7 is not even" in log_path.read_text():
                    break
                await asyncio.sleep(0.1)
            error = await error_of(role, "leave", 3)
            assert f"its process on {role.address} exited with code 3\n" in str(error)
            assert str(error).endswith("these are my last words")

    asyncio.run(scenario())
    assert "7 is not even" in log_path.read_text()


def test_a_log_that_cannot_be_written_here_does_not_make_its_role_deaf(
    ray_cluster: RayCluster,
    role_env: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    described = _remote.describe_log
    monkeypatch.setattr(_remote, "describe_log", lambda path: replace_inode(described(path)))
    log_path = tmp_path / "logs" / "rollout-0.log"
    spec = RoleSpec(RoleName("rollout"), "actor_roles:Faulty", env=role_env, log_path=log_path)

    async def scenario() -> None:
        config = ClusterConfig(launcher="ray", address=ray_cluster.address)
        async with RayLauncher("test-run", config) as launcher:
            role = await launcher.start(spec)
            log_path.unlink(missing_ok=True)
            log_path.parent.rmdir()
            log_path.parent.touch()  # a file where the folder was
            for _ in range(100):
                assert "7 is not even" in str(await error_of(role, "value_error"))  # and its traceback in the log
                if "what rollout-0 writes is lost" in caplog.text:
                    break
                await asyncio.sleep(0.1)
            assert "7 is not even" in str(await error_of(role, "value_error"))

    asyncio.run(scenario())
    assert caplog.text.count("what rollout-0 writes is lost") == 1


@pytest.mark.nightly
def test_a_driver_that_was_suspended_goes_on_with_its_roles(
    ray_cluster: RayCluster, role_env: dict[str, str], tmp_path: Path
) -> None:
    async def scenario() -> None:
        config = ClusterConfig(launcher="ray", address=ray_cluster.address, silent_after_s=3)
        async with RayLauncher("test-run", config) as launcher:
            role = await launcher.start(RoleSpec(RoleName("rollout"), "actor_roles:Faulty", env=role_env))
            time.sleep(5)
            assert "7 is not even" in str(await error_of(role, "value_error"))
            assert role.alive

    asyncio.run(scenario())


def replace_inode(log: LogFile) -> LogFile:
    return msgspec.structs.replace(log, inode=log.inode + 1)
