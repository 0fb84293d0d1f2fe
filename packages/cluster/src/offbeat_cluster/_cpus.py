"""How many CPUs this process may use, and how to share them out."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

_CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1 = Path("/sys/fs/cgroup/cpu")


def available_cpus() -> int:
    """CPUs this process may use, at least 1: its affinity mask, cut by a container's CPU quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(affinity, _quota_cpus())))


def split_threads(num_threads: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Share threads out in proportion to weights, at least one each.

    The shares add up to `num_threads`, or to the number of roles when there are fewer threads than roles.

    Args:
        num_threads: threads to share.
        weights: a number > 0 for each role.

    Raises:
        ValueError: a weight is not above 0.
    """
    if any(not weight > 0 for weight in weights.values()):
        raise ValueError(f"every weight must be above 0: got {dict(weights)}")
    shares = dict.fromkeys(weights, 1)
    for _ in range(num_threads - len(shares)):
        neediest = max(shares, key=lambda role: weights[role] / shares[role], default=None)
        if neediest is not None:
            shares[neediest] += 1
    return shares


def _quota_cpus() -> float:
    """CPUs a cgroup allows, or infinity."""
    try:
        quota, period = _CGROUP_V2.read_text().split()
    except (OSError, ValueError):
        try:
            quota = (_CGROUP_V1 / "cpu.cfs_quota_us").read_text()
            period = (_CGROUP_V1 / "cpu.cfs_period_us").read_text()
        except OSError:
            return math.inf
    try:
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except ValueError:  # "max"
        return math.inf
