"""Lanes: parts of one sync that go on at once, each with connections and a thread of its own on either side.

A lane moves every n-th bucket or so. By shared memory both its threads run on one core, in turns: what one has copied
into a slot is in that core's cache when the other copies it out. Across cores the slots' memory would go back and forth
between their caches, and on some machines (cores that share no cache) it takes five times as long to write what another
core has just read.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final

from offbeat_weightsync._plan import BucketPlan

MAX_LANES: Final = 4
"""Memory feeds no more cores."""

SLOTS_PER_LANE: Final = 2

LANE_WINDOW_BYTES: Final = 4 << 20
"""Two of them stay in the cache."""

ANY_CPU: Final = -1


def choose_cpus(num_buckets: int) -> list[int]:
    """A core for each lane, spread over those this process may use; fewer than two lanes are none."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cpus = sorted(os.sched_getaffinity(0))
    num_lanes = min(MAX_LANES, len(cpus), num_buckets)
    return [cpus[index * len(cpus) // num_lanes] for index in range(num_lanes)] if num_lanes > 1 else []


def num_tcp_lanes() -> int:
    """How many connections a receiver opens for weights: one for each core that it may use."""
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_LANES, num_cpus)


def assign_lanes(plan: BucketPlan, num_lanes: int) -> list[int]:
    """The lane of each bucket: the one with the fewest bytes so far. Pure: both sides come to the same.

    The first lane, whose threads start first, gets the most.
    """
    loads = [0] * num_lanes
    lanes = []
    for bucket in plan.buckets:
        lanes.append(min(range(num_lanes), key=loads.__getitem__))
        loads[lanes[-1]] += bucket.num_bytes
    by_load = sorted(range(num_lanes), key=loads.__getitem__, reverse=True)
    return [by_load.index(lane) for lane in lanes]


def run_lanes(bodies: Sequence[Callable[[], None]], cpus: Sequence[int], break_off: Callable[[], None]) -> None:
    """Run each lane's part in a thread; raise the first error, when all have ended.

    Args:
        bodies: the parts; every wait in them has a deadline, and ends when `break_off` was called.
        cpus: core of each, or ANY_CPU; one that this process may not use is left out.
        break_off: end the waits of all.
    """
    errors: list[BaseException] = []

    def run(body: Callable[[], None], cpu: int) -> None:
        try:
            with contextlib.suppress(OSError):  # it may not use that core
                if cpu != ANY_CPU:
                    os.sched_setaffinity(0, {cpu})  # of this thread alone
            body()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            break_off()

    pairs = zip(bodies, cpus, strict=True)
    threads = [threading.Thread(target=run, args=pair, name="offbeat-weight-lane", daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        break_off()
        raise
    if errors:
        raise errors[0]
