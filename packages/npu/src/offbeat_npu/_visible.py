"""Names by which schedulers and processes know these devices."""

from collections.abc import Sequence
from typing import Final

RAY_RESOURCE: Final = "NPU"
"""Ray's resource of one device. Source: ray 2.60, ray/_private/accelerators/npu.py."""

VISIBLE_DEVICES: Final = "ASCEND_RT_VISIBLE_DEVICES"
"""Environment variable that lists the devices a process sees. Source: as above, and CANN's runtime."""

RAY_KEEPS_VARIABLE: Final = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
"""Set to 1, Ray leaves the variable above alone."""


def visible_devices(indices: Sequence[int]) -> dict[str, str]:
    """Environment of a process that is to see these devices only.

    Args:
        indices: device numbers of the machine; none hides all of them.
    """
    return {VISIBLE_DEVICES: ",".join(map(str, indices))}
