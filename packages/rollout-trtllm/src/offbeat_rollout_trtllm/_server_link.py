"""An engine in another process, behind `RolloutApp`."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from offbeat_rollout_trtllm._http import HttpEngine
from offbeat_rollout_trtllm._links import Delta
from offbeat_types import PeerFailedError, WeightSyncError


class ServerLink:
    """Generates and loads over HTTP.

    Args:
        address: host:port.
        deadline_s: for each answer, and between two tokens.
    """

    def __init__(self, address: str, *, deadline_s: float) -> None:
        self._engine = HttpEngine(address, deadline_s=deadline_s)

    async def version_of_engine(self) -> str:
        """TensorRT-LLM's version."""
        return str((await self._engine.call("GET", "/version"))["version"])

    async def served_version(self) -> int | None:
        """Policy version it serves; None while it holds no whole set of weights."""
        version: int | None = (await self._engine.call("GET", "/offbeat/version"))["version"]
        return version

    async def device_ids(self) -> list[str]:
        """The device of each worker."""
        return list((await self._engine.call("GET", "/offbeat/devices"))["device_ids"])

    async def stream(
        self, sample_id: str, prompt_ids: Sequence[int], params: Mapping[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        """Generate one sample.

        Raises:
            WeightSyncError: the engine refuses: it holds no whole set of weights.
            PeerFailedError: the server died, or its stream ended early.
        """
        body = {"sample_id": sample_id, "prompt_ids": list(prompt_ids), "params": dict(params)}
        async with aclosing(self._engine.lines("/offbeat/generate", body)) as lines:
            async for line in lines:
                if "error" in line:
                    raise WeightSyncError(f"{self._engine.label}: {line['error']}")
                delta = Delta(*line["delta"])
                yield delta
                if delta.ended:
                    return
        raise PeerFailedError(self._engine.label, f"its answer ended before the sample {sample_id} did")

    async def abort(self, sample_id: str) -> None:
        """End a sample now."""
        await self._engine.call("POST", "/offbeat/abort", {"sample_id": sample_id})

    async def supports_partial_loading(self) -> bool:
        """Whether it can load some of the model's tensors at a time."""
        return bool((await self._engine.call("GET", "/offbeat/partial_loading"))["supported"])

    async def begin_weights(self) -> None:
        """Refuse to generate until `finish_weights`."""
        await self._engine.call("POST", "/offbeat/begin_weights")

    async def update_weights(self, handles: Mapping[str, str]) -> None:
        """Load the tensors behind the handles of each device."""
        await self._engine.call("POST", "/update_weights", {"weights": dict(handles)})

    async def weight_arrivals(self) -> dict[str, list[str]]:
        """For each device a checksum of each flush since `begin_weights`, as its worker opened it."""
        answer: Any = await self._engine.call("GET", "/offbeat/weight_arrivals")
        return dict(answer["arrivals"])

    async def finish_weights(self, version: int) -> None:
        """Make the weights ready, forget cached keys and values, and serve `version`."""
        await self._engine.call("POST", "/offbeat/finish_weights", {"version": version})

    async def release(self, tags: Sequence[str]) -> None:
        """Give memory back."""
        await self._engine.call("POST", "/release_memory", {"tags": list(tags)})

    async def resume(self, tags: Sequence[str]) -> None:
        """Take memory again."""
        await self._engine.call("POST", "/resume_memory", {"tags": list(tags)})

    async def reset_prefix_cache(self) -> None:
        """Forget cached keys and values."""
        await self._engine.call("POST", "/offbeat/reset_prefix_cache")

    async def close(self) -> None:
        """Let go: whoever started the server ends it."""
