"""The receiving half of every transport: windows come in, tensors go out or into place, and what is held is proved."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat_types import TensorSpec, WeightProof, WeightSyncError
from offbeat_weightsync._places import Place, find_target
from offbeat_weightsync._plan import BucketPlan, Piece
from offbeat_weightsync._proofs import compare_proofs, prove_tensors
from offbeat_weightsync._tensors import torch_dtype
from offbeat_weightsync._windows import Window


class ArrivingStream:
    """A `WeightStream` that arrives window by window. Transports say where the windows come from.

    Read it once: with `load` where the engine's own tensors have the planned dtypes, which saves a copy of every
    tensor longer than a window, or by iterating. Then `prove`.

    Args:
        plan: what will come.
        version: policy version.
        windows: in which it comes.
    """

    def __init__(self, plan: BucketPlan, version: int, windows: Sequence[Window]) -> None:
        self.version, self.plan, self._windows = version, plan, windows
        self._begun = False
        self._places: list[Place] = []
        self._sent: WeightProof | None = None

    @abstractmethod
    def _arrivals(self) -> Iterator[Tensor]:
        """Memory in which a window lies, [bytes] uint8, for each in order. Whoever asks for the next has loaded it."""

    @abstractmethod
    def _end(self) -> WeightProof:
        """What was sent, once all windows are loaded."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in order, once. A tensor is valid until the next one is asked for: copy it."""
        assembly = _Assembly()
        for piece, part in self._pieces():
            spec = self.plan.specs[piece.tensor]
            elements = assembly.add(spec, piece, part)
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
        assembly = _Assembly()
        index, place = -1, Place(torch.empty(0))
        for piece, part in self._pieces():
            spec = self.plan.specs[piece.tensor]
            if piece.tensor != index:
                index, place = piece.tensor, Place(find_target(target, spec))
            if place.is_in_a_row:
                place.write(piece.tensor_offset, part)
            elif (whole := assembly.add(spec, piece, part)) is not None:
                place.tensor.copy_(whole.view(place.tensor.dtype).view(place.tensor.shape))

    def prove(self, read: Callable[[str], Any]) -> WeightProof:
        """Read every tensor back with `read(name)`, compare with what was sent, and return what is held.

        Raises:
            WeightSyncError: a tensor is missing or differs. The engine must not serve these weights.
        """
        if self._sent is None:
            raise WeightSyncError("read the whole weight stream before you prove what you hold")
        held = prove_tensors(self.plan, self.version, read, places=self._places)
        compare_proofs(self.plan, self._sent, held, "the engine")
        return held

    def _begin(self) -> None:
        if self._begun:
            raise WeightSyncError("a weight stream can be read once")
        self._begun = True

    def _pieces(self) -> Iterator[tuple[Piece, Tensor]]:
        """Every piece of every window with its bytes."""
        self._begin()
        arrivals = self._arrivals()
        for window in self._windows:
            memory = next(arrivals)
            for piece in window.pieces:
                yield piece, memory[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
        if next(arrivals, None) is not None:
            raise WeightSyncError("more came than the plan has")
        self._sent = self._end()


class _Assembly:
    """Puts split tensors together in memory of its own; whole ones pass through without a copy."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def add(self, spec: TensorSpec, piece: Piece, part: Tensor) -> Tensor | None:
        """Take one piece; return all bytes of the tensor when it was the last."""
        if piece.num_bytes == spec.num_bytes:
            return part
        if self._buffer is None or self._buffer.numel() < spec.num_bytes:
            self._buffer = torch.empty(spec.num_bytes, dtype=torch.uint8, device=part.device)
        end = piece.tensor_offset + piece.num_bytes
        self._buffer[piece.tensor_offset : end].copy_(part)
        return self._buffer[: spec.num_bytes] if end == spec.num_bytes else None
