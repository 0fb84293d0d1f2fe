"""An accelerator that computes on the CPU: a kind of device that each process counts by the variable it is shown.

`register` makes it known to every process that has the environment it returns. Device 0 of what a process sees is all
that it can compute on: to torch there is no other CPU, so a rank that takes the device of another one fails.
"""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from offbeat_core import EngineNeeds, RolloutEngineConfig
from offbeat_device._cpu import CpuDevice
from offbeat_rollout_torch import TorchRolloutEngine

NUM_DEVICES = "ABACUS_NUM_DEVICES"
VISIBLE = "CUDA_VISIBLE_DEVICES"  # Ray sets it for whatever a node calls GPU
_POINTS = """
[offbeat.device]
abacus = abacus_standin:AbacusDevice
[offbeat.rollout]
abacus = abacus_standin:AbacusRollout
"""


class AbacusDevice(CpuDevice):
    """One of them, by its index among those this process is shown."""

    kind: ClassVar[str] = "abacus"
    preference: ClassVar[int] = 20
    visible_variable: ClassVar[str] = VISIBLE

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cpu", index)
        print(f"opened abacus {index} of {os.environ.get(VISIBLE, 'all')}", flush=True)

    @classmethod
    def count(cls) -> int:
        shown = os.environ.get(VISIBLE)
        return int(os.environ.get(NUM_DEVICES, "0")) if shown is None else len(shown.split(",")) if shown else 0

    @classmethod
    def engine_needs(
        cls, library: str, devices: Sequence[int], options: Mapping[str, Any], releases: Collection[str]
    ) -> EngineNeeds:
        """A plugin completes vLLM 0.32 for it, and no other release."""
        notice = "" if "0.32" in releases else f"the plugin of abaci is for {library} 0.32"
        return EngineNeeds(variables={"ABACUS_PLUGIN": "1"}, notice=notice)


class AbacusRollout(TorchRolloutEngine):
    """The embedded engine, which asks torch for its device, given the name that torch knows."""

    @classmethod
    async def create(cls, config: RolloutEngineConfig) -> Any:
        print(f"samples on {config.device} 0 of {os.environ.get(VISIBLE, 'all')}", flush=True)
        return await super().create(replace(config, device="cpu"))


def register(folder: Path, num_devices: int) -> dict[str, str]:
    """Make the kind known.

    Args:
        folder: takes what an installed package leaves of itself.
        num_devices: on this machine.

    Returns:
        Environment of a command that shall know it.
    """
    about = folder / "abacus_standin-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: abacus-standin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(_POINTS)
    paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {NUM_DEVICES: str(num_devices), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def said(run: Path, role: str) -> list[str]:
    """What a role has opened and sampled on, by its log."""
    lines = re.findall(r"^(?:opened|samples on) .*", (run / "logs" / f"{role}.log").read_text(), re.MULTILINE)
    return sorted(set(lines))
