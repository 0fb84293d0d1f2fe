"""A weight update: from a stream, through the arena, into the workers; and the proof of what they hold then.

The arena has two halves: while the workers load one, the other is filled. Runs in a thread of its own, because a stream
waits for its trainer.
"""

from collections.abc import Iterator
from typing import Any

from offbeat_rollout_vllm._arena import Arena, aligned
from offbeat_rollout_vllm._folders import ModelFolder
from offbeat_rollout_vllm._readback import Readback
from offbeat_rollout_vllm._stacks import UnstackedStream
from offbeat_rollout_vllm._workers import PendingCall, Workers
from offbeat_types import OffbeatError, WeightProof, WeightStream, WeightSyncError

Entry = tuple[str, str, list[int], int]


class WeightLoader:
    """Loads whole updates into one engine.

    Args:
        workers: of the engine.
        folder: says which tensors an update must bring.
        bucket_bytes: half of the arena, which grows for a tensor that is larger.
        dtype: number format of the engine.
    """

    def __init__(self, workers: Workers, folder: ModelFolder, bucket_bytes: int, dtype: str) -> None:
        self._workers, self._folder, self._bucket_bytes, self._dtype = workers, folder, bucket_bytes, dtype
        self._arena: Arena | None = None
        self.touched = False

    def load(self, stream: WeightStream, version: int) -> WeightProof:
        """Load every tensor and prove what is held. `touched` says whether anything was written before a failure.

        Raises:
            WeightSyncError: a name, shape, count or checksum differs, or the stream failed.
            DeadlineError, PeerFailedError: the workers cannot be relied on any more.
        """
        self.touched = False
        source = f"weight stream of version {version}"
        stream = UnstackedStream(stream, self._folder)
        try:
            readback = Readback(self._workers, self._dtype, self.reserve)
            self._load(stream, source, readback)
            self._workers.call("check_heads")
            return stream.prove(readback)
        except OffbeatError:
            raise
        except Exception as error:
            raise WeightSyncError(f"{source}: {error}") from error

    def _load(self, stream: WeightStream, source: str, readback: Readback) -> None:
        pending: PendingCall | None = None
        begun = False
        try:
            for entries in self._buckets(self._checked(stream, source, readback)):
                if not begun:
                    self._workers.call("begin")
                    begun = self.touched = True
                if pending is not None:
                    pending.result()
                pending = self._workers.start("load", tensors=entries)
            if pending is not None:
                pending.result()
            self._workers.call("finish")
        except BaseException:
            if begun and not self._workers.lost:
                self._workers.call("abandon")
            raise

    def _checked(self, stream: WeightStream, source: str, readback: Readback) -> Iterator[tuple[str, Any]]:
        """The stream's tensors; raises for a shape, or a name that is unknown, came twice, or is missing at the end."""
        import torch

        seen = set[str]()
        for name, value in stream:
            tensor = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
            shape, stored = self._folder.shape_of(name), self._folder.stored_name(name)
            if shape is None:
                raise WeightSyncError(f"{source}: this model has no tensor {name!r}")
            if stored in seen:
                raise WeightSyncError(f"{source}: the tensor {name!r} came twice")
            if tuple(tensor.shape) != shape:
                raise WeightSyncError(f"{source}: {name!r} must have shape {shape}, got {tuple(tensor.shape)}")
            seen.add(stored)
            readback.expect(name, tensor)
            yield name, tensor
        missing = [name for name in self._folder.shapes if name not in seen]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise WeightSyncError(f"{source}: missing {', '.join(map(repr, missing[:3]))}{more}")

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
        """An arena of at least this size, and of two buckets, that the workers have opened."""
        wanted = max(num_bytes, 2 * self._bucket_bytes)
        if self._arena is None or self._arena.num_bytes < wanted:
            larger = Arena.create(aligned(wanted))
            self._workers.call("attach", address=larger.address, num_bytes=larger.num_bytes)
            self.close()
            self._arena = larger
        return self._arena

    def close(self) -> None:
        """Give the arena back."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None
