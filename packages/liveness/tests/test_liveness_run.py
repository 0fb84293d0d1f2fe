"""The wrapper, on scripts that know nothing of it: under torchrun, and starting their own ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_liveness._cli import SITE_FOLDER
from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._dumps import read_verdicts

LIMIT_S = 90
STRANGER = """
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


def environment(directory: Path) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "attempts:0",  # torch's TCPStore looks up names of loopback peers: up to 5 s
        "OFFBEAT_STALL_AFTER_S": "2",
        "OFFBEAT_LIVENESS_POLICY": "strict",
        "OFFBEAT_LIVENESS_GRACE_S": "0.5",
        "OFFBEAT_LIVENESS_DIR": str(directory / "dumps"),
    }


def run(arguments: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(directory),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def fatal_verdicts(directory: Path) -> list[Verdict]:
    """Under load a straggler may be told before them."""
    return [verdict for verdict in read_verdicts(directory / "dumps") if verdict.may_end]


@pytest.mark.timeout(LIMIT_S)
def test_a_strangers_deadlock_under_torchrun_is_named_and_the_job_ends(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STRANGER)
    ended = run([*TORCHRUN, "-m", "offbeat_liveness", "run", str(script)], tmp_path)
    assert ended.returncode != 0
    (verdict,) = fatal_verdicts(tmp_path)
    assert (verdict.kind, verdict.missing) == ("missing-member", ("rank 1",))
    assert "in reduce_metrics" in verdict.text
    assert ended.stderr.count("offbeat liveness: suspicion: missing-member") == 1
    assert "exitcode  : 4" in ended.stderr


RAISES = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    raise ValueError("loss is nan")
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.timeout(LIMIT_S)
def test_torchrun_names_the_rank_that_raised_as_the_cause(tmp_path: Path) -> None:
    """Which takes a while to end, and closes its connections meanwhile: nobody else ends before it."""
    script = tmp_path / "train.py"
    script.write_text(RAISES)
    ended = run([*TORCHRUN, "-m", "offbeat_liveness", "run", str(script)], tmp_path)
    cause = ended.stderr.partition("Root Cause")[2]
    assert "rank      : 1 (local_rank: 1)" in cause
    assert "exitcode  : 1 " in cause


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
    script.write_text("from offbeat_types import ConfigError\nraise ConfigError('an even number: got 3')\n")
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
