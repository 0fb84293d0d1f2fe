"""The rollout contract: what every engine that samples completions takes and gives.

Shapes: T completion tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from offbeat_types._errors import ConfigError, ShapeError
from offbeat_types._requests import GenerateRequest, Ids, check_images
from offbeat_types._settings import REQUIRED, setting

Floats = npt.NDArray[np.float32]
StopReason = Literal["eos", "stop", "length", "aborted"]
PauseMode = Literal["abort", "wait", "keep"]


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

    @classmethod
    def join(
        cls,
        ids: Sequence[int],
        logprobs: Sequence[float],
        runs: Iterable[tuple[int, int]],
        stop_reason: StopReason | None,
        text: str,
    ) -> Self:
        """Make one of lists.

        Args:
            ids: token ids.
            logprobs: of each.
            runs: (version, number of tokens), oldest first; neighbours of one version become one segment.
            stop_reason: None: the sample has not ended, and is marked aborted.
            text: decoded ids.
        """
        segments: list[VersionSegment] = []
        for version, num_tokens in runs:
            if segments and segments[-1].version == version:
                num_tokens += segments.pop().num_tokens
            segments.append(VersionSegment(version=version, num_tokens=num_tokens))
        return cls(
            ids=np.asarray(ids, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            segments=tuple(segments),
            stop_reason=stop_reason or "aborted",
            text=text,
        )

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token; lag is counted from it. 0 when there is no token."""
        return min((segment.version for segment in self.segments), default=0)


@dataclass(frozen=True, kw_only=True)
class RolloutCapabilities:
    """What an engine can do, declared by it and never guessed from its name.

    It may depend on the model, the device and the options, so an instance says it and not its class.

    Args:
        pause_modes: modes that `pause` knows.
        sleep_levels: levels that `sleep` knows; a level is declared where it gives memory back.
        shares_prompt_prefix: samples of a group compute their prompt once.
        partial_update: an update may bring some of the tensors.
        multimodal: requests may hold images.
        lora: updates may bring an adapter, and requests name one.
        whole_logprobs: it reports log-probabilities before a cut (`SamplingParams.whole_logprobs`).
        fp8_weights: it takes and holds matrices as FP8 blocks (`RolloutEngineSettings.weight_format`).
        scores: it is a `ScoringEngine`: it gives log-probabilities of tokens that others have sampled.
        scores_images: of prompts with images, too.
        traces: it is a `TracingEngine`: it traces itself, because it computes elsewhere than in its caller's process.
    """

    pause_modes: tuple[PauseMode, ...]
    sleep_levels: tuple[int, ...] = ()
    shares_prompt_prefix: bool = False
    partial_update: bool = False
    multimodal: bool = False
    lora: bool = False
    whole_logprobs: bool = False
    fp8_weights: bool = False
    scores: bool = False
    scores_images: bool = False
    traces: bool = False

    def check(self, request: GenerateRequest, engine: str) -> None:
        """Refuse a request that asks for more than this.

        Args:
            request: as it came.
            engine: what to call the engine in the error, such as "rollout-torch".

        Raises:
            ConfigError: an image or an adapter, and the engine takes none; log-probabilities it does not give.
            DataError: an image that is not one.
        """
        name = f"request {request.request_id!r}"
        if request.adapter and not self.lora:
            raise ConfigError(
                f"{name} wants the adapter {request.adapter!r}, and this {engine} does not do lora: use an engine, or "
                "options, that declare it, or send merged weights"
            )
        if request.images and not self.multimodal:
            raise ConfigError(
                f"{name} holds {len(request.images)} image{'s' * (len(request.images) > 1)}, and this {engine} is not "
                "multimodal: use an engine, and a model, that declare it"
            )
        if request.params.whole_logprobs and request.params.is_cut and not self.whole_logprobs:
            raise ConfigError(
                f"{name} cuts by top_p, top_k or min_p and wants log-probabilities before the cut, which this {engine} "
                "does not give: leave the cuts out, or use an engine that declares whole_logprobs"
            )
        check_images(request.images, name)

    def check_adapter(self, adapter: "LoraAdapter | None", engine: str) -> None:
        """Refuse an update that brings an adapter, where there can be none.

        Raises:
            ConfigError: there can be none.
        """
        if adapter is not None and not self.lora:
            raise ConfigError(
                f"an update brings the adapter {adapter.name!r}, and this {engine} does not do lora: use an engine, or "
                "options, that declare it, or send merged weights"
            )

    def check_pause(self, mode: PauseMode) -> None:
        """Refuse a pause that is not declared.

        Raises:
            ConfigError: it is not.
        """
        if mode not in self.pause_modes:
            raise ConfigError(f"pause mode must be one of {', '.join(self.pause_modes)}, got {mode!r}")

    def check_sleep(self, level: int) -> None:
        """Refuse a level of sleep that is not declared.

        Raises:
            ConfigError: it is not.
        """
        if level not in self.sleep_levels:
            raise ConfigError(f"sleep level must be one of {self.sleep_levels}, got {level!r}")


@dataclass(frozen=True, kw_only=True)
class LoraAdapter:
    """A low-rank change of some of a model's matrices: each W becomes W + scale B A, A [rank, in], B [out, rank].

    Its tensors travel in a `WeightStream` under the names of Hugging Face PEFT, such as
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight".

    Source: arXiv:2106.09685; https://github.com/huggingface/peft, peft/tuners/lora/layer.py.

    Args:
        name: what requests call it; not "".
        scale: alpha / rank, or what another recipe makes of the two.
    """

    name: str
    scale: float

    def __post_init__(self) -> None:
        if not self.name or not np.isfinite(self.scale):
            raise ConfigError(f"an adapter needs a name and a finite scale, got {self.name!r} and {self.scale}")


@dataclass(frozen=True, kw_only=True)
class EngineHealth:
    """A snapshot of a rollout engine.

    Args:
        version: policy version of the last update, of the model or of an adapter.
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


WAKE_TAGS: Final = ("weights", "kv_cache")


def wake_tags(tags: tuple[str, ...]) -> set[str]:
    """What `RolloutEngine.wake` is to take again.

    Raises:
        ConfigError: a tag that there is not.
    """
    if unknown := set(tags) - set(WAKE_TAGS):
        raise ConfigError(f"wake knows the tags {' and '.join(WAKE_TAGS)}, got {', '.join(sorted(unknown))}")
    return set(tags or WAKE_TAGS)


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

    @property
    def capabilities(self) -> RolloutCapabilities:
        """What it can do. The rest of the contract holds within this: what is beyond it is a ConfigError."""
        ...

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

    async def update_weights(
        self, stream: WeightStream, version: int, *, adapter: LoraAdapter | None = None
    ) -> WeightProof:
        """Load every tensor of the stream, drop cached keys and values, serve `version` from now on.

        With an adapter the stream holds its tensors alone. It is added, or takes the place of the one of that name;
        the model stays. What is sampled with an adapter has the version of the last update of either.

        Raises:
            WeightSyncError: a name, shape or count differs; the engine then serves the old version or refuses.
            ConfigError: an adapter, and the engine takes none, or no more.
        """
        ...

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter. Unknown names are ignored.

        Raises:
            OffbeatError: a request in flight uses it.
        """
        ...

    async def sleep(self, level: int) -> None:
        """Give memory back: level 1 the KV cache, level 2 the weights too, which `update_weights` must bring anew.

        Samples held by `pause("keep")` stay in flight, and go on with their tokens after `wake` and `resume`; where the
        weights have not come by then they end as aborted, and nothing is sampled.
        """
        ...

    async def wake(self, tags: tuple[str, ...] = ()) -> None:
        """Take memory again after `sleep`: tags `weights`, `kv_cache`, or none for both.

        `weights` alone lets an update in while the memory of the cache is still somebody else's.
        """
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
    weight_format: str = setting(
        "dtype",
        "Precision of the weights that an engine gets and holds: that of dtype, or fp8 for the layers' matrices (e4m3 "
        "in blocks of 128 x 128, each with a scale).",
        choices=("dtype", "fp8"),
    )
    tensor_parallel: int = setting(
        1, "Devices that one engine is split over, each with a part of every layer.", ge=1, le=4096
    )
    max_running: int = setting(64, "Samples decoded together at most.", "samples", ge=1, le=2**20)
    max_model_len: int = setting(4096, "Prompt and completion together at most.", "tokens", ge=8, le=2**30)
    options: dict[str, Any] = setting({}, "Extras of the backend, checked against its own settings.")


@dataclass(frozen=True, kw_only=True)
class CacheNeeds:
    """What a rollout backend is told of a model, and of a device, to say what its cache will take there.

    Args:
        device_bytes: memory of the device; 0 where nobody knows.
        weight_bytes: of the weights on it.
        token_bytes: keys and values of one token on it.
    """

    device_bytes: int
    weight_bytes: int
    token_bytes: float


@dataclass(frozen=True, kw_only=True)
class CacheBudget:
    """What an engine takes of one device: paged, so that samples for which there is no room wait.

    A backend may have a static `cache_budget(settings: RolloutEngineSettings, needs: CacheNeeds) -> CacheBudget`, which
    a plan asks. Of a backend without it the plan says that all running samples may grow to their longest.

    Args:
        cache_bytes: set aside for keys and values; 0 where it depends on a device that nobody knows.
        limit_bytes: for weights and cache together; 0: all of the device.
        advice: what to change where weights and one sample of `max_model_len` do not fit.
    """

    cache_bytes: int
    limit_bytes: int = 0
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class RolloutEngineConfig(RolloutEngineSettings):
    """What every rollout backend needs to start."""

    model_path: str = setting(REQUIRED, "Hugging Face model folder: config.json, safetensors, tokenizer.")
    trust_remote_code: bool = setting(False, "Run code that comes with the model folder.")
    num_threads: int = setting(0, "CPU threads; 0 leaves the choice to the launcher.", "threads", ge=0)
    trace_folder: str = setting("", "Where an engine that traces itself writes; empty: it will not be asked to.")
