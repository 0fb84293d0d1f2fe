"""Engine processes for the tests: each serves the stand-in over HTTP, behind the adapter's own application."""

import asyncio
import base64
import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import trtllm_standin
from torch import Tensor

from offbeat_core import RolloutEngineConfig
from offbeat_rollout_trtllm._handles import Packed
from offbeat_rollout_trtllm._server_link import HttpEngine
from offbeat_rollout_trtllm.serve import serve

# Forked from the test process, which has imported torch.
PROCESSES = multiprocessing.get_context("fork")


class HostHandles:
    """Handles of tensors in a file, in place of CUDA IPC: another process really opens them.

    Args:
        folder: for the files.
        index: of the worker.
    """

    def __init__(self, folder: Path, index: int) -> None:
        self.device_id = f"GPU-standin-{index}"
        self._folder = folder

    def pack(self, tensors: Sequence[tuple[str, Tensor]]) -> Packed:
        descriptor, name = tempfile.mkstemp(dir=self._folder)
        described, start = [], 0
        with os.fdopen(descriptor, "wb") as file:
            for key, tensor in tensors:
                content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                file.write(content)
                dtype = str(tensor.dtype).removeprefix("torch.")
                described.append([key, dtype, list(tensor.shape), start, len(content)])
                start += len(content)
        text = base64.b64encode(json.dumps({"file": name, "tensors": described}).encode()).decode()
        return Packed(text, tuple(tensor for _, tensor in tensors))


def open_in(folder: Path, device_ids: Sequence[str]) -> list[HostHandles]:
    """Handles in files of a folder for each worker, in place of `open_cuda_handles`."""
    return [HostHandles(folder, int(device_id.rpartition("-")[2])) for device_id in device_ids]


class EngineProcess:
    """A server of the stand-in in a process of its own.

    Args:
        model: folder of the model; one that is not there serves no tokens, only weights.
        num_workers: ranks of the engine.
        options: of the engine.
    """

    def __init__(self, model: str, num_workers: int, **options: Any) -> None:
        mine, theirs = PROCESSES.Pipe(duplex=False)
        self._process = PROCESSES.Process(target=_serve, args=(theirs, model, num_workers, options), daemon=True)
        self._process.start()
        theirs.close()
        assert mine.poll(60), "the engine does not start"
        self.address = f"127.0.0.1:{mine.recv()}"

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Speak to it as the adapter does."""
        return ask(self.address, method, path, body)

    def stop(self) -> None:
        self._process.kill()
        self._process.join(10)


def ask(address: str, method: str, path: str, body: Any = None) -> Any:
    """Speak to an engine, whether or not this thread has an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, HttpEngine(address, deadline_s=20).call(method, path, body)).result()


def set_faults(address: str, **faults: Any) -> None:
    ask(address, "POST", "/standin/faults", faults)


def record_of(address: str) -> Any:
    return ask(address, "GET", "/standin/record")


def _serve(port: Any, model: str, num_workers: int, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    trtllm_standin.install()
    trtllm_standin.Server.listening = staticmethod(port.send)
    config = RolloutEngineConfig(model_path=model, tensor_parallel=num_workers, options=options)
    asyncio.run(serve(config, port=0))
