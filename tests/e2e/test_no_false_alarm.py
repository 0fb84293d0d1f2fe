"""200 healthy runs with ranks that come late by up to half of `stall_after_s`: not a word from the monitor."""

import pytest
from fault_runs import run_faults
from liveness_programs import random_run, report

NUM_RUNS = 25
pytestmark = pytest.mark.timeout(240)


@pytest.mark.nightly
def test_healthy_runs_raise_no_alarm():
    sizes = (2, 2, 2, 2, 4, 4, 4, 4)
    batches = [random_run(seed, size, num_runs=NUM_RUNS, stall_after_s=1.5) for seed, size in enumerate(sizes, start=1)]
    ended = dict(run_faults(batches, num_ranks_at_once=24))
    assert len(ended) * NUM_RUNS == 200
    for run, seen in ended.items():
        assert seen.verdict is None, f"{run}: {seen.verdict['text']}"
        assert set(seen.exit_codes.values()) == {0}, f"{run}: {seen.exit_codes}\n{report(seen)}"
        assert "".join(seen.outputs.values()).strip() == "", report(seen)
