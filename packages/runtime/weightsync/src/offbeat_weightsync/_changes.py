"""Changes alone: which elements of a tensor differ from those that travelled last, and what they are now.

At the learning rates of reinforcement learning most elements of bfloat16 weights stay as they are in a step, which is
shorter than half the distance between two neighbours of the format. What is compared are bits, so nothing is lost.

Shapes: E elements of a run, K of them changed.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_core import TensorSpec, WeightProof, WeightSyncError
from offbeat_weightsync._plan import Bucket, BucketPlan, Piece
from offbeat_weightsync._tensors import RUN_BYTES, Bytes, PlannedTensors, tensor_bytes, torch_dtype

Bits = npt.NDArray[np.unsignedinteger]
Coding = Literal["same", "gaps", "mask", "all"]
"""Form in which a run travels: not at all; for each changed element, 16 bit, how many before it are as they were; one
bit for each element; all elements. The new values of the changed elements follow. The shortest is used."""

_LONGEST_GAP: Final = 1 << 16


class CodedRun(NamedTuple):
    """The changes in a run of bytes of one tensor."""

    coding: Coding
    num_changed: int
    data: bytes = b""


def encode_run(old: Bits, new: Bits) -> CodedRun:
    """Say how `new` [E] differs from `old` [E]."""
    is_changed = old != new
    num_changed = int(np.count_nonzero(is_changed))
    if not num_changed:
        return CodedRun("same", 0)
    gapped, masked = num_changed * (2 + new.itemsize), -(-len(new) // 8) + num_changed * new.itemsize
    if min(gapped, masked) >= new.nbytes:
        return CodedRun("all", len(new), new.tobytes())
    if masked < gapped:
        return CodedRun("mask", num_changed, np.packbits(is_changed).tobytes() + new[is_changed].tobytes())
    where_K = _with_steps(np.flatnonzero(is_changed))
    gaps = (np.diff(where_K, prepend=-1) - 1).astype("<u2")
    return CodedRun("gaps", len(where_K), gaps.tobytes() + new[where_K].tobytes())


def _with_steps(where_K: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Places with others between them, so that no gap is too long: what lies there is sent although it is the same."""
    if np.diff(where_K, prepend=-1).max() <= _LONGEST_GAP:
        return where_K
    return np.union1d(where_K, np.arange(_LONGEST_GAP - 1, where_K[-1], _LONGEST_GAP))


def decode_run(values: Bits, coding: str, num_changed: int, data: memoryview) -> int:
    """Write what has changed into `values` [E], and return how many bytes of `data` said it.

    Raises:
        WeightSyncError: it says something that cannot be.
    """
    size = values.itemsize
    index_bytes = {"gaps": 2 * num_changed, "mask": -(-len(values) // 8)}.get(coding, 0)
    num_bytes = index_bytes + num_changed * size
    if num_changed > len(values) or num_bytes > len(data):
        raise WeightSyncError(f"changes of {num_changed} elements came for a run of {len(values)}")
    new_K = np.frombuffer(data[index_bytes:num_bytes], values.dtype)
    if coding == "all" and num_changed == len(values):
        np.copyto(values, new_K)
    elif coding == "mask":
        is_changed = np.unpackbits(np.frombuffer(data[:index_bytes], np.uint8), count=len(values)).view(np.bool_)
        if np.count_nonzero(is_changed) != num_changed:
            raise WeightSyncError(f"a mask of other than {num_changed} changed elements came")
        values[is_changed] = new_K
    elif coding == "gaps":
        where_K = np.cumsum(np.frombuffer(data[:index_bytes], "<u2").astype(np.intp) + 1) - 1
        if where_K[-1] >= len(values):
            raise WeightSyncError(f"a change of element {where_K[-1]} came for a run of {len(values)}")
        values[where_K] = new_K
    elif num_changed:
        raise WeightSyncError(f"changes of {num_changed} elements came as {coding!r}")
    return num_bytes


class WeightCopy:
    """The weights that travelled last, kept at either side to send, or to apply, what has changed since.

    It takes as many bytes of main memory as they have. Give a sender and each receiver one of their own, to keep from
    one version to the next; after a failure it is not relied on, and all weights travel anew.

    Args:
        max_changes: so many syncs may bring changes alone after one that brought all weights; the sender's counts.
    """

    def __init__(self, max_changes: int = 0) -> None:
        self._max_changes, self._num_changes = max_changes, 0
        self._plan: BucketPlan | None = None
        self._specs: dict[str, TensorSpec] = {}
        self._held: dict[str, Tensor] = {}
        self.digest = ""  # of what it holds; empty while that may be anything

    def can_change(self, plan: BucketPlan) -> bool:
        """Return whether changes to what is held may travel, rather than all of it."""
        return bool(self.digest) and self._plan == plan and self._num_changes < self._max_changes

    def begin(self, plan: BucketPlan, *, changes: bool) -> None:
        """Note that what is held is about to become another version."""
        self.digest = ""
        self._num_changes = self._num_changes + 1 if changes else 0
        if self._plan != plan:
            self._plan, self._specs = plan, {spec.name: spec for spec in plan.specs}
            self._held = {spec.name: torch.empty(spec.num_bytes, dtype=torch.uint8) for spec in plan.specs}

    def finish(self, sent: WeightProof) -> None:
        """Every receiver has proved this."""
        assert self._plan is not None
        text = f"{self._plan.digest} {' '.join(sent.checksums)}"
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:32]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in the dtype and shape that are planned for it: the copy's own memory."""
        spec = self._specs[name]
        return self._held[name].view(torch_dtype(spec.dtype)).view(spec.shape)

    def kept(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Copy tensors on their way; what the plan does not know passes as it is, to be refused where it is checked."""
        for name, tensor in tensors:
            if name in self._specs and tuple(tensor.shape) == self._specs[name].shape:
                yield name, self.tensor(name).copy_(tensor.detach())
            else:
                yield name, tensor

    def run(self, piece: Piece) -> Tensor:
        """[bytes] uint8: its memory of a run."""
        assert self._plan is not None
        held = self._held[self._plan.specs[piece.tensor].name]
        return held[piece.tensor_offset : piece.tensor_offset + piece.num_bytes]

    def bits(self, run: Piece) -> Bits:
        """[E] unsigned integers: the bits of a run's elements, to be written too."""
        assert self._plan is not None
        return tensor_bytes(self.run(run)).view(_bits_dtype(self._plan, run))


def runs_of(bucket: Bucket) -> Iterator[Piece]:
    """Yield the runs in which changes of a bucket are sent; as `PlannedTensors.runs` cuts them."""
    for piece in bucket.pieces:
        yield from piece.cut(RUN_BYTES)


def coded_buckets(plan: BucketPlan, source: PlannedTensors, copy: WeightCopy) -> Iterator[list[CodedRun]]:
    """Yield what has changed, bucket by bucket; the copy follows."""
    for bucket in plan.buckets:
        coded = []
        for run, data in source.runs(bucket):
            held = copy.bits(run)
            new = np.frombuffer(data, held.dtype)
            coded.append(encode_run(held, new))
            if coded[-1].num_changed:
                np.copyto(held, new)
        yield coded


def _bits_dtype(plan: BucketPlan, run: Piece) -> np.dtype[np.unsignedinteger]:
    return np.dtype(f"u{torch_dtype(plan.specs[run.tensor].dtype).itemsize}")


def apply_bucket(bucket: Bucket, changes: list[tuple[str, int]], data: Bytes, copy: WeightCopy) -> None:
    """Write what has changed in a bucket into the copy.

    Raises:
        WeightSyncError: the changes are of other runs, or have other bytes.
    """
    runs, rest = list(runs_of(bucket)), data.data
    if len(runs) != len(changes):
        raise WeightSyncError(f"changes of {len(changes)} runs came for a bucket of {len(runs)}")
    for run, (coding, num_changed) in zip(runs, changes, strict=True):
        rest = rest[decode_run(copy.bits(run), coding, num_changed, rest) :]
    if rest:
        raise WeightSyncError(f"{len(rest)} bytes of changes are left over")
