"""A whole weight stream into one engine: checked against the model's own tensors, flushed, and proved."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat_rollout_trtllm._fp8 import is_fp8_weight
from offbeat_rollout_trtllm._handles import HandleFormat, Packed, tensors_checksum
from offbeat_rollout_trtllm._links import EngineLink
from offbeat_rollout_trtllm._model_folder import ModelFolder
from offbeat_types import WeightProof, WeightStream, WeightSyncError
from offbeat_weightsync import quantize_tensors

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

        Raises:
            WeightSyncError: a name, a shape or the count differs, or a worker opened other bytes. The engine then
                refuses to serve until a whole update arrives.
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
        self._check_complete(held)
        proof = await asyncio.to_thread(stream.prove, _reader(held))
        _compare(await self._link.weight_arrivals(), [each.device_id for each in formats], checksums)
        await self._link.finish_weights(version)
        return proof

    def _checked(self, stream: WeightStream, held: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The stream's tensors, copied, each known to the model and in its shape, none twice."""
        shapes = self._folder.shapes()
        alias = {"lm_head.weight": "model.embed_tokens.weight"} if self._folder.tied else {}
        for name, tensor in stream:
            shape = shapes.get(name, shapes.get(alias.get(name, "")))
            if shape is None:
                raise WeightSyncError(f"{name}: this model has no such tensor")
            if name in held:
                raise WeightSyncError(f"{name}: the tensor came twice")
            source = tensor if isinstance(tensor, Tensor) else torch.as_tensor(tensor)
            if tuple(source.shape) != shape:
                raise WeightSyncError(f"{name}: must have shape {shape}, got {tuple(source.shape)}")
            held[name] = source.detach().to("cpu", copy=True)
            yield name, held[name]

    def _check_complete(self, held: Mapping[str, Tensor]) -> None:
        wanted = self._folder.shapes().keys() - ({"lm_head.weight"} if self._folder.tied else set())
        if missing := sorted(wanted - held.keys()):
            raise WeightSyncError(f"{missing[0]} and {len(missing) - 1} more tensors of the model did not come")

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
    """The next flush, for each device, its checksum noted once; None after the last. Reads the stream, so may wait."""
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
