"""Names by which schedulers and processes know these devices."""

import os
from collections.abc import Sequence
from typing import Final

from offbeat_types import ConfigError

RAY_RESOURCE: Final = "NPU"
"""Ray's resource of one device. Source: ray 2.60, ray/_private/accelerators/npu.py."""

VISIBLE_DEVICES: Final = "ASCEND_RT_VISIBLE_DEVICES"
"""Environment variable that lists the devices a process sees. Source: as above, and CANN's runtime."""


def visible_devices(indices: Sequence[int]) -> dict[str, str]:
    """Environment of a process that is to see these devices only; nothing where none are named.

    Args:
        indices: numbers among the devices that this process sees, which a scheduler may have chosen.

    Raises:
        ConfigError: this process does not see as many.
    """
    if not indices:
        return {}
    seen = os.environ.get(VISIBLE_DEVICES, "")
    names = seen.split(",") if seen else [str(number) for number in range(max(indices) + 1)]
    if max(indices) >= len(names):
        raise ConfigError(
            f"devices {', '.join(map(str, indices))} are asked for, counted from 0, and {VISIBLE_DEVICES}={seen} shows "
            f"this process {len(names)}: name a first one that leaves enough, or show it more"
        )
    return {VISIBLE_DEVICES: ",".join(names[index] for index in indices)}
