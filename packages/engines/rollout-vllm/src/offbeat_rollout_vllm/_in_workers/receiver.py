"""Runs in vLLM's workers: each receives a version by itself, on its own device, and proves there what it holds.

A sync takes two calls to the workers. In the first each joins the sender, loads the stream, and answers with the sums
of the parts that it holds. The second brings each of them the sums of all, which it joins, compares and confirms: every
worker proves the whole engine to the sender, and waits for others in its connection alone, which has a deadline.

On a CPU packed weights show neither the sign of a zero nor numbers below the smallest normal one
(`weights`). A version with such numbers is held but not proved there: workers on CPUs receive in tests only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from offbeat_core import TensorSpec, WeightStream, WeightSyncError
from offbeat_rollout_vllm._in_workers.weights import HeldWeights, check_exact, dtype_name
from offbeat_rollout_vllm._mxfp4 import served_folder
from offbeat_rollout_vllm._updates import UnstackedStream, checked_tensors, shown_dtype
from offbeat_weightsync import HeldPart, PartSum, Transport, open_transport


class WeightLoading(Protocol):
    """The steps in which vLLM loads new weights into one worker: see `WorkerSide`."""

    def begin(self) -> None: ...

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None: ...

    def copy_kept(self, is_reused: Callable[[Tensor], bool]) -> None: ...

    def finish(self) -> None: ...

    def abandon(self) -> None: ...

    def check_heads(self) -> None: ...


class WorkerReceiver:
    """One worker as a receiver of its own. It keeps its side of a transport from sync to sync.

    Args:
        loading: of the worker.
        held: its weights.
        rank: of the worker in its engine.
        device: of the worker, by name.
        model_path: folder of the model, which says what a version must bring.

    Attributes:
        touched: whether anything of the last version was written.
    """

    def __init__(self, loading: WeightLoading, held: HeldWeights, rank: int, device: str, model_path: str) -> None:
        self._loading, self._held, self._rank, self._device = loading, held, rank, device
        self._folder = served_folder(model_path)
        self._transports: dict[str, Transport] = {}
        self._open = ExitStack()
        self.touched = False

    def receive(
        self, transport: str, addresses: Sequence[str], version: int, deadline_s: float, name: str
    ) -> list[PartSum]:
        """Load a version from the sender at this worker's address; return the sums of what is held of it then."""
        self.touched = False
        with ExitStack() as stack:
            address = addresses[self._rank]
            worker = self._rank, [rank for rank, other in enumerate(addresses) if other == address]
            incoming = self._transport(transport).receive(address, version, deadline_s, name=name, worker=worker)
            stream = stack.enter_context(incoming)
            unstacked = UnstackedStream(_LoadedStream(stream, self._loading.copy_kept), self._folder)
            self._load(checked_tensors(unstacked, self._folder, f"weight stream of version {version}"))
            specs = stream.plan.specs
            sums = stream.sum_parts(part for spec in specs for part in held_parts(self._held, unstacked, spec))
            self._held.forget()
            self._stream, self._open = stream, stack.pop_all()
        return sums

    def confirm(self, sums: Iterable[Sequence[Any]]) -> list[Any]:
        """Join the sums of all workers, compare them with what was sent, and confirm it.

        Returns:
            Number of tensors and checksums of the proof.
        """
        with self._open:
            parts = (PartSum(name, tuple(first), tuple(shape), tuple(each)) for name, first, shape, each in sums)
            proof = self._stream.join_sums(parts)
            self._stream.confirm(proof)
        return [proof.num_tensors, proof.checksums]

    def give_up(self, reason: str) -> None:
        """Tell the sender why a version that was loaded is not confirmed; without effect where none is open."""
        with suppress(WeightSyncError), self._open:
            raise WeightSyncError(reason)

    def _transport(self, name: str) -> Transport:
        if name not in self._transports:
            transport = open_transport(name, self._device)
            transport.get_ready()
            self._transports[name] = transport
        return self._transports[name]

    def _load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        # What fails before the first tensor is here leaves the old version as it was.
        first = next(tensors)
        self.touched = True
        self._loading.begin()
        try:
            self._loading.load_weights(chain([first], tensors))
            self._loading.finish()
        except BaseException:
            self._loading.abandon()
            raise
        self._loading.check_heads()


def held_parts(held: HeldWeights, stream: UnstackedStream, spec: TensorSpec) -> Iterator[HeldPart]:
    """Yield what a worker holds of one of the trainer's tensors, in the format in which it came.

    Args:
        held: weights of the worker.
        stream: that the tensor came from.
        spec: of the tensor.
    """
    for corner, matrix in stream.matrices(spec.name):
        location, tensor = held.find(matrix), held.read(matrix)
        shown = tensor.to(getattr(torch, shown_dtype(spec.dtype, dtype_name(tensor.dtype))))
        check_exact(matrix, tensor, shown)
        if not shown.dim():
            yield HeldPart(spec.name, (), shown)
            continue
        dim, offset = location.dim, 0
        if corner:
            shown, dim = shown[None], dim + 1
        for start, size in location.pieces:
            first = [*corner] or [0] * shown.dim()
            first[dim] += start
            yield HeldPart(spec.name, tuple(first), shown.narrow(dim, offset, size))
            offset += size


class _LoadedStream:
    """The same stream; before the next tensor is asked for, what vLLM has kept of the last one is copied."""

    def __init__(self, stream: WeightStream, copy_kept: Callable[[Callable[[Tensor], bool]], None]) -> None:
        self._stream, self._copy_kept, self.version = stream, copy_kept, stream.version
        self.prove = stream.prove

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._stream:
            yield name, tensor
            self._copy_kept(partial(_shares_memory, tensor))


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
