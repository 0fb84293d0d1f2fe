"""The wrapper: any script under watch, torchrun, children; nothing in a process that enters no world."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_liveness._cli import SITE_FOLDER
from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._dumps import read_verdicts

LIMIT_S = 90
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist

def reduce_metrics(loss):
    dist.all_reduce(loss)

def main():
    dist.init_process_group("gloo")
    for step in range(3):
        reduce_metrics(torch.ones(4))
    if dist.get_rank() == 0:
        reduce_metrics(torch.ones(4))
    time.sleep(60)

main()
"""
SPAWNS = """
import sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp

def rank_main(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    if rank == 0:
        dist.all_reduce(torch.ones(4))
    time.sleep(60)

if __name__ == "__main__":
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    del server
    mp.spawn(rank_main, args=(port,), nprocs=2)
"""


TORCHRUN = [
    "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
]  # fmt: skip


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *arguments], env={**known, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def run(arguments: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    return python(
        *arguments,
        RES_OPTIONS="attempts:0",  # torch's TCPStore looks up names of loopback peers: up to 5 s
        OFFBEAT_STALL_AFTER_S="1",
        OFFBEAT_LIVENESS_POLICY="strict",
        OFFBEAT_LIVENESS_GRACE_S="0.5",
        OFFBEAT_LIVENESS_DIR=str(directory / "dumps"),
    )


def fatal_verdicts(directory: Path) -> list[Verdict]:
    """Under load a straggler may be reported before them."""
    return [verdict for verdict in read_verdicts(directory / "dumps") if verdict.may_end]


@pytest.mark.timeout(LIMIT_S)
def test_a_deadlock_of_an_unprepared_script_under_torchrun_is_named_and_the_job_ends(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = run([*TORCHRUN, "-m", "offbeat_liveness", "run", str(script)], tmp_path)
    assert ended.returncode != 0
    (verdict,) = fatal_verdicts(tmp_path)
    assert (verdict.kind, verdict.missing) == ("missing-member", ("rank 1",))
    assert "in reduce_metrics" in verdict.text
    assert ended.stderr.count("offbeat liveness: suspicion: missing-member") == 1
    assert "exitcode  : 4" in ended.stderr


@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S)
def test_ranks_that_a_script_spawns_are_reached(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWNS)
    ended = run(["-m", "offbeat_liveness", "run", str(script)], tmp_path)
    assert ended.returncode != 0
    (verdict,) = fatal_verdicts(tmp_path)
    assert (verdict.kind, verdict.missing) == ("missing-member", ("rank 1",))
    assert "in rank_main" in verdict.text


def test_the_script_is_main_with_its_own_arguments_and_folder(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside, pickle\n"
        "class Thing: pass\n"
        "pickle.loads(pickle.dumps(Thing()))\n"
        "print(__name__, sys.argv[1:], beside.VALUE, 'torch' in sys.modules)\n"
        "sys.exit(5)\n"
    )
    ended = run(["-m", "offbeat_liveness", "run", "--policy", "report", str(script), "--lr", "1"], tmp_path)
    assert ended.stdout.strip() == "__main__ ['--lr', '1'] 7 False"
    assert ended.returncode == 5


def test_an_error_of_ours_in_the_script_ends_it_as_any_other(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from offbeat_core import ConfigError\nraise ConfigError('an even number: got 3')\n")
    ended = run(["-m", "offbeat_liveness", "run", str(script)], tmp_path)
    assert ended.returncode == 1
    assert f'File "{script}", line 2' in ended.stderr


def test_a_module_can_be_run(tmp_path: Path) -> None:
    ended = run(["-m", "offbeat_liveness", "run", "-m", "platform", "--terse"], tmp_path)
    assert ended.returncode == 0
    assert "Linux" in ended.stdout or "macOS" in ended.stdout


def test_another_sitecustomize_still_runs_and_nothing_is_imported(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.theirs = True")
    code = "import sys, builtins; print(builtins.theirs, 'offbeat_mesh' in sys.modules, 'torch' in sys.modules)"
    paths = os.pathsep.join([SITE_FOLDER, str(tmp_path)])
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.strip() == "True False False"


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
ENTERS = (
    LOOK
    + """
import sys
import torch.distributed as dist
folder = sys.argv[1]
print(ours()[:2], os.path.exists(folder))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print("offbeat-liveness" in ours()[0])
"""
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
def test_a_wrapped_script_has_no_thread_and_no_file_until_it_enters_a_world(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENTERS)
    folder = tmp_path / "dumps"
    command = ["-m", "offbeat_liveness", "run", "--directory", str(folder), str(tmp_path / "script.py"), str(folder)]
    ended = python(*command)
    assert ended.stdout == "([], []) False\nTrue\n", ended.stderr


def test_a_wrapped_script_without_torch_is_notified_once_and_runs(tmp_path: Path) -> None:
    """`-S` leaves out site-packages: an interpreter with nothing installed."""
    (tmp_path / "script.py").write_text("import offbeat_liveness\nwith offbeat_liveness.waiting('x'): print('ran')\n")
    source = str(Path(__file__).parents[1] / "src")
    ended = python("-S", "-m", "offbeat_liveness", "run", str(tmp_path / "script.py"), PYTHONPATH=source)
    assert (ended.stdout, ended.returncode) == ("ran\n", 0), ended.stderr
    assert ended.stderr.count("torch is not installed in this interpreter") == 1
