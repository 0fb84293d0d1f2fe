"""A stranger's script that deadlocks under torchrun is named rightly by the wrapper, without a change to the script."""

import json
import os
import subprocess
import sys

from fault_catalogue import CATALOGUE, named_ranks, ranks_at

NUM_RANKS = 2


def test_a_script_under_torchrun_is_watched_by_the_wrapper_alone(tmp_path):
    fault = next(fault for fault in CATALOGUE if fault.name == "swallowed_exception")
    settings = {"OFFBEAT_STALL_AFTER_S": "2", "OFFBEAT_LIVENESS_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    settings |= {"OFFBEAT_LIVENESS_POLICY": "strict", "OFFBEAT_LIVENESS_GRACE_S": "0.5"}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    command = [sys.executable, *launcher, "-m", "offbeat_liveness", "run", str(fault.script)]
    done = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, timeout=110, check=False, cwd=tmp_path
    )
    assert done.returncode != 0, "a strict policy: torchrun must see that ranks have failed"
    assert "exitcode  : 4" in done.stderr, done.stderr
    assert "offbeat liveness: suspicion: missing-member: rank 0 has not come to all_reduce" in done.stderr, done.stderr
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert named_ranks(verdict) == ranks_at(verdict, fault, "missing") == {0}
    assert ranks_at(verdict, fault, "waits") == {1}
