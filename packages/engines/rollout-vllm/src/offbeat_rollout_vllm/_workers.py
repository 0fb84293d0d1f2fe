"""Calls to the engine's workers, answered by all of them or by an error, and memory shared with them."""

import ctypes
import itertools
import json
import math
import mmap
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from offbeat_core import DeadlineError, PeerFailedError, WeightSyncError
from offbeat_rollout_vllm._forms import EngineForm

if TYPE_CHECKING:
    from torch import Tensor


ALIGNMENT: Final = 64
PROC: Final = "/proc"


class Arena:
    """Bytes that both sides see. Made by `create` in this process, and by `attach` in a worker.

    Workers of vLLM may be child processes of a child process, started by vLLM, so a descriptor cannot be handed down to
    them. They open it through /proc, where the memory is gone when the last process that has it mapped is gone, however
    it went. In one process it is the same memory.

    Args:
        descriptor: an open file that holds the memory.
        num_bytes: its size.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.descriptor, self.num_bytes = descriptor, num_bytes
        self._map = mmap.mmap(descriptor, num_bytes)

    @classmethod
    def create(cls, num_bytes: int) -> "Arena":
        """Take memory, zeroed."""
        try:
            descriptor = os.memfd_create("offbeat-rollout-vllm")
            os.truncate(descriptor, num_bytes)
            return cls(descriptor, num_bytes)
        except OSError as error:
            raise WeightSyncError(f"no {num_bytes} bytes of shared memory for a weight update ({error})") from error

    @property
    def address(self) -> str:
        return f"{PROC}/{os.getpid()}/fd/{self.descriptor}"

    @classmethod
    def attach(cls, address: str, num_bytes: int) -> "Arena":
        return cls(os.open(address, os.O_RDWR), num_bytes)

    def tensor(self, offset: int, dtype: str, shape: tuple[int, ...]) -> "Tensor":
        """Return a view of the memory at `offset`, of a dtype named as torch names it."""
        import torch

        number_format: torch.dtype = getattr(torch, dtype)
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=number_format)
        return torch.frombuffer(self._map, dtype=number_format, count=count, offset=offset).view(shape)

    def holds(self, tensor: "Tensor") -> bool:
        """Return whether a tensor lies here."""
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        return first <= tensor.data_ptr() < first + self.num_bytes

    def close(self) -> None:
        os.close(self.descriptor)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


GRACE_S: Final = 10.0
"""Time that we wait beyond the workers' own deadline: theirs says more."""


class Workers:
    """All workers of one engine.

    `lost` says why they can no longer be relied on. An exception that passes through vLLM's own call leaves replies of
    the other ranks in its queues, which later calls take for theirs (vllm-project/vllm#57846): then for ever, and so
    the engine must be thrown away. Our calls carry numbers, so a stale reply is seen, whatever caused it.
    """

    def __init__(self, form: EngineForm, num_workers: int, deadline_s: float) -> None:
        self._form, self.num_workers, self.deadline_s = form, num_workers, deadline_s
        self._numbers = itertools.count()
        self.lost = ""

    def call(self, method: str, **arguments: Any) -> list[Any]:
        return self.start(method, **arguments)()

    def start(self, method: str, wait_s: float = 0.0, /, **arguments: Any) -> Callable[[], list[Any]]:
        """Call all workers; what it returns waits for their answers, as `call` does: so long, or for 0 the deadline."""
        if self.lost:
            raise PeerFailedError("vLLM's workers", f"{self.lost}; make a new engine")
        number = next(self._numbers)
        text = json.dumps({"number": number, "method": method, "arguments": arguments})
        deadline_s = wait_s or self.deadline_s
        replies = self._form.call_workers(text, deadline_s)
        return lambda: self._read(number, method, self._wait(method, replies, deadline_s))

    def _wait(self, method: str, replies: "Future[list[str]]", deadline_s: float) -> list[str]:
        name = f"rollout-vllm.{method}"
        try:
            return replies.result(deadline_s + GRACE_S)
        except FutureTimeoutError as error:
            self.lost = f"{name} was not answered in {deadline_s:g} s"
            raise DeadlineError(name, "vLLM's workers", deadline_s) from error
        except Exception as error:
            self.lost = f"{name}: {error}"
            raise PeerFailedError("vLLM's workers", self.lost) from error

    def _read(self, number: int, method: str, texts: Sequence[str]) -> list[Any]:
        """Check that each worker has answered this call, and none has failed."""
        replies = [_parse(text) for text in texts]
        stale = [rank for rank, reply in enumerate(replies) if (reply["rank"], reply["number"]) != (rank, number)]
        if len(replies) != self.num_workers:
            self.lost = f"{method}: {self.num_workers} ranks must answer, {len(replies)} did"
        elif stale:
            self.lost = f"{method}: stale replies of rank {', '.join(map(str, stale))}, from a call that failed"
        if self.lost:
            raise PeerFailedError("vLLM's workers", f"{self.lost}; make a new engine")
        if failed := [reply for reply in replies if "error" in reply]:
            # One that failed by itself says more than those that heard of it.
            first = min(failed, key=lambda reply: reply.get("is_peers", False))
            text = f"vLLM's worker of rank {first['rank']} could not {method}: {first['error']}"
            raise WeightSyncError(text, is_peers=first.get("is_peers", False))
        return [reply.get("value") for reply in replies]


def _parse(text: object) -> dict[str, Any]:
    """Return a reply; one that is none of ours, and so from another call, as a reply to no call."""
    try:
        reply = json.loads(str(text))
        return reply if {"rank", "number"} <= reply.keys() else {"rank": None, "number": None}
    except (ValueError, AttributeError):
        return {"rank": None, "number": None}


class WorkerTraces:
    """Traces of one engine, one after the other, by vLLM's own profiler, which names steps by what is in them.

    Source: vllm 0.32.0, vllm/config/profiler.py (ProfilerConfig), vllm/v1/worker/gpu_worker.py (Worker.profile),
    vllm/profiler/wrapper.py (TorchProfilerWrapper: one file for each rank).

    Args:
        folder: where they are handed over; "" where none will be asked for.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._name = Path(folder).absolute(), f".vllm-{uuid.uuid4().hex}"
        self.arguments: dict[str, Any] = {"profiler_config": self._config()} if folder else {}
        """Arguments for vLLM's EngineArgs."""

    def _config(self) -> dict[str, Any]:
        """Stacks of Python cost more than all else; AsyncLLM's own part of the work is our own process's.

        Tables of what took longest are added up over the whole trace while nothing is sampled, and are not kept here.
        """
        return {
            "profiler": "torch",
            "torch_profiler_dir": str(self._folder / self._name),
            "torch_profiler_use_gzip": False,
            "torch_profiler_with_stack": False,
            "torch_profiler_dump_cuda_time_total": False,
            "ignore_frontend": True,
        }

    def begin(self, workers: Workers) -> None:
        workers.call("begin_trace")

    def end(self, workers: Workers) -> list[Path]:
        """Trace no further; a file for each rank. vLLM's folder, which on a CPU also holds such a table, goes."""
        written = [Path(path) for path in workers.call("end_trace")]
        taken = [self._folder / f"{self._name}-{rank}.partial" for rank in range(len(written))]
        for path, place in zip(written, taken, strict=True):
            path.replace(place)
        shutil.rmtree(self._folder / self._name)
        return taken
