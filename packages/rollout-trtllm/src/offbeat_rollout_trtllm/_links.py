"""The seam between the rollout contract and an engine, wherever it runs."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Delta(NamedTuple):
    """What one sample has become since the last one.

    Args:
        ids: new tokens.
        logprobs: of each.
        version: policy version that chose them.
        ended: empty while it goes on, else the engine's word: stop, length, cancelled or timeout.
        stop_reason: token id that ended it, when one did.
    """

    ids: list[int]
    logprobs: list[float]
    version: int
    ended: str = ""
    stop_reason: int | None = None


class EngineLink(Protocol):
    """An engine of one replica: `LocalLink` in this process, `ServerLink` in another."""

    async def version_of_engine(self) -> str:
        """TensorRT-LLM's version."""
        ...

    async def served_version(self) -> int | None:
        """Policy version it serves; None while it holds no whole set of weights."""
        ...

    async def device_ids(self) -> list[str]:
        """The device of each worker."""
        ...

    def stream(
        self, sample_id: str, prompt_ids: Sequence[int], params: Mapping[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        """Generate one sample; closing the stream ends it. `params` are arguments of TensorRT-LLM's SamplingParams."""
        ...

    async def abort(self, sample_id: str) -> None:
        """End a sample now; its stream ends with `cancelled`. Unknown ids are ignored."""
        ...

    async def supports_partial_loading(self) -> bool:
        """Whether it can load some of the model's tensors at a time."""
        ...

    async def begin_weights(self) -> None:
        """Refuse to generate until `finish_weights`."""
        ...

    async def update_weights(self, handles: Mapping[str, str]) -> None:
        """Load the tensors behind the handles of each device."""
        ...

    async def weight_arrivals(self) -> dict[str, list[str]]:
        """For each device a checksum of each flush since `begin_weights`, as its worker opened it."""
        ...

    async def finish_weights(self, version: int) -> None:
        """Make the weights ready, forget cached keys and values, and serve `version`."""
        ...

    async def release(self, tags: Sequence[str]) -> None:
        """Give memory back."""
        ...

    async def resume(self, tags: Sequence[str]) -> None:
        """Take memory again."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget cached keys and values."""
        ...

    async def close(self) -> None:
        """Let go of the engine."""
        ...
