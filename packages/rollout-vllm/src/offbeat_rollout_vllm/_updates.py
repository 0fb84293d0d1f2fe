"""Reads the trainer's tensors back from the workers that hold them: what a stream's proof is computed from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from offbeat_rollout_vllm._arena import Arena, aligned
from offbeat_rollout_vllm._workers import Workers
from offbeat_types import WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor


SCALES: Final = ".weight_scale_inv"


@dataclass(frozen=True)
class Part:
    """Where a rank's part lies within the whole tensor: (start, size) of each of its runs along `dim`."""

    shape: tuple[int, ...]
    dim: int
    pieces: tuple[tuple[int, int], ...]


class Readback:
    """A function from a tensor's name to what the engine holds, put together from all ranks.

    Tensors are fetched in the order in which they came, as many at a time as the arena holds.

    Args:
        workers: of the engine.
        dtype: number format of the engine, as torch names it.
        reserve: gives an arena of at least a number of bytes.
        adapter: vLLM's number of the adapter whose tensors they are; 0: the model's own.
    """

    def __init__(self, workers: Workers, dtype: str, reserve: Callable[[int], Arena], adapter: int = 0) -> None:
        self._workers, self._dtype, self._reserve, self._adapter = workers, dtype, reserve, adapter
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._tiny: dict[str, tuple[Tensor, Tensor]] = {}
        self._parts: dict[str, list[Part]] = {}
        self._fetched: dict[str, Tensor] = {}

    def expect(self, name: str, tensor: "Tensor") -> None:
        """Note that `tensor` was sent, and which of its elements no product shows."""
        self._shapes[name] = tuple(tensor.shape)
        self._dtypes[name] = self._held_dtype(name, tensor)
        where = tiny_elements(tensor)
        if where is not None and str(tensor.dtype) == f"torch.{self._dtype}":
            self._tiny[name] = where, tensor.flatten()[where].clone()

    def __call__(self, name: str) -> "Tensor":
        """What the engine holds, whole, in the trainer's shape.

        Raises:
            WeightSyncError: a worker cannot read it back, or ranks that hold the same part differ.
        """
        if name not in self._fetched:
            if name not in self._shapes:
                raise KeyError(name)
            self._fetch(self._batch(name))
        return self._fetched.pop(name)

    def _batch(self, first: str) -> list[str]:
        """The name asked for, and those that came after it, as long as they fit."""
        if not self._parts:
            names = list(self._shapes)
            answers = self._workers.call("locate", names=names, adapter=self._adapter)
            self._parts = {
                name: [
                    Part(tuple(shape), dim, tuple((start, size) for start, size in pieces))
                    for shape, dim, pieces in (one[index] for one in answers)
                ]
                for index, name in enumerate(names)
            }
        room = self._reserve(self._num_bytes(first)).num_bytes
        batch: list[str] = []
        names = list(self._shapes)
        for name in names[names.index(first) :]:
            room -= self._num_bytes(name)
            if room < 0:
                break
            batch.append(name)
        return batch

    def _num_bytes(self, name: str) -> int:
        """What all parts of a tensor take in the arena."""
        return sum(aligned(self._size(name, part)) for part in self._parts[name])

    def _size(self, name: str, part: Part) -> int:
        import math

        import torch

        number_format: torch.dtype = getattr(torch, self._dtypes[name])
        return math.prod(part.shape) * number_format.itemsize

    def _held_dtype(self, name: str, tensor: "Tensor") -> str:
        """FP8 blocks and their scales are held as they came, all else in the engine's format."""
        came = str(tensor.dtype).removeprefix("torch.")
        return came if came == "float8_e4m3fn" or name.endswith(SCALES) else self._dtype

    def _fetch(self, names: list[str]) -> None:
        offsets: list[list[tuple[str, int]]] = [[] for _ in range(self._workers.num_workers)]
        used = 0
        for name in names:
            for rank, part in enumerate(self._parts[name]):
                offsets[rank].append((name, used))
                used += aligned(self._size(name, part))
        self._workers.call("read", tensors=offsets, adapter=self._adapter)
        arena = self._reserve(0)
        self._fetched = {}
        for index, name in enumerate(names):
            parts = [
                (part, arena.tensor(offsets[rank][index][1], self._dtypes[name], part.shape))
                for rank, part in enumerate(self._parts[name])
            ]
            self._fetched[name] = self._restore(name, self._join(name, parts))

    def _join(self, name: str, parts: "list[tuple[Part, Tensor]]") -> "Tensor":
        """The whole, from the parts of all ranks; those that several hold must be the same."""
        import torch

        whole = torch.empty(self._shapes[name], dtype=parts[0][1].dtype)
        seen = set[tuple[int, int]]()
        covered = 0
        for part, held in parts:
            if not part.shape:
                whole.copy_(held)
                return whole
            offset = 0
            for start, size in part.pieces:
                piece, offset = held.narrow(part.dim, offset, size), offset + size
                target = whole.narrow(part.dim, start, size)
                if (part.dim, start) not in seen:
                    seen.add((part.dim, start))
                    covered += piece.numel()
                    target.copy_(piece)
                elif not torch.equal(target.contiguous().view(torch.uint8), piece.contiguous().view(torch.uint8)):
                    raise WeightSyncError(f"{name}: ranks that hold the same part of it hold different numbers")
        if covered != whole.numel():
            raise WeightSyncError(f"{name}: the ranks hold {covered} of its {whole.numel()} numbers")
        return whole

    def _restore(self, name: str, held: "Tensor") -> "Tensor":
        """Numbers that no product shows, where they read as zero, as they were sent."""
        import torch

        if name in self._tiny:
            where, sent = self._tiny[name]
            flat = held.view(-1)
            small = flat[where].abs() < torch.finfo(held.dtype).tiny
            flat[where] = torch.where(small, sent, flat[where])
        return held


def tiny_elements(tensor: Any) -> "Tensor | None":
    """Flat indices of elements that are a negative zero or below the smallest normal number; None: there are none."""
    import torch

    exponents = {
        torch.float32: (torch.int32, 0x7F800000),
        torch.bfloat16: (torch.int16, 0x7F80),
        torch.float16: (torch.int16, 0x7C00),
    }
    if tensor.dtype not in exponents or not tensor.numel():
        return None
    bits_dtype, exponent = exponents[tensor.dtype]
    bits = tensor.contiguous().view(-1).view(bits_dtype)
    where = ((bits & exponent == 0) & (bits != 0)).nonzero().flatten()
    return where.cpu() if where.numel() else None
