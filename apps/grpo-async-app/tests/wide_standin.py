"""A rollout engine of any width: the embedded one, which at a width that a variable names is never ready."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import abacus_standin

from offbeat_core import RolloutEngineConfig
from offbeat_rollout_torch import TorchRolloutEngine

HANGS_AT, DIES_AT = "WIDE_HANGS_AT", "WIDE_DIES_AT"
SLEEPER = "import time; time.sleep(600)  # of a wide engine"
_POINTS = """
[offbeat.rollout]
wide = wide_standin:WideRollout
"""


class WideRollout(TorchRolloutEngine):
    """Its ranks beyond the first are a process that sleeps."""

    @classmethod
    async def create(cls, config: RolloutEngineConfig) -> Any:
        width = str(config.tensor_parallel)
        print(f"rank 0 of {width} loads the model", flush=True)
        if os.environ.get(DIES_AT) == width:
            print("NCCL WARN no route to the other ranks", flush=True)
            os._exit(7)
        if os.environ.get(HANGS_AT) == width:
            subprocess.Popen([sys.executable, "-c", SLEEPER])
            print("rank 0 waits for rank 1", flush=True)
            await asyncio.sleep(600)
        return await super().create(replace(config, tensor_parallel=1, device="cpu"))


def register(folder: Path) -> dict[str, str]:
    """Make the backend known, and the accelerators of `abacus_standin`: see there."""
    about = folder / "wide_standin-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: wide-standin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(_POINTS)
    return abacus_standin.register(folder, num_devices=0)
