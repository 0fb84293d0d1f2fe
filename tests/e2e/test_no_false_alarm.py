"""200 healthy runs with ranks that come late by up to half of `stall_after_s`: not a word from the monitor."""

from pathlib import Path

import pytest
from fault_runs import FaultRun, run_faults

STALL_AFTER_S = 1.5
NUM_RUNS = 25
PROGRAM = Path(__file__).with_name("healthy_runs.py")
pytestmark = pytest.mark.timeout(240)


def batch(seed: int, size: int) -> FaultRun:
    delay_s = STALL_AFTER_S / 2
    environment = {"HEALTHY_SEED": seed, "HEALTHY_RUNS": NUM_RUNS, "HEALTHY_MAX_DELAY_S": delay_s}
    return FaultRun(
        script=PROGRAM,
        size=size,
        stall_after_s=STALL_AFTER_S,
        limit_s=200,
        environment=tuple((name, str(value)) for name, value in environment.items()),
    )


@pytest.mark.nightly
def test_healthy_runs_raise_no_alarm():
    batches = [batch(seed, size) for seed, size in enumerate((2, 2, 2, 2, 4, 4, 4, 4), start=1)]
    ended = dict(run_faults(batches, num_ranks_at_once=24))
    assert len(ended) * NUM_RUNS == 200
    for run, seen in ended.items():
        told = "\n".join(seen.outputs.values())
        assert seen.verdict is None, f"{run}: {seen.verdict['text']}"
        assert set(seen.exit_codes.values()) == {0}, f"{run}: {seen.exit_codes}\n{told}"
        assert told.strip() == "", told
