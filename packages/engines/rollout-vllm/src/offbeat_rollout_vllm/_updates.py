"""A weight update: from a stream, through the arena, into the workers; and the proof of what they hold then.

The arena has two halves: while the workers load one, the other is filled. Runs in a thread of its own, because a stream
waits for its trainer. transformers loads the experts of a layer into two tensors, `experts.gate_up_proj` [experts, gate
and up rows, in] and `experts.down_proj` [experts, out, in], and saves each matrix by itself again.

Source: transformers 5.19.0, transformers/conversion_mapping.py ("qwen2_moe", which "qwen3_moe" and others share).
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from offbeat_core import ExpectedTensors, ModelFolder, OffbeatError, WeightProof, WeightStream, WeightSyncError
from offbeat_rollout_vllm._workers import Arena, Workers, aligned

if TYPE_CHECKING:
    from torch import Tensor


PARTS: Final = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}


class UnstackedStream:
    """A `WeightStream` whose stacks of experts are handed out matrix by matrix; the proof is of the stacks."""

    def __init__(self, stream: WeightStream, folder: ModelFolder) -> None:
        self._stream, self._folder, self.version = stream, folder, stream.version
        self._stacks: dict[str, tuple[int, ...]] = {}

    def __iter__(self) -> "Iterator[tuple[str, Any]]":
        import torch

        for name, value in self._stream:
            if len(value.shape) != 3 or not _parts(name) or self._folder.shape_of(name) is not None:
                yield name, value
                continue
            self._stacks[name] = tuple(value.shape)
            for expert, matrix in enumerate(torch.as_tensor(value)):
                names = _names(name, expert)
                yield from zip(names, matrix.chunk(len(names)), strict=True)

    def prove(self, read: "Callable[[str], Tensor]") -> WeightProof:
        """See `WeightStream.prove`; `read` knows matrices alone."""
        import torch

        def read_whole(name: str) -> "Tensor":
            if name not in self._stacks:
                return read(name)
            experts = range(self._stacks[name][0])
            return torch.stack([torch.cat([read(part) for part in _names(name, expert)]) for expert in experts])

        return self._stream.prove(read_whole)

    def matrices(self, name: str) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield each matrix of a tensor that came, with the index in the stack of its first element.

        What is no stack is its own matrix, without an index.
        """
        if name not in self._stacks:
            yield (), name
            return
        num_experts, num_rows, _ = self._stacks[name]
        for expert in range(num_experts):
            parts = _names(name, expert)
            for index, part in enumerate(parts):
                yield (expert, index * num_rows // len(parts), 0), part


def _parts(name: str) -> tuple[str, ...]:
    """Return the matrices of an expert that a stack of this name holds; none: it is no stack."""
    return next((parts for suffix, parts in PARTS.items() if name.endswith(suffix)), ())


def _names(name: str, expert: int) -> list[str]:
    return [f"{name.rpartition('.')[0]}.{expert}.{part}.weight" for part in _parts(name)]


def matrices_of(name: str, folder: ModelFolder) -> list[str]:
    """Return the folder's tensors that a tensor of transformers is made of, in order; none where it has none of it."""
    if folder.shape_of(name) is not None:
        return [name]
    found = list[str]()
    while (parts := _names(name, len(found) // max(1, len(_parts(name))))) and folder.shape_of(parts[0]) is not None:
        found += parts
    return found


@dataclass(frozen=True)
class Part:
    """Place of a rank's part within the whole tensor, (start, size) of each run along `dim`, and its dtype."""

    shape: tuple[int, ...]
    dim: int
    pieces: tuple[tuple[int, int], ...]
    dtype: str


class Readback:
    """A function from a tensor's name to what the engine holds, put together from all ranks.

    Tensors are fetched in the order in which they came, as many at a time as the arena holds.

    Args:
        workers: of the engine.
        dtype: number format of the engine, as torch names it.
        reserve: gives an arena of at least a number of bytes.
        on_cpu: the workers are CPUs, whose packed products show a negative zero or subnormal number as zero.
        adapter: vLLM's number of the adapter whose tensors they are; 0: the model's own.
    """

    def __init__(
        self, workers: Workers, dtype: str, reserve: Callable[[int], Arena], *, on_cpu: bool, adapter: int = 0
    ) -> None:
        self._workers, self._dtype, self._reserve, self._adapter = workers, dtype, reserve, adapter
        self._on_cpu = on_cpu
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._tiny: dict[str, tuple[Tensor, Tensor]] = {}
        self._parts: dict[str, list[Part]] = {}
        self._fetched: dict[str, Tensor] = {}

    def expect(self, name: str, tensor: "Tensor") -> None:
        """Note that `tensor` was sent, and on CPUs which of its elements no product shows."""
        import torch

        self._shapes[name] = tuple(tensor.shape)
        self._dtypes[name] = str(tensor.dtype).removeprefix("torch.")
        if not self._on_cpu or not tensor.is_floating_point():
            return
        where = tiny_elements(tensor.to(getattr(torch, self._dtype)))  # as a packed product holds it
        if where is not None:
            # To the host: a stream's tensors may be on the trainer's device, and what is read back is in the arena.
            self._tiny[name] = where.cpu(), tensor.flatten()[where].cpu()

    def __call__(self, name: str) -> "Tensor":
        """Return what the engine holds, whole, in the trainer's shape."""
        if name not in self._fetched:
            if name not in self._shapes:
                raise KeyError(name)
            self._fetch(self._batch(name))
        return self._fetched.pop(name)

    def _batch(self, first: str) -> list[str]:
        """Return the name asked for, and those that came after it, as long as they fit."""
        if not self._parts:
            names = list(self._shapes)
            answers = self._workers.call("locate", names=names, adapter=self._adapter)
            self._parts = {
                name: [
                    Part(tuple(shape), dim, tuple((start, size) for start, size in pieces), dtype)
                    for shape, dim, pieces, dtype in (one[index] for one in answers)
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
        return sum(aligned(self._size(name, part)) for part in self._parts[name])

    def _size(self, name: str, part: Part) -> int:
        return math.prod(part.shape) * _item_size(self._shown_dtype(name, part))

    def _shown_dtype(self, name: str, part: Part) -> str:
        return shown_dtype(self._dtypes[name], part.dtype)

    def _fetch(self, names: list[str]) -> None:
        offsets: list[list[tuple[str, int, str]]] = [[] for _ in range(self._workers.num_workers)]
        used = 0
        for name in names:
            for rank, part in enumerate(self._parts[name]):
                offsets[rank].append((name, used, self._shown_dtype(name, part)))
                used += aligned(self._size(name, part))
        self._workers.call("read", tensors=offsets, adapter=self._adapter)
        arena = self._reserve(0)
        self._fetched = {}
        for index, name in enumerate(names):
            parts = [
                (part, arena.tensor(*offsets[rank][index][1:], part.shape))
                for rank, part in enumerate(self._parts[name])
            ]
            self._fetched[name] = self._restore(name, self._join(name, parts))

    def _join(self, name: str, parts: "list[tuple[Part, Tensor]]") -> "Tensor":
        """Return the whole, from the parts of all ranks; those that several hold must be the same."""
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
            # The smaller bound: what FP8 holds below its own smallest normal number does show. It compares as float32.
            tiny = min(torch.finfo(dtype).tiny for dtype in (held.dtype, getattr(torch, self._dtype)))
            small = flat[where].float().abs() < tiny
            flat[where] = torch.where(small, sent.to(held.dtype), flat[where])
        return held


def shown_dtype(came: str, held: str) -> str:
    """Return the format to read in: that in which it is held, or if that is wider the one in which it came.

    A router's correction bias is held in float32, and so it comes; its matrix some models hold in float32, though
    it comes in the engine's format. What is not held as finely as it came shows, and is no proof.
    """
    return came if _item_size(came) < _item_size(held) else held


def _item_size(dtype: str) -> int:
    import torch

    number_format: torch.dtype = getattr(torch, dtype)
    return number_format.itemsize


def tiny_elements(tensor: Any) -> "Tensor | None":
    """Return flat indices of negative zeros and subnormal numbers, on the tensor's device; None: there are none."""
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
    return where if where.numel() else None


class FolderStream:
    def __init__(self, read: "Callable[[], Iterable[tuple[str, Tensor]]]", version: int) -> None:
        self._read, self.version = read, version

    def __iter__(self) -> "Iterator[tuple[str, Tensor]]":
        yield from self._read()

    def prove(self, read: "Callable[[str], Tensor]") -> WeightProof:
        import torch

        digest, count = hashlib.blake2b(digest_size=8), 0
        for name, tensor in self:
            held = read(name).contiguous()
            sent = tensor.to(held.dtype).contiguous()
            if not torch.equal(held.flatten().view(torch.uint8), sent.flatten().view(torch.uint8)):
                raise WeightSyncError(f"the engine holds other numbers than the folder's in {name}")
            digest.update(name.encode() + held.flatten().view(torch.uint8).numpy().tobytes())
            count += 1
        return WeightProof(version=self.version, num_tensors=count, checksums=(digest.hexdigest(),))


def checked_tensors(stream: WeightStream, folder: ModelFolder, source: str) -> "Iterator[tuple[str, Tensor]]":
    """Yield the stream's tensors; raise for a shape, or a name that is unknown, comes twice, or is missing at last."""
    import torch

    expected = ExpectedTensors(source)
    for name, value in stream:
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
        expected.take(name, tuple(tensor.shape), folder.shape_of(name), folder.stored_name(name))
        yield name, tensor
    expected.finish(folder.shapes)


REPLY_S: Final = 3.0
"""Time beyond a sync's own deadline that its workers may take to answer: the error of the sync says more."""


Entry = tuple[str, str, list[int], int]


class WeightLoader:
    """Loads whole updates into one engine.

    Args:
        workers: of the engine.
        folder: says which tensors an update must bring.
        bucket_bytes: half of the arena, which grows for a tensor that is larger.
        dtype: number format of the engine.
        on_cpu: see `Readback`.
    """

    def __init__(self, workers: Workers, folder: ModelFolder, bucket_bytes: int, dtype: str, *, on_cpu: bool) -> None:
        self._workers, self._folder, self._bucket_bytes, self._dtype = workers, folder, bucket_bytes, dtype
        self._on_cpu = on_cpu
        self._arena: Arena | None = None
        self.touched = False

    def load(self, stream: WeightStream, version: int) -> WeightProof:
        """Load every tensor and prove what is held. `touched` says whether anything was written before a failure."""
        self.touched = False
        source = f"weight stream of version {version}"
        stream = UnstackedStream(stream, self._folder)
        try:
            readback = Readback(self._workers, self._dtype, self.reserve, on_cpu=self._on_cpu)
            self._load(stream, source, readback)
            self._workers.call("check_heads")
            return stream.prove(readback)
        except OffbeatError:
            raise
        except Exception as error:
            raise WeightSyncError(f"{source}: {error}") from error

    def receive(
        self, transport: str, addresses: Sequence[str], version: int, deadline_s: float, name: str
    ) -> WeightProof:
        """Let each worker take a version from its sender; `touched` says what it says after `load`."""
        self.touched = False
        workers, end = self._workers, time.monotonic() + deadline_s
        if len(addresses) not in (1, workers.num_workers):
            raise WeightSyncError(
                f"workers receive from one address for all or one each: got {len(addresses)} addresses for "
                f"{workers.num_workers} workers"
            )
        try:
            found = workers.start(
                "receive",
                deadline_s + REPLY_S,
                transport=transport,
                addresses=[*addresses] * (workers.num_workers // len(addresses)),
                version=version,
                deadline_s=deadline_s,
                name=name,
                model_path=str(self._folder.path),
            )()
            left_s = max(0.0, end - time.monotonic()) + REPLY_S  # both calls share one deadline
            proofs = workers.start("confirm", left_s, sums=[part for parts in found for part in parts])()
        except BaseException as error:
            self.touched = bool(workers.lost) or any(workers.call("give_up", reason=str(error)))
            raise
        num_tensors, checksums = proofs[0]
        return WeightProof(version=version, num_tensors=num_tensors, checksums=tuple(checksums))

    def _load(self, stream: WeightStream, source: str, readback: Readback) -> None:
        wait: Callable[[], object] | None = None
        begun = False
        try:
            for entries in self._buckets(self._checked(stream, source, readback)):
                if not begun:
                    self._workers.call("begin")
                    begun = self.touched = True
                if wait is not None:
                    wait()
                wait = self._workers.start("load", tensors=entries)
            if wait is not None:
                wait()
            self._workers.call("finish")
        except BaseException:
            if begun and not self._workers.lost:
                self._workers.call("abandon")
            raise

    def _checked(self, stream: WeightStream, source: str, readback: Readback) -> Iterator[tuple[str, Any]]:
        for name, tensor in checked_tensors(stream, self._folder, source):
            readback.expect(name, tensor)
            yield name, tensor

    def _buckets(self, tensors: Iterator[tuple[str, Any]]) -> Iterator[list[Entry]]:
        """Fill one half of the arena after the other. A half may be filled again two buckets later: see `_load`."""
        entries: list[Entry] = []
        half = used = 0
        for name, tensor in tensors:
            num_bytes = aligned(tensor.numel() * tensor.element_size())
            if entries and used + num_bytes > self._half_bytes():
                yield entries
                entries, half, used = [], 1 - half, 0
            if num_bytes > self._half_bytes():
                # The workers may still read the half that was filled before: a call to open the new arena comes after.
                self.reserve(2 * num_bytes)
            offset = half * self._half_bytes() + used
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.reserve(0).tensor(offset, dtype, tuple(tensor.shape)).copy_(tensor)
            entries.append((name, dtype, list(tensor.shape), offset))
            used += num_bytes
        if entries:
            yield entries

    def _half_bytes(self) -> int:
        return self.reserve(0).num_bytes // 2

    def reserve(self, num_bytes: int) -> Arena:
        """Return an arena of at least this size, and of two buckets, that the workers have opened."""
        wanted = max(num_bytes, 2 * self._bucket_bytes)
        if self._arena is None or self._arena.num_bytes < wanted:
            larger = Arena.create(aligned(wanted))
            self._workers.call("attach", address=larger.address, num_bytes=larger.num_bytes)
            self.close()
            self._arena = larger
        return self._arena

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None
