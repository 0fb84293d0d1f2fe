"""A stranger's script under torchrun is watched by the wrapper, without a change to the script."""

import json

import pytest
from liveness_programs import CATALOGUE, MAX_TOLD, PROGRAMS, ranks_at
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
    assert done.process.returncode != 0, "abort is the wrapper's policy: torchrun must see that ranks have failed"
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
    told = headlines(done.output)
    assert len(told) <= MAX_TOLD, done.output
    assert all("suspicion: " in line or "moves again" in line for line in told), done.output


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
