"""Any script under torchrun is watched by the wrapper, without a change to the script."""

import json
import os
import socket
import subprocess
import sys

import pytest
from liveness_programs import CATALOGUE, MAX_MESSAGES, PROGRAMS, ranks_at
from torchrun import ALONE, Torchrun, ended_at_last, headlines, wait_until

NUM_RANKS = 2
LIMIT_S = 110.0
pytestmark = pytest.mark.timeout(150)


def run(folder, script, num_ranks=NUM_RANKS, **environment):
    settings = {"OFFBEAT_STALL_AFTER_S": "2", "OFFBEAT_LIVENESS_DIR": str(folder / "dumps"), **environment}
    agent = Torchrun(folder, "job", script, *ALONE, f"--nproc-per-node={num_ranks}", environment=settings)
    with ended_at_last([agent]):
        wait_until(lambda: agent.process.poll() is not None, "the end", [agent], LIMIT_S)
    return agent


def test_a_script_that_deadlocks_is_ended_with_its_fault_named(tmp_path):
    fault = next(fault for fault in CATALOGUE if fault.name == "uneven_loops")
    done = run(tmp_path, fault.script)
    assert done.process.returncode == 1, "abort is the wrapper's policy, and torchrun's own code is 1, as the page says"
    assert "exitcode  : 4" in done.output, done.output
    assert "offbeat liveness: different-op: collective 4 of the default group is barrier" in done.output, done.output
    verdict = json.loads((tmp_path / "dumps" / "verdict.json").read_text())
    assert verdict["kind"] == "different-op"
    assert ranks_at(verdict, fault, "missing") == {0}
    assert ranks_at(verdict, fault, "waits") == {1}


@pytest.mark.nightly
def test_a_script_whose_rank_0_prepares_the_data_first_ends_well(tmp_path):
    done = run(tmp_path, PROGRAMS / "main_process_first.py", PAUSE_S="8")
    assert done.process.returncode == 0, done.output
    assert all(f"rank {rank}: done" in done.output for rank in range(NUM_RANKS)), done.output
    lines = headlines(done.output)
    assert len(lines) <= MAX_MESSAGES, done.output
    assert all("suspicion: " in line or "moves again" in line for line in lines), done.output


RAISES = """
import time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
time.sleep(1)
if dist.get_rank() == 1:
    raise ValueError("loss is nan")
if dist.get_rank() == 0:
    time.sleep(3)  # busy, and in no wait
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.nightly
def test_the_rank_that_raised_is_the_cause_that_torchrun_names(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(RAISES)
    done = run(tmp_path, script, num_ranks=3)
    cause = done.output.rpartition("Root Cause")[2]
    assert "rank      : 1" in cause, done.output
    assert "exitcode  : 1 " in cause, done.output


SPAWNS = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.barrier() if rank else dist.all_reduce(torch.ones(1))

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start_wrapped(*arguments, **variables):
    settings = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "attempts:0", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, "-m", "offbeat_liveness", "run", "--stall-after-s", "2", *map(str, arguments)],
        env=os.environ | settings | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.nightly
def test_the_parent_of_spawned_ranks_leaves_with_1(tmp_path):
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    parent = start_wrapped(script, free_port())
    said = parent.communicate(timeout=LIMIT_S)[0]
    assert "offbeat liveness: different-op: " in said, said
    assert "terminated with exit code 4" in said, said
    assert parent.returncode == 1, said


@pytest.mark.nightly
def test_ranks_that_a_scheduler_starts_one_by_one_leave_with_4():
    fault = next(fault for fault in CATALOGUE if fault.name == "uneven_loops")
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [start_wrapped(fault.script, RANK=str(rank), **common) for rank in range(2)]
    said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [4, 4], said
    assert "offbeat liveness: different-op: " in said[0], said
