"""The rollout contract: what every engine that samples completions takes and gives.

Shapes: P prompt tokens, T completion tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from offbeat_types._errors import ShapeError
from offbeat_types._settings import REQUIRED, setting

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

StopReason = Literal["eos", "stop", "length", "aborted"]
PauseMode = Literal["abort", "wait", "keep"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens.

    The sampled distribution is softmax(logits / temperature), cut by top_k, then top_p, then min_p, and
    renormalised; log-probabilities reported are those of that distribution. Temperature 0 means greedy, and
    reports the log-probability at temperature 1.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One prompt, to be completed `num_samples` times.

    Args:
        request_id: unique among requests in flight.
        prompt_ids: [P] int32, P >= 1.
        num_samples: completions wanted; sample i draws with seed `params.seed + i` when a seed is given.
    """

    request_id: str
    prompt_ids: Ids
    num_samples: int = 1
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, kw_only=True)
class VersionSegment:
    """A run of `num_tokens` tokens, all sampled by policy `version`."""

    version: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What one sample became.

    Args:
        ids: [T] int32, the end-of-sequence or stop token included when one was sampled.
        logprobs: [T] float32, nats, of each sampled token (see `SamplingParams`).
        segments: which policy version sampled which run of tokens, oldest first; they add up to T.
        stop_reason: `aborted` means unfinished: continue it or drop it, never train on it as if it had ended.
        text: decoded ids without special tokens.
    """

    ids: Ids
    logprobs: Floats
    segments: tuple[VersionSegment, ...]
    stop_reason: StopReason
    text: str = ""

    def __post_init__(self) -> None:
        covered = sum(segment.num_tokens for segment in self.segments)
        if not len(self.ids) == len(self.logprobs) == covered:
            raise ShapeError(
                f"a completion needs as many ids, logprobs and version-segment tokens: "
                f"got {len(self.ids)}, {len(self.logprobs)} and {covered}"
            )

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token; lag is counted from it. 0 when there is no token."""
        return min((segment.version for segment in self.segments), default=0)


@dataclass(frozen=True, kw_only=True)
class RolloutCapabilities:
    """What an engine can do, declared by it and never guessed from its name."""

    pause_modes: tuple[PauseMode, ...]
    sleep_levels: tuple[int, ...] = ()
    shares_prompt_prefix: bool = False
    partial_update: bool = False
    multimodal: bool = False
    lora: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineHealth:
    """A snapshot of a rollout engine.

    Args:
        version: policy version it serves.
        num_running: samples being decoded now.
        num_waiting: samples queued.
        num_tokens: tokens sampled since start.
        busy_s: seconds since start in which it had something to decode.
        uptime_s: seconds since start.
    """

    version: int
    num_running: int
    num_waiting: int
    num_tokens: int
    busy_s: float
    uptime_s: float


@dataclass(frozen=True, kw_only=True)
class WeightProof:
    """What a receiver of weights holds, computed from the tensors it holds.

    Args:
        version: policy version.
        num_tensors: how many tensors were loaded.
        checksums: one 64-bit checksum per bucket, as 16 hex digits.
    """

    version: int
    num_tensors: int
    checksums: tuple[str, ...]


class WeightStream(Protocol):
    """Named tensors on their way to a receiver, under the trainer's (Hugging Face) names."""

    version: int

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor); a tensor is valid until the next one is asked for: copy it."""
        ...

    def prove(self, read: Callable[[str], Any]) -> WeightProof:
        """Read every tensor back with `read(name)` and return what the receiver holds."""
        ...


class RolloutEngine(Protocol):
    """Samples completions. All methods are safe to await at once from one event loop."""

    capabilities: ClassVar[RolloutCapabilities]

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Return `request.num_samples` completions, in order.

        While the engine is paused with `keep` the call waits and then goes on under the new weights; with `abort`
        it returns what it has, marked `aborted`.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request now: its `generate` returns what it has, marked `aborted`. Unknown ids are ignored."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling: `wait` finishes what is in flight, `abort` returns it unfinished, `keep` holds it."""
        ...

    async def resume(self) -> None:
        """Sample again after `pause`."""
        ...

    async def update_weights(self, stream: WeightStream, version: int) -> WeightProof:
        """Load every tensor of the stream, drop cached keys and values, serve `version` from now on.

        Raises:
            WeightSyncError: a name, shape or count differs; the engine then serves the old version or refuses.
        """
        ...

    async def sleep(self, level: int) -> None:
        """Give memory back: level 1 the KV cache, level 2 the weights too."""
        ...

    async def wake(self, tags: tuple[str, ...] = ()) -> None:
        """Take memory again after `sleep`: tags `weights`, `kv_cache`, or none for both."""
        ...

    async def health(self) -> EngineHealth:
        """Return at once, whatever the engine is doing."""
        ...

    async def close(self) -> None:
        """Free everything. Requests in flight return as aborted."""
        ...


@dataclass(frozen=True, kw_only=True)
class RolloutEngineSettings:
    """What a user may set of any rollout backend."""

    device: str = setting("auto", "auto, cpu, or a device such as cuda:0.")
    dtype: str = setting(
        "float32", "Number format of the weights while sampling.", choices=("float32", "bfloat16", "float16")
    )
    max_running: int = setting(64, "Samples decoded together at most.", "samples", ge=1)
    max_model_len: int = setting(4096, "Prompt and completion together at most.", "tokens", ge=8)
    options: dict[str, Any] = setting({}, "Extras of the backend, checked against its own settings.")


@dataclass(frozen=True, kw_only=True)
class RolloutEngineConfig(RolloutEngineSettings):
    """What every rollout backend needs to start."""

    model_path: str = setting(REQUIRED, "Hugging Face model folder: config.json, safetensors, tokenizer.")
    trust_remote_code: bool = setting(False, "Run code that comes with the model folder.")
    num_threads: int = setting(0, "CPU threads; 0 leaves the choice to the launcher.", "threads", ge=0)
