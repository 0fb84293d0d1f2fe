"""Traces of vLLM's workers, taken by vLLM's own profiler, which names steps by what is in them and knows its platform.

Source: vllm 0.32.0, vllm/config/profiler.py (ProfilerConfig), vllm/v1/worker/gpu_worker.py (Worker.profile),
vllm/profiler/wrapper.py (TorchProfilerWrapper: one file for each rank).
"""

import shutil
import uuid
from pathlib import Path
from typing import Any

from offbeat_rollout_vllm._workers import Workers


class WorkerTraces:
    """Traces of one engine, one after the other.

    Args:
        folder: where they are handed over; "" where none will be asked for.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._name = Path(folder).absolute(), f".vllm-{uuid.uuid4().hex}"
        self.arguments: dict[str, Any] = {"profiler_config": self._config()} if folder else {}
        """For vLLM's EngineArgs."""

    def _config(self) -> dict[str, Any]:
        """Stacks of Python cost more than all else; AsyncLLM's own part of the work is our own process's."""
        return {
            "profiler": "torch",
            "torch_profiler_dir": str(self._folder / self._name),
            "torch_profiler_use_gzip": False,
            "torch_profiler_with_stack": False,
            "ignore_frontend": True,
        }

    def begin(self, workers: Workers) -> None:
        """Trace from here on."""
        workers.call("begin_trace")

    def end(self, workers: Workers) -> list[Path]:
        """Trace no further; a file for each rank. vLLM's folder, which also holds tables of what took longest, goes."""
        written = [Path(path) for path in workers.call("end_trace")]
        taken = [self._folder / f"{self._name}-{rank}.partial" for rank in range(len(written))]
        for path, place in zip(written, taken, strict=True):
            path.replace(place)
        shutil.rmtree(self._folder / self._name)
        return taken
