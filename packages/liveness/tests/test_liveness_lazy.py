"""Nothing of the monitor is in a process that has nothing to be watched: no thread, no file, no socket."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 90
LOOK = """
import os, threading

def ours():
    threads = [each.name for each in threading.enumerate() if each.name.startswith("offbeat-liveness")]
    files = [each for each in os.listdir(folder) if str(os.getpid()) in each] if os.path.isdir(folder) else []
    open_files = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    links = [os.readlink(each) for each in open_files if os.path.lexists(each)]
    return threads, files, [each for each in links if each.startswith("socket:")]
"""
FORKS = (
    LOOK
    + """
import sys, time, traceback
import torch.distributed as dist
from torch.distributed import init_process_group
import offbeat_liveness as liveness

folder = sys.argv[1]

def in_child(body):
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

def nothing():
    time.sleep(0.5)
    assert ours() == ([], [], []), ours()
    assert liveness.current_monitor() is None

def world():
    init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monitor = liveness.current_monitor()
    assert monitor is not None and monitor.settings.stall_after_s == 7
    assert "offbeat-liveness" in ours()[0], ours()

def wait():
    with liveness.waiting("queue.get"):
        assert "offbeat-liveness" in ours()[0], ours()

def asked():
    monitor = liveness.watch(stall_after_s=9)
    assert monitor.settings.stall_after_s == 9
    assert ours()[0].count("offbeat-liveness") == 1

liveness.watch(stall_after_s=7, directory=folder)
for body in (nothing, world, wait, asked, lambda: in_child(nothing), lambda: in_child(world)):
    in_child(body)
print("fine")
"""
)
FORKED_IN_A_WORLD = """
import os, time
import torch.distributed as dist
import offbeat_liveness as liveness

monitor = liveness.watch(stall_after_s=60)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
end_s = time.monotonic() + 30
while not monitor._peers.is_settled() and time.monotonic() < end_s:
    time.sleep(0.01)
assert monitor._peers.is_settled()
world = dist.group.WORLD  # gloo's, let go in a child, waits for threads of its parent
monitor._joining.acquire()  # as its thread may hold it at any moment
asked = []
monitor._peers.needs_to_join = lambda **_: asked.append(1)
if (pid := os.fork()) == 0:
    dist.destroy_process_group()
    os._exit(0 if (asked, monitor.is_closed, monitor._peers.world) == ([], True, "") else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert not monitor.is_closed and monitor._peers.world
monitor._joining.release()
print("fine")
"""
NO_WORLD = LOOK + "import sys\nimport torch.distributed\nfolder = sys.argv[1]\nprint(ours()[:2])\n"
ENTERS = (
    LOOK
    + """
import sys
folder = sys.argv[1]
assert ours()[:2] == ([], []), ours()
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print("offbeat-liveness" in ours()[0])
"""
)


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.timeout(LIMIT_S)
def test_a_forked_child_is_watched_from_when_it_enters_a_world_or_waits(tmp_path: Path) -> None:
    ended = python("-c", FORKS, str(tmp_path / "dumps"))
    assert ended.stdout == "fine\n", ended.stderr


@pytest.mark.timeout(LIMIT_S)
def test_a_forked_child_leaves_the_monitor_and_the_store_of_its_parent_alone() -> None:
    """The monitor is still there, behind the `destroy_process_group` that came with the fork."""
    ended = python("-c", FORKED_IN_A_WORLD)
    assert ended.stdout == "fine\n", ended.stderr


@pytest.mark.timeout(LIMIT_S)
def test_a_wrapped_script_that_enters_no_world_has_no_thread_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(NO_WORLD)
    folder = tmp_path / "dumps"
    command = ["-m", "offbeat_liveness", "run", "--directory", str(folder), str(tmp_path / "script.py"), str(folder)]
    ended = python(*command)
    assert (ended.stdout, ended.returncode) == ("([], [])\n", 0), ended.stderr
    assert not folder.exists()


@pytest.mark.timeout(LIMIT_S)
def test_a_wrapped_script_is_watched_from_when_it_enters_a_world(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENTERS)
    folder = tmp_path / "dumps"
    command = ["-m", "offbeat_liveness", "run", "--directory", str(folder), str(tmp_path / "script.py"), str(folder)]
    ended = python(*command)
    assert ended.stdout == "True\n", ended.stderr


def test_a_wrapped_script_without_torch_is_told_so_once_and_runs(tmp_path: Path) -> None:
    """`-S` leaves out site-packages: an interpreter with nothing installed."""
    (tmp_path / "script.py").write_text("import offbeat_liveness\nwith offbeat_liveness.waiting('x'): print('ran')\n")
    source = str(Path(__file__).parents[1] / "src")
    ended = python("-S", "-m", "offbeat_liveness", "run", str(tmp_path / "script.py"), PYTHONPATH=source)
    assert (ended.stdout, ended.returncode) == ("ran\n", 0), ended.stderr
    assert ended.stderr.count("torch is not installed in this interpreter") == 1
