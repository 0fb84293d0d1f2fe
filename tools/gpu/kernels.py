"""Kernels that a device runs during some work: how many, the longest ones, and the share of matrix products.

Where the device is a CPU these are torch's operators.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from gpu.piece import Place

TOP: Final = 10
LONGEST_NAME: Final = 100
"""Characters; the names of templates are longer than a table can hold."""
GROUPS: Final = {
    "attention": re.compile(r"flash|fmha|sdp|attention|attn", re.IGNORECASE),
    "products": re.compile(r"gemm|gemv|nvjet|xmma|cutlass|splitk|matmul|addmm|bmm|linear|(_|::)mm", re.IGNORECASE),
}
"""Kernels by their names in cuBLAS, cuDNN, CUTLASS, flash attention, Triton and ATen; the first group that fits."""


@dataclass(frozen=True)
class Kernels:
    """Kernels of some work.

    Args:
        counts: by name.
        seconds: by name.
    """

    counts: Counter[str]
    seconds: Counter[str]

    def beyond(self, other: "Kernels", parts: int) -> "Kernels":
        """Return what this work has run and the other has not, over a number of equal parts."""
        names = [name for name, count in self.counts.items() if count > other.counts[name]]
        return Kernels(
            Counter({name: (self.counts[name] - other.counts[name]) / parts for name in names}),
            Counter({name: max(0.0, self.seconds[name] - other.seconds[name]) / parts for name in names}),
        )

    def figures(self, of: str, wall_s: float) -> dict[str, float | str]:
        """Return number, share of the work's time in which a kernel runs, shares of groups, and the longest ones.

        Args:
            of: name of the work, behind each figure.
            wall_s: seconds of the work without a profiler.
        """
        total_s = sum(self.seconds.values()) or 1.0
        spent = Counter[str]()
        for name, seconds in self.seconds.items():
            spent[next((group for group, pattern in GROUPS.items() if pattern.search(name)), "others")] += seconds
        found: dict[str, float | str] = {
            f"kernels, {of}": float(sum(self.counts.values())),
            f"kernels_share_of_step, {of}": total_s / wall_s,
            **{f"share_of_{group}, {of}": spent[group] / total_s for group in GROUPS},
        }
        for rank, (name, seconds) in enumerate(self.seconds.most_common(TOP), 1):
            shown = name.replace("|", "/").replace("`", "'")[:LONGEST_NAME]
            share = f"{seconds / total_s:.1%} {1e3 * seconds:.3f} ms x {self.counts[name]:g}"
            found[f"top {rank:02}, {of}"] = f"{share} `{shown}`"
        return found


@contextmanager
def recorded(place: Place) -> Iterator[Kernels]:
    """Profile the block, in all threads of this process. Enter it in the main thread: CUPTI is set up by that one.

    Yields:
        The kernels, which are there after the block.
    """
    profiler: Any = place.device.profiler()
    found = Kernels(Counter(), Counter())
    place.device.synchronize()
    profiler.start()
    try:
        yield found
        place.device.synchronize()
    finally:
        profiler.stop()
    for event in profiler.key_averages():
        on_cpu = event.device_type.name == "CPU"
        if event.is_user_annotation or on_cpu == place.is_accelerator:
            continue
        taken_us = event.self_device_time_total if place.is_accelerator else event.self_cpu_time_total
        if place.is_accelerator or event.key.startswith("aten::"):
            found.counts[event.key] += event.count
            found.seconds[event.key] += taken_us / 1e6
