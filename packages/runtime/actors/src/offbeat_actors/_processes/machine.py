"""Room for processes on this machine, checked before any is started, and their shares of its CPUs."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from offbeat_core import ConfigError
from offbeat_placement import available_cpus

_MOST_PER_CPU: Final = 32
"""More processes than these only wait for each other, and do not start before their deadline."""
_PROCESS_BYTES: Final = 200 * 2**20
"""A Python process that has imported torch, without a model."""
_CGROUP_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_bytes() -> int:
    """Main memory that this process and its children may use: the machine's, cut by a container's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _CGROUP_LIMITS:
        try:
            return min(total, int(path.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return total


def check_processes(numbers: Mapping[str, int]) -> None:
    """Refuse to start more processes than this machine can hold, whatever they do.

    Args:
        numbers: processes by the setting that asks for them, such as "engine.num_ranks".

    Raises:
        ConfigError: with the numbers, and the setting to lower.
    """
    wanted, num_cpus, num_bytes = sum(numbers.values()), available_cpus(), memory_bytes()
    room = min(_MOST_PER_CPU * num_cpus, num_bytes // _PROCESS_BYTES)
    if wanted <= room:
        return
    largest = max(numbers, key=lambda key: numbers[key])
    asked = ", ".join(f"{key} = {number}" for key, number in numbers.items())
    raise ConfigError(
        f"{asked}: {wanted} processes on this machine, whose {num_cpus} CPUs and {num_bytes / 2**30:.1f} GiB of memory "
        f"have room for {room}; lower {largest}"
    )


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
