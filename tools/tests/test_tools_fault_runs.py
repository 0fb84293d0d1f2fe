"""The runner of small distributed programs."""

import signal
from pathlib import Path

import pytest
from fault_runs import Act, FaultRun, Observation, is_proof, run_faults

ENDS = """
import os, signal, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
rank = dist.get_rank()
print("I am", rank, os.environ["COLOUR"])
dist.barrier()
if rank == 0:
    sys.exit(3)
if rank == 1:
    raise ValueError("of rank 1")
if rank == 2:
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(100)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    script = tmp_path_factory.mktemp("program") / "ends.py"
    script.write_text(ENDS)
    wanted = FaultRun(script=script, size=4, limit_s=60, environment=(("COLOUR", "red"),))
    [(run, seen)] = run_faults([wanted])
    assert run == wanted
    return seen


def test_each_end_is_reported(ended):
    assert ended.exit_codes == {0: 3, 1: 1, 2: -signal.SIGTERM, 3: None}
    assert ended.verdict is None


def test_what_each_rank_printed_is_kept_apart(ended):
    assert all(f"I am {rank} red" in output for rank, output in ended.outputs.items())
    assert "ValueError: of rank 1" in ended.outputs[1]
    assert "ValueError" not in ended.outputs[0]


def test_the_last_rank_does_not_wait_for_the_limit(ended):
    assert ended.seconds < 60


ACTED_UPON = """
import os, subprocess, time
began_s = time.monotonic()
if os.environ["RANK"] == "0":
    print("asked", input("name? "))
else:
    print("before")
    while time.monotonic() < began_s + 1:
        before_s = time.monotonic()
        time.sleep(0.01)
        if time.monotonic() - before_s > 0.3:
            print("was stopped")
    subprocess.Popen(["sleep", "1234.5"])
"""


@pytest.mark.nightly  # it is stopped a moment after its start
def test_a_rank_is_typed_at_stopped_and_continued_and_leaves_nothing_behind(tmp_path):
    script = tmp_path / "acted_upon.py"
    script.write_text(ACTED_UPON)
    stops = (Act(at_s=0.3, rank=1, signal=signal.SIGSTOP), Act(at_s=0.9, rank=1, signal=signal.SIGCONT))
    run = FaultRun(script=script, size=2, acts=(*stops, Act(at_s=1.0, rank=0, text="zoo\n")))
    [(_, seen)] = run_faults([run])
    assert seen.exit_codes == {0: 0, 1: 0}
    assert "asked zoo" in seen.outputs[0]
    assert "was stopped" in seen.outputs[1]
    arguments = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert b"sleep\0001234.5\0" not in arguments


PRINTED = """offbeat liveness: suspicion: missing-member: rank 0 never came to barrier
  since: now
offbeat liveness: it moves again: after 4 s
offbeat liveness: the wait has failed after 9 s (missing-member): rank 0 raised OSError
overwrite? offbeat liveness: wait-cycle: rank 0 waits for rank 1
"""


def test_what_a_monitor_says_is_counted_once_and_pointers_are_not():
    seen = Observation(outputs={0: PRINTED, 1: "offbeat liveness: rank 1: wait-cycle, reported in full by rank 0\n"})
    assert [each.what for each in seen.messages] == ["suspicion", "clearing", "failure", "proof"]
    assert {each.rank for each in seen.messages} == {0}


def test_a_suspicion_is_no_proof():
    assert is_proof({"kind": "missing-member", "text": "offbeat liveness: missing-member: rank 0"})
    assert not is_proof({"kind": "missing-member", "text": "offbeat liveness: suspicion: missing-member: rank 0"})
    assert not is_proof({"kind": "straggler", "text": "offbeat liveness: straggler: rank 0"})
