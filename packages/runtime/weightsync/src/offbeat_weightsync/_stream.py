"""The engine's side of every transport: runs of bytes come in, tensors go out or into place, what is held is proved."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from offbeat_core import TensorSpec, WeightProof, WeightSyncError
from offbeat_weightsync._plan import DEFAULT_BUCKET_BYTES, BucketPlan, Piece
from offbeat_weightsync._sums.parts import HeldPart, PartSum, join_sums, sum_parts
from offbeat_weightsync._tensors import (
    Bytes,
    Checksum,
    TargetTensor,
    compare_proofs,
    describe_tensors,
    find_target,
    prove_tensors,
    torch_dtype,
)

Room = Callable[[Piece], Bytes | None]
"""Gives the place of a run of bytes in host memory; None: anywhere."""

Runs = Iterator[tuple[Piece, Tensor | None]]
"""Runs of bytes with the memory where each lies, valid until the next is asked for; None: it lies in its room."""

MAX_RUN_BYTES: Final = 8 << 20
"""Longest run: so short that neither side waits long for the other, so long that messages are rare."""


class ArrivingStream(ABC):
    """A `WeightStream` that arrives in runs of bytes. Transports say where these come from.

    Read it once: with `load` where the engine's own tensors have the planned dtypes, which saves a copy of every
    tensor longer than a run, or by iterating. Then `prove` and `confirm`.

    Args:
        plan: what will come.
        version: policy version.
    """

    _did: ClassVar = "took"

    def __init__(self, plan: BucketPlan, version: int) -> None:
        self.version, self.plan = version, plan
        self.checksum: Checksum = "xxh3"
        self._begun = self._confirmed = False
        self._sent: WeightProof | None = None

    @abstractmethod
    def _arrive(self, room: Room) -> Runs:
        """Yield every byte of the plan, in order. A caller that asks for the next run has loaded the one before."""

    @abstractmethod
    def _end(self) -> WeightProof:
        """Return what was sent, once all is loaded."""

    @abstractmethod
    def _notify(self, proof: WeightProof) -> None:
        """Send the engine's proof, and return when every receiver has proved the same."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in order, once. A tensor is valid until the next one is asked for: copy it."""
        assembly = _Assembly()
        for run, part in self._runs(lambda _: None):
            spec = self.plan.specs[run.tensor]
            assert part is not None  # as no run has a room
            elements = assembly.add(spec, run, part)
            if elements is not None:
                yield spec.name, elements.view(torch_dtype(spec.dtype)).view(spec.shape)

    def load(self, target: Callable[[str], Tensor]) -> None:
        """Write every tensor straight into the engine's own.

        Args:
            target: name -> the engine's tensor, on any device, of the planned dtype and number of elements, which
                are written in its row-major order. It may be a view of fused storage.

        Raises:
            WeightSyncError: the engine has no such tensor, or it has another dtype or size; the sender failed or died.
        """
        targets = [TargetTensor(find_target(target, spec)) for spec in self.plan.specs]
        assembly = _Assembly()
        for run, part in self._runs(lambda run: targets[run.tensor].room(run)):
            place = targets[run.tensor]
            if part is None:  # it was read into its place
                continue
            if place.is_contiguous:
                place.write(run, part)
            elif (whole := assembly.add(self.plan.specs[run.tensor], run, part)) is not None:
                # A tensor with strides has no one place for a run of bytes: it was put together first.
                place.tensor.copy_(whole.view(place.tensor.dtype).view(place.tensor.shape))

    def prove(self, read: Callable[[str], Any]) -> WeightProof:
        """Read every tensor back with `read(name)`, compare with what was sent, and return what is held.

        Raises:
            WeightSyncError: a tensor is missing or differs. The engine must not serve these weights.
        """
        return self._compared(lambda: prove_tensors(self.plan, self.version, read, checksum=self.checksum))

    def sum_parts(self, parts: Iterable[HeldPart]) -> list[PartSum]:
        """Sum what this process holds of the tensors, where several hold them together: see `join_sums`.

        Args:
            parts: read back now, as they serve; each is let go of before the next is asked for.

        Raises:
            WeightSyncError: a part is none of the tensors', or the sender proves by another checksum than "words".
        """
        if self.checksum != "words":
            raise WeightSyncError(
                f'parts of tensors are proved by the checksum "words", and the sender has "{self.checksum}": let one '
                "process receive for the whole engine"
            )
        return sum_parts(self.plan, parts)

    def join_sums(self, sums: Iterable[PartSum]) -> WeightProof:
        """Compare what all processes of an engine hold together with what was sent, and return it as `prove` does.

        Args:
            sums: of all of them, from `sum_parts`.

        Raises:
            WeightSyncError: something is missing or differs. The engine must not serve these weights.
        """
        return self._compared(lambda: join_sums(self.plan, self.version, sums))

    def _compared(self, prove: Callable[[], WeightProof]) -> WeightProof:
        if self._sent is None:
            raise WeightSyncError("read the whole weight stream before you prove what you hold")
        held = prove()
        compare_proofs(self.plan, self._sent, held, "the engine")
        return held

    def confirm(self, proof: WeightProof) -> None:
        """Say that the engine has proved these weights and serves them; return when every receiver has proved the same.

        Raises:
            WeightSyncError: the proof is wrong, or another receiver's is, or it failed.
            DeadlineError: no answer in time.
        """
        self._notify(proof)
        # Not before: `_notify` raises where another receiver has failed.
        self._confirmed = True

    def check_confirmed(self, name: str) -> None:
        """Raise WeightSyncError unless `confirm` has been called and has returned."""
        if not self._confirmed:
            raise WeightSyncError(f"{name} {self._did} the weights of version {self.version} but did not confirm them")

    def _runs(self, room: Room) -> Runs:
        if self._begun:
            raise WeightSyncError("a weight stream can be read once")
        self._begun = True
        yield from self._arrive(room)
        # Reached only when every run was taken: `prove` refuses a stream that was read in part.
        self._sent = self._end()


def read_runs(plan: BucketPlan, run_bytes: int, read: Callable[[Piece, int, memoryview], None], room: Room) -> Runs:
    """Every byte of a plan in runs of at most `run_bytes`, each read into its room, or where it has none into ours.

    `read` is called with a run, the index of its bucket, and the memory to fill.
    """
    # One memory for all runs: each is valid until the next is asked for.
    scratch = torch.empty(min(run_bytes, plan.longest_bucket_bytes), dtype=torch.uint8)
    for index, bucket in enumerate(plan.buckets):
        for piece in bucket.pieces:
            for run in piece.cut(run_bytes):
                target, part = room(run), scratch[: run.num_bytes]
                read(run, index, (part.numpy() if target is None else target).data)
                yield run, part if target is None else None


class _Assembly:
    """Puts split tensors together in memory of its own; whole ones pass through without a copy."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def add(self, spec: TensorSpec, run: Piece, part: Tensor) -> Tensor | None:
        """Take one run; return all bytes of the tensor when it was the last."""
        if run.num_bytes == spec.num_bytes:
            return part
        if self._buffer is None or self._buffer.numel() < spec.num_bytes:
            self._buffer = torch.empty(spec.num_bytes, dtype=torch.uint8, device=part.device)
        end = run.tensor_offset + run.num_bytes
        self._buffer[run.tensor_offset : end].copy_(part)
        return self._buffer[: spec.num_bytes] if end == spec.num_bytes else None


class InProcessStream:
    """A `WeightStream` over tensors at hand, for a receiver in the same process.

    Args:
        named_tensors: (name, tensor); names unique. The stream keeps the tensors, not copies of them.
        version: policy version.
        dtype: format handed out and proved for floating-point tensors, such as "bfloat16"; None keeps each one's own.
        keep: names of tensors that keep their own all the same: see `TrainEngine`.
        bucket_bytes: the proof has one checksum per bucket.

    Raises:
        WeightSyncError: see `BucketPlan.build`.
    """

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        version: int,
        *,
        dtype: str | None = None,
        keep: Container[str] = (),
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        pairs = list(named_tensors)
        self.version = version
        self.plan = BucketPlan.build(describe_tensors(pairs, dtype, keep=keep), bucket_bytes)
        self._tensors = dict(pairs)
        self._specs = {spec.name: spec for spec in self.plan.specs}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._specs:
            yield name, self._read(name)

    def load(self, target: Callable[[str], Tensor]) -> None:
        """Write every tensor straight into the engine's own; see `ArrivingStream.load`."""
        for name, tensor in self:
            place = find_target(target, self._specs[name])
            place.copy_(tensor.reshape(place.shape))

    def prove(self, read: Callable[[str], Any]) -> WeightProof:
        """Read every tensor back and compare it with what was handed out.

        Raises:
            WeightSyncError: a tensor is missing or differs.
        """
        sent = prove_tensors(self.plan, self.version, self._read, "the trainer")
        held = prove_tensors(self.plan, self.version, read)
        compare_proofs(self.plan, sent, held, "the engine")
        return held

    def _read(self, name: str) -> Tensor:
        return self._tensors[name].detach().to(torch_dtype(self._specs[name].dtype))
