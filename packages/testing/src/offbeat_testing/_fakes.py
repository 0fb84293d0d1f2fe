"""A rollout engine that follows a script, and a weight stream that can be made to fail. No torch."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from offbeat_core import (
    Completion,
    EngineHealth,
    GenerateRequest,
    LoraAdapter,
    OffbeatError,
    PauseMode,
    RolloutCapabilities,
    StopReason,
    VersionSegment,
    WeightProof,
    WeightStream,
    WeightSyncError,
)

Script = Callable[[GenerateRequest, int], Sequence[int]]
"""Maps (request, index of the sample) to the token ids that sample becomes."""


class FakeWeightStream:
    """Named tensors from a list, with one checksum over all of them.

    A tensor is overwritten when the next one is asked for: a stream between processes uses its buffer again.

    Args:
        tensors: (name, array or tensor), in order; they stay as they are.
        version: policy version.
        fail_after: raise WeightSyncError after this many tensors, as a sender that dies would.
    """

    def __init__(self, tensors: Sequence[tuple[str, Any]], version: int, *, fail_after: int | None = None) -> None:
        self.tensors, self.version, self._fail_after = list(tensors), version, fail_after

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for index, (name, tensor) in enumerate(self.tensors):
            if index == self._fail_after:
                raise WeightSyncError(f"the sender died after {index} of {len(self.tensors)} tensors (on purpose)")
            lent = tensor.detach().clone() if hasattr(tensor, "detach") else np.array(tensor)
            yield name, lent
            lent[...] = 77

    def prove(self, read: Callable[[str], Any]) -> WeightProof:
        return self._proof([(name, read(name)) for name, _ in self.tensors])

    def expected(self) -> WeightProof:
        """Return the proof of a receiver that holds everything as sent."""
        return self._proof(self.tensors)

    def _proof(self, tensors: Sequence[tuple[str, Any]]) -> WeightProof:
        digest = hashlib.blake2b(digest_size=8)
        for name, tensor in tensors:
            digest.update(name.encode())
            digest.update(_bytes_of(tensor))
        return WeightProof(version=self.version, num_tensors=len(tensors), checksums=(digest.hexdigest(),))


def _bytes_of(tensor: Any) -> bytes:
    if hasattr(tensor, "detach"):
        import torch

        # As bytes: NumPy has neither bfloat16 nor FP8.
        tensor = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return np.asarray(tensor).tobytes()


class _Sample:
    def __init__(self, script: Sequence[int], max_tokens: int) -> None:
        self.script, self.ids, self.versions = list(script)[:max_tokens], list[int](), list[int]()
        self.ended: StopReason = "eos" if len(script) <= max_tokens else "length"

    def completion(self, *, aborted: bool) -> Completion:
        segments: list[VersionSegment] = []
        for version in self.versions:
            if segments and segments[-1].version == version:
                segments[-1] = VersionSegment(version=version, num_tokens=segments[-1].num_tokens + 1)
            else:
                segments.append(VersionSegment(version=version, num_tokens=1))
        unfinished = aborted and len(self.ids) < len(self.script)
        return Completion(
            ids=np.asarray(self.ids, np.int32),
            logprobs=np.full(len(self.ids), -1.0, np.float32),
            segments=tuple(segments),
            stop_reason="aborted" if unfinished else self.ended,
            text=" ".join(map(str, self.ids)),
        )


class FakeRolloutEngine:
    """Keeps the rollout contract to the letter, with tokens from a script and every log-probability -1.

    Args:
        script: what each sample becomes; the last token counts as end of sequence.
        token_delay_s: seconds per token; 0 still lets other tasks run between tokens.
    """

    capabilities: ClassVar[RolloutCapabilities] = RolloutCapabilities(
        pause_modes=("abort", "wait", "keep"), sleep_levels=(1, 2), shares_prompt_prefix=True
    )

    def __init__(self, script: Script, *, token_delay_s: float = 0.0) -> None:
        self._script, self._delay_s = script, token_delay_s
        self.version, self.weights = 0, dict[str, Any]()
        self.requests: list[GenerateRequest] = []
        self._aborted: dict[str, asyncio.Event] = {}
        self._may_start, self._may_sample = asyncio.Event(), asyncio.Event()
        self._may_start.set()
        self._may_sample.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_running, self._num_tokens, self._started_s, self._closed = 0, 0, time.monotonic(), False

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        if self._closed:
            raise OffbeatError("the engine is closed: make a new one")
        self.capabilities.check(request, "fake engine")
        self.requests.append(request)
        self._aborted[request.request_id] = aborted = asyncio.Event()
        await _first(self._may_start, aborted)
        self._num_running += 1
        self._idle.clear()
        try:
            samples = [
                _Sample(self._script(request, index), request.params.max_tokens) for index in range(request.num_samples)
            ]
            await asyncio.gather(*(self._play(sample, aborted) for sample in samples))
            return [sample.completion(aborted=aborted.is_set()) for sample in samples]
        finally:
            del self._aborted[request.request_id]
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    async def _play(self, sample: _Sample, aborted: asyncio.Event) -> None:
        for token in sample.script:
            await asyncio.sleep(self._delay_s)
            await _first(self._may_sample, aborted)
            if aborted.is_set():
                return
            sample.ids.append(token)
            sample.versions.append(self.version)
            self._num_tokens += 1

    async def abort(self, request_id: str) -> None:
        if request_id in self._aborted:
            self._aborted[request_id].set()

    async def pause(self, mode: PauseMode) -> None:
        self._may_start.clear()
        if mode == "wait":
            await self._idle.wait()
            return
        self._may_sample.clear()
        if mode == "abort":
            for event in self._aborted.values():
                event.set()
            await self._idle.wait()

    async def resume(self) -> None:
        self._may_start.set()
        self._may_sample.set()

    async def update_weights(
        self, stream: WeightStream, version: int, *, adapter: LoraAdapter | None = None
    ) -> WeightProof:
        """Keep a copy of every tensor; on an error the old version stays."""
        self.capabilities.check_adapter(adapter, "fake engine")
        if stream.version != version:
            raise WeightSyncError(f"asked for version {version}, the stream holds version {stream.version}")
        weights = {name: np.array(tensor) for name, tensor in stream}
        self.weights, self.version = weights, version
        return stream.prove(weights.__getitem__)

    async def drop_adapter(self, name: str) -> None:
        """Do nothing: there is none."""

    async def sleep(self, level: int) -> None:
        """Forget the weights at level 2."""
        if level == 2:
            self.weights = {}

    async def wake(self, tags: tuple[str, ...] = ()) -> None:
        """Do nothing: there is no memory to take."""

    async def health(self) -> EngineHealth:
        uptime_s = time.monotonic() - self._started_s
        return EngineHealth(
            version=self.version,
            num_running=self._num_running,
            num_waiting=len(self._aborted) - self._num_running,
            num_tokens=self._num_tokens,
            busy_s=uptime_s,
            uptime_s=uptime_s,
            num_decoding=self._num_running if self._may_sample.is_set() else 0,
        )

    async def close(self) -> None:
        self._closed = True
        for event in self._aborted.values():
            event.set()
        await self._idle.wait()


async def _first(one: asyncio.Event, other: asyncio.Event) -> None:
    if one.is_set() or other.is_set():
        return
    tasks = [asyncio.ensure_future(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
