"""Fixtures of the embedded engine.

A recording is made here of the operators that a step runs: they are run again on the same tensors, as a device with
graphs does. What a step would have taken from the host is then that of the step that was recorded.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offbeat_core import RolloutEngineConfig
from offbeat_device import open_device
from offbeat_rollout_torch import TorchRolloutEngine, _engine

OpenEngine = Callable[..., AbstractAsyncContextManager[TorchRolloutEngine]]


@pytest.fixture
def open_engine() -> OpenEngine:
    """An engine of the model in a folder, for a block of at most 90 s."""

    @asynccontextmanager
    async def opened(folder: Path, **settings: Any) -> AsyncIterator[TorchRolloutEngine]:
        settings = {"max_model_len": 512, **settings}
        config = RolloutEngineConfig(model_path=str(folder), device="cpu", **settings)
        async with asyncio.timeout(90):
            engine = await TorchRolloutEngine.create(config)
            try:
                yield engine
            finally:
                await engine.close()

    return opened


@pytest.fixture
def run(open_engine: OpenEngine) -> Callable[..., Awaitable[Any]]:
    """What `use(engine)` gives on an engine of its own."""

    async def run(folder: Path, use: Callable[[TorchRolloutEngine], Awaitable[Any]], **settings: Any) -> Any:
        async with open_engine(folder, **settings) as engine:
            return await use(engine)

    return run


class Recording(TorchDispatchMode):
    """The operators of some work, undone; `run` runs them on the same tensors."""

    def __init__(self, work):
        super().__init__()
        self.work, self.calls, self._made, self._before = work, [], set(), {}
        with self:
            work()
        for tensor, held in self._before.values():
            tensor.untyped_storage().copy_(held)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = str(operator)
        assert "_local_scalar_dense" not in name, "the host reads what a step has computed"
        assert "nonzero" not in name, "a shape depends on what a step has computed"
        for tensor in self._tensors(args):
            at = tensor.untyped_storage().data_ptr()
            if at not in self._made and at not in self._before:
                self._before[at] = tensor, tensor.untyped_storage().clone()
        out = operator(*args, **(kwargs or {}))
        self._made |= {each.untyped_storage().data_ptr() for each in self._tensors(out)} - self._before.keys()
        self.calls.append((operator, args, kwargs or {}, out))
        return out

    @staticmethod
    def _tensors(tree):
        return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor) and each.numel()]

    def run(self):
        for operator, args, kwargs, out in self.calls:
            again = operator(*args, **kwargs)
            for old, new in zip(self._tensors(out), self._tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class RecordingDevice:
    """The CPU as a device that records work, and lists what it was asked."""

    def __init__(self):
        self._cpu, self.events, self.recordings, self._numbers = open_device("cpu"), [], [], 0

    def __getattr__(self, name):
        return getattr(self._cpu, name)

    def work_graphs(self):
        return self

    def compiler_lacks(self):
        return "a recording here is one of operators"

    def record(self, work):
        recording = Recording(work)
        self.recordings.append(recording)

        def run():
            self.events.append("recorded step")
            recording.run()

        return run

    def copy_to_host(self, tensor):
        wait, self._numbers = self._cpu.copy_to_host(tensor), self._numbers + 1
        number = self._numbers
        self.events.append(f"copy {number}")

        def read():
            self.events.append(f"read {number}")
            return wait()

        return read


@pytest.fixture
def device(monkeypatch):
    opened = RecordingDevice()
    monkeypatch.setattr(_engine, "open_device", lambda name: opened)
    return opened
