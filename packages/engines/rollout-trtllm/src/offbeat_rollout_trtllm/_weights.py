"""Weights: a whole stream into one engine, or those of a replica whose ranks share the engine's GPUs.

Of a replica all ranks hand over handles, its leader talks to the engine, and all of them agree. A rank of the trainer
and a worker of the engine share each GPU. The weights go over in flushes; in each, the handles of all ranks of the
replica meet at its leader, which gives them to the engine. What only the leader can know (whether the engine loads a
model in parts, whether it took a flush) is decided for the whole replica: by its first rank, in the replica's own
group, never by global rank 0. So every rank makes the same calls, and an error of one is raised on all.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from offbeat_core import (
    ExpectedTensors,
    ModelFolder,
    OffbeatError,
    TensorSpec,
    WeightProof,
    WeightStream,
    WeightSyncError,
)
from offbeat_mesh import Mesh
from offbeat_rollout_trtllm._handles import HandleFormat, Packed, tensors_checksum
from offbeat_rollout_trtllm._server_link import EngineControl, EngineLink
from offbeat_weightsync import BucketPlan, describe_tensors, quantize_tensors
from offbeat_weightsync import is_fp8_weight as is_fp8_matrix


def plan_flushes(plan: BucketPlan, *, in_parts: bool) -> tuple[tuple[int, ...], ...]:
    """Group the plan's tensors.

    A handle is of a whole tensor, so a tensor goes with the bucket in which it begins; one larger than a bucket makes
    a flush larger than a bucket.

    Args:
        plan: names, shapes, dtypes and bucket size.
        in_parts: whether the engine can load some of the tensors at a time.

    Returns:
        For each flush the indices of its tensors in `plan.specs`; every tensor once, in order.
    """
    if not in_parts:
        return (tuple(range(len(plan.specs))),)
    begun = (tuple(piece.tensor for piece in bucket.pieces if not piece.tensor_offset) for bucket in plan.buckets)
    return tuple(flush for flush in begun if flush)


ROUTERS: Final = (".mlp.gate.weight", ".mlp.shared_expert_gate.weight", ".block_sparse_moe.gate.weight")
"""Weights that choose the experts; TensorRT-LLM keeps them in the model's own format, as DeepSeek-V3 does."""


def is_fp8_weight(spec: TensorSpec) -> bool:
    """Return whether a tensor goes over as FP8 blocks: matrices of the layers, but no table, head or router."""
    return is_fp8_matrix(spec) and not spec.name.endswith(ROUTERS)


OpenHandles = Callable[[Sequence[str]], Sequence[HandleFormat]]
"""Handles for the workers on these devices, from this process."""


class WeightLoader:
    """Loads weight streams into an engine whose GPUs this process sees.

    TensorRT-LLM ignores names it does not know and keeps what did not come, without a word: so names, shapes and count
    are checked here, against the model folder.

    Args:
        link: the engine.
        folder: the model.
        open_handles: how to name tensors to the workers.
        bucket_bytes: handed over at once.
        fp8_blocks: quantise on the way.
    """

    def __init__(
        self, link: EngineLink, folder: ModelFolder, open_handles: OpenHandles, *, bucket_bytes: int, fp8_blocks: bool
    ) -> None:
        self._link, self._folder, self._open_handles = link, folder, open_handles
        self._bucket_bytes, self._fp8_blocks = bucket_bytes, fp8_blocks
        self._in_parts: bool | None = None

    async def load(self, stream: WeightStream, version: int) -> WeightProof:
        """Load every tensor, and prove that the workers opened what the stream gave.

        The stream's proof is of copies in host memory, kept until then: the engine fuses and splits what it loads, so
        it cannot be read back by name.
        """
        if self._in_parts is None:
            self._in_parts = not self._folder.has_vision or await self._link.supports_partial_loading()
        formats = self._open_handles(await self._link.device_ids())
        await self._link.begin_weights()
        held: dict[str, Tensor] = {}
        checksums: list[str] = []
        flushes = self._flushes(self._checked(stream, held))
        while (packed := await asyncio.to_thread(_pack_next, flushes, formats, checksums)) is not None:
            await self._link.update_weights({device: each.text for device, each in packed.items()})
        proof = await asyncio.to_thread(stream.prove, _reader(held))
        _compare(await self._link.weight_arrivals(), [each.device_id for each in formats], checksums)
        await self._link.finish_weights(version)
        return proof

    def _checked(self, stream: WeightStream, held: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The stream's tensors, copied, each known to the model and in its shape, none twice, all of them there."""
        expected = ExpectedTensors(f"weight stream of version {stream.version}")
        for name, tensor in stream:
            source = tensor if isinstance(tensor, Tensor) else torch.as_tensor(tensor)
            expected.take(name, tuple(source.shape), self._folder.shape_of(name), self._folder.stored_name(name))
            held[name] = source.detach().to("cpu", copy=True)
            yield name, held[name]
        expected.finish(self._folder.shapes)

    def _flushes(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
        """Tensors that go together: up to a bucket, or all of them where the engine cannot load in parts."""
        flush: list[tuple[str, Tensor]] = []
        num_bytes = 0
        for name, tensor in quantize_tensors(tensors, is_fp8_weight) if self._fp8_blocks else tensors:
            size = tensor.numel() * tensor.element_size()
            if flush and self._in_parts and num_bytes + size > self._bucket_bytes:
                yield flush
                flush, num_bytes = [], 0
            flush.append((name, tensor))
            num_bytes += size
        if flush:
            yield flush


def _pack_next(
    flushes: Iterator[list[tuple[str, Tensor]]], formats: Sequence[HandleFormat], checksums: list[str]
) -> dict[str, Packed] | None:
    """Return the next flush, for each device, its checksum noted once.

    None after the last. Reads the stream, so may wait.
    """
    flush = next(flushes, None)
    if flush is None:
        return None
    checksums.append(tensors_checksum(flush))
    return {each.device_id: each.pack(flush) for each in formats}


def _reader(held: Mapping[str, Tensor]) -> Callable[[str], Any]:
    def read(name: str) -> Tensor:
        if name not in held:
            raise WeightSyncError(f"{name}: did not come")
        return held[name]

    return read


def _compare(arrived: Mapping[str, list[str]], device_ids: Sequence[str], checksums: list[str]) -> None:
    for device_id in device_ids:
        if arrived.get(device_id) != checksums:
            raise WeightSyncError(
                f"the worker on {device_id} opened other bytes than were sent: {len(arrived.get(device_id, []))} "
                f"flushes reported, {len(checksums)} sent; the engine must not serve them"
            )


class ReplicaWeights:
    """Sends the trainer's weights to the engine of this rank's replica. All ranks of the mesh make it.

    Args:
        mesh: `dp` counts the replicas; the ranks that differ along any other axis make one.
        plan: the same on all ranks.
        engine: called on the replica's leader alone.
        handles: for the worker that shares this rank's device.
        has_vision: whether the model's config holds a `vision_config`. Models of language alone load in parts, and the
            engine is never asked; for the others it is asked once.
        deadline_s: for each step of all ranks, the engine's answer included; more than the engine's own, so that
            the error reported is the engine's.
    """

    def __init__(
        self,
        mesh: Mesh,
        plan: BucketPlan,
        engine: EngineControl,
        handles: HandleFormat,
        *,
        has_vision: bool,
        deadline_s: float = 600.0,
    ) -> None:
        self._group = mesh.group_except("dp")
        self._plan, self._engine, self._handles = plan, engine, handles
        self._in_parts = None if has_vision else True
        self._deadline_s = deadline_s

    @property
    def is_leader(self) -> bool:
        """Return whether this rank talks to the engine."""
        return self._group.rank == 0

    def send(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> WeightProof:
        """Send all tensors of the plan, in its order; a call of all ranks of the replica.

        When it fails, the rest of `named_tensors` is still taken: where they are gathered from other ranks, other
        replicas depend on that. The engine then refuses to serve until a whole update arrives.

        Returns:
            What the engine's worker on this rank's device opened: one checksum for each flush.

        Raises:
            PeerFailedError: on all ranks of the replica: the engine refused or died, or another rank failed.
            WeightSyncError: on all ranks: a worker opened other bytes than were sent; here alone: this rank's own
                tensors are not those planned.
            MismatchError: the ranks differ in version or plan.
        """
        tensors = iter(named_tensors)
        try:
            return self._send(tensors, version)
        except Exception as error:
            _take_the_rest(tensors, error)
            raise

    def _send(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> WeightProof:
        self._group.check_equal(
            {"version": version, "plan": self._plan.digest}, what="policy version and plan", deadline_s=self._deadline_s
        )
        flushes = plan_flushes(self._plan, in_parts=self._loads_in_parts())
        self._decide(self._engine.begin_weights)
        checksums = [self._flush(tensors, indices) for indices in flushes]
        self._compare(self._decide(self._engine.weight_arrivals), checksums)
        self._decide(lambda: self._engine.finish_weights(version))
        return WeightProof(version=version, num_tensors=len(self._plan.specs), checksums=tuple(checksums))

    def _loads_in_parts(self) -> bool:
        if self._in_parts is None:
            self._in_parts = bool(self._decide(self._engine.supports_partial_loading))
        return self._in_parts

    def _flush(self, tensors: Iterator[tuple[str, Tensor]], indices: tuple[int, ...]) -> str:
        packed, checksum, failure = self._pack(tensors, indices)
        message = {"error": str(failure)} if packed is None else {self._handles.device_id: packed.text}
        gathered: list[Any] | None = self._group.gather_data(message, deadline_s=self._deadline_s)
        try:
            self._decide(lambda: self._engine.update_weights(self._join(gathered or [])))
        except OffbeatError:
            if failure is not None:
                raise failure from None  # its own, rather than the leader's word of it
            raise
        assert packed is not None, "the leader continues only if all ranks have packed"
        return checksum

    def _pack(
        self, tensors: Iterator[tuple[str, Tensor]], indices: tuple[int, ...]
    ) -> tuple[Packed | None, str, Exception | None]:
        """Return the handles of this rank and their checksum, or why there are none, for the leader to report."""
        try:
            named = [self._next(tensors, index) for index in indices]
            return self._handles.pack(named), tensors_checksum(named), None
        except Exception as error:  # noqa: BLE001 - raised again once all ranks know of it
            return None, "", error

    def _next(self, tensors: Iterator[tuple[str, Tensor]], index: int) -> tuple[str, Tensor]:
        spec = self._plan.specs[index]
        name, tensor = next(tensors, (None, None))
        if name is None or tensor is None:
            raise WeightSyncError(f"{spec.name}: planned, but the trainer's tensors ended before it")
        if describe_tensors([(name, tensor)]) != [spec]:
            got = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
            raise WeightSyncError(f"{spec.name}: planned as {spec.dtype} {spec.shape}, the trainer gave {got}")
        return name, tensor

    def _join(self, gathered: list[dict[str, str]]) -> dict[str, str]:
        joined: dict[str, str] = {}
        for rank, message in zip(self._group.ranks, gathered, strict=True):
            if "error" in message:
                raise WeightSyncError(f"rank {rank}: {message['error']}")
            if joined.keys() & message.keys():
                raise WeightSyncError(f"rank {rank} shares the device {min(message)} with another rank of its replica")
            joined |= message
        return joined

    def _decide(self, fn: Callable[[], Any]) -> Any:
        return self._group.decide(fn, deadline_s=self._deadline_s)

    def _compare(self, arrived: Mapping[str, list[str]], sent: list[str]) -> None:
        """All ranks raise if the worker of one has not opened what was sent."""
        held = arrived.get(self._handles.device_id)
        complaint = ""
        if held is None:
            complaint = (
                f"no worker reports from {self._handles.device_id}; they do from {', '.join(arrived) or 'nowhere'}"
            )
        elif held != sent:
            wrong = [flush for flush, checksum in enumerate(sent) if held[flush : flush + 1] != [checksum]]
            complaint = (
                f"the worker on {self._handles.device_id} opened {len(held)} flushes of {len(sent)}, wrong: {wrong}"
            )
        for rank, text in zip(
            self._group.ranks, self._group.all_gather_data(complaint, deadline_s=self._deadline_s), strict=True
        ):
            if text:
                raise WeightSyncError(f"rank {rank}: {text}")


def _take_the_rest(tensors: Iterator[tuple[str, Tensor]], error: Exception) -> None:
    """Run the trainer's generator to its end, so that the ranks that gather with this one are not left alone."""
    try:
        for _ in tensors:
            pass
    except Exception as second:  # noqa: BLE001 - the first error is the one to report
        error.add_note(f"and the rest of the trainer's tensors could not be taken: {second}")
