"""accelerate, Lightning and TRL as people use them, with a rank that takes long: no rank is ended.

They are not in the lock, and have an environment of their own: `nox -s zoo`. Models are made here, nothing is fetched.
"""

import importlib.util
import os
from pathlib import Path

import pytest
from liveness_programs import MAX_MESSAGES
from torchrun import ALONE, Torchrun, ended_at_last, headlines, wait_until

PAUSE_S = float(os.environ.get("OFFBEAT_HEALTHY_PAUSE_S", "30"))
STALL_AFTER_S = 5.0
NUM_RANKS = 2
NUM_PAUSES = 2
LIMIT_S = 240 + NUM_PAUSES * PAUSE_S
PROGRAMS = Path(__file__).with_name("frameworks")
pytestmark = pytest.mark.timeout(60 + LIMIT_S)


@pytest.mark.parametrize("framework", ["accelerate", "lightning", "trl"])
def test_a_framework_with_a_slow_rank_is_let_be(tmp_path, framework):
    assert importlib.util.find_spec(framework), f"{framework} must be installed here: run `nox -s zoo`"
    environment = {"OFFBEAT_STALL_AFTER_S": str(STALL_AFTER_S), "PAUSE_S": str(PAUSE_S), "HF_HUB_OFFLINE": "1"}
    script, options = PROGRAMS / f"{framework}_training.py", [*ALONE, f"--nproc-per-node={NUM_RANKS}"]
    agent = Torchrun(tmp_path, framework, script, *options, environment=environment)
    with ended_at_last([agent]):
        wait_until(lambda: agent.process.poll() is not None, "the end", [agent], LIMIT_S)
        assert agent.process.returncode == 0, agent.output
        assert all(f"rank {rank}: done" in agent.output for rank in range(NUM_RANKS)), agent.output
        lines = headlines(agent.output)
        assert all("suspicion: " in line or "moves again" in line for line in lines), agent.output
        assert len(lines) <= NUM_PAUSES * MAX_MESSAGES, agent.output
        assert sum("suspicion: " in line for line in lines) <= NUM_PAUSES, agent.output
