"""The healthy programs on 4 ranks with pauses of minutes, and hours of random healthy runs.

From the environment: OFFBEAT_HEALTHY_PAUSE_S is the length of a pause, OFFBEAT_HEALTHY_HOURS how long random programs
run (less than a minute if it is not set).
"""

import os
import time

import pytest
from fault_runs import FaultRun, Results, run_faults
from liveness_programs import HEALTHY, Healthy, complaints, random_run, report

STALL_AFTER_S = 5.0
PAUSE_S = float(os.environ.get("OFFBEAT_HEALTHY_PAUSE_S", "60"))
# Sixty stalls.
EVALUATION_S = 5 * PAUSE_S
HOURS = float(os.environ.get("OFFBEAT_HEALTHY_HOURS", "0.01"))
NUM_LOADER_WORKERS = 200
NUM_BATCHES = 8
pytestmark = pytest.mark.timeout(600 + 60 * PAUSE_S + 3600 * HOURS)


def run_of(healthy: Healthy) -> FaultRun:
    pause_s = EVALUATION_S if healthy.name == "evaluates_on_rank0" else PAUSE_S
    return healthy.run(max(healthy.sizes), stall_after_s=STALL_AFTER_S, pause_s=pause_s)


@pytest.fixture(scope="module")
def results(request):
    os.environ["NUM_WORKERS"] = str(NUM_LOADER_WORKERS)
    items = [item for item in request.session.items if item.path == request.node.path and hasattr(item, "callspec")]
    # The longest one first: what is wanted last is started first.
    wanted = sorted((run_of(item.callspec.params["healthy"]) for item in items), key=lambda run: run.limit_s)
    started = Results(wanted, num_ranks_at_once=32)
    yield started
    started.close()


@pytest.mark.parametrize("healthy", HEALTHY, ids=lambda healthy: healthy.name)
def test_minutes_of_a_pause_are_let_be(results, healthy):
    seen = results.of(run_of(healthy))
    assert complaints(healthy, seen) == [], report(seen)


def test_hours_of_random_healthy_runs_raise_no_alarm():
    until_s, seed = time.monotonic() + 3600 * HOURS, 1000
    while time.monotonic() < until_s:
        batches = [
            random_run(number, (2, 4)[number % 2], num_runs=25, stall_after_s=1.5)
            for number in range(seed, seed + NUM_BATCHES)
        ]
        for run, seen in run_faults(batches, num_ranks_at_once=16):
            assert seen.verdict is None, f"{run}: {seen.verdict['text']}"
            assert set(seen.exit_codes.values()) == {0}, f"{run}: {seen.exit_codes}\n{report(seen)}"
            assert "".join(seen.outputs.values()).strip() == "", report(seen)
        seed += NUM_BATCHES
