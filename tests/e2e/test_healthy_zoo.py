"""Healthy programs with long pauses, as people write them: the monitor ends none, and speaks at most twice of each.

In small: pauses are a few stalls long, on the fewest ranks that each program needs. The nightly tier has more
ranks, and pauses of minutes (tests/nightly/test_healthy_zoo_long.py).
"""

import pytest
from fault_runs import FaultRun, Results
from healthy_catalogue import HEALTHY, Healthy, complaints, report

STALL_AFTER_S = 1.0
PAUSE_S = 4.0
# They mostly sleep.
NUM_RANKS_AT_ONCE = 24
pytestmark = pytest.mark.timeout(400)
EVERY = [(healthy, size) for size in (4, 3, 2) for healthy in reversed(HEALTHY) if size in healthy.sizes]


def run_of(healthy: Healthy, size: int) -> FaultRun:
    return healthy.run(size, stall_after_s=STALL_AFTER_S, pause_s=PAUSE_S)


@pytest.fixture(scope="module")
def results(request):
    params = [item.callspec.params for item in request.session.items if item.path == request.node.path]
    started = Results(
        [run_of(given["healthy"], given["size"]) for given in params], num_ranks_at_once=NUM_RANKS_AT_ONCE
    )
    yield started
    started.close()


def marks_of(healthy: Healthy, size: int) -> list[pytest.MarkDecorator]:
    return [pytest.mark.nightly] if size > min(healthy.sizes) else []


@pytest.mark.parametrize(
    ("healthy", "size"),
    [pytest.param(each, size, id=f"{each.name}-{size}", marks=marks_of(each, size)) for each, size in EVERY],
)
def test_a_healthy_program_is_let_be(results, healthy, size):
    seen = results.of(run_of(healthy, size))
    assert complaints(healthy, seen) == [], report(seen)
