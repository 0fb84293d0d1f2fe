"""The rollout contract: what every engine that samples completions does, and what some do besides."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from offbeat_core._config.setting import REQUIRED, setting
from offbeat_core._contracts.requests import (
    Floats,
    GenerateRequest,
    LoraAdapter,
    PauseMode,
    RolloutCapabilities,
    ScoreRequest,
)
from offbeat_core._contracts.trajectory import Completion
from offbeat_core._errors import ConfigError


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
        num_decoding: samples whose next token is being computed, so that `num_tokens` must soon be larger; 0 while the
            engine is paused, sleeps, takes weights, or computes nothing but prompts. An engine that always says 0 is
            never found to be stuck.
    """

    version: int
    num_running: int
    num_waiting: int
    num_tokens: int
    busy_s: float
    uptime_s: float
    num_decoding: int = 0


@dataclass(frozen=True, kw_only=True)
class WeightProof:
    """Proof of the weights that a receiver holds, computed from its tensors.

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
    """Return what `RolloutEngine.wake` is to take again.

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

    def prove(self, read: Callable[[str], Any]) -> WeightProof:
        """Read every tensor back with `read(name)` and return what the receiver holds."""


class RolloutEngine(Protocol):
    """Samples completions. All methods are safe to await at once from one event loop.

    A class that is registered under `offbeat.rollout` also has `async create(config: RolloutEngineConfig)`, which loads
    the model. It may have class attributes that are asked before there is an engine: `whole_logprobs`,
    `loads_on_device`, `parks_cache_alone`, `returns_routes`, `workers_receive`, `computes_exactly`,
    `dropped_settings`, and functions
    `check_installed`, `check_model`, `refuses_adapters`, `held_bytes`, `cache_budget`, `notices_of`,
    `capabilities_on`; rollout-torch and rollout-vllm have examples of all.
    """

    @property
    def capabilities(self) -> RolloutCapabilities:
        """Return what it can do. The rest of the contract holds within this: what is beyond it is a ConfigError."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Return `request.num_samples` completions, in order.

        While the engine is paused with `keep` the call waits and then continues under the new weights; with `abort`
        it returns what it has, marked `aborted`.
        """

    async def abort(self, request_id: str) -> None:
        """End a request now: its `generate` returns what it has, marked `aborted`. Unknown ids are ignored."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling: `wait` finishes what is in flight, `abort` returns it unfinished, `keep` holds it."""

    async def resume(self) -> None:
        """Sample again after `pause`."""

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

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter. Unknown names are ignored.

        Raises:
            OffbeatError: a request in flight uses it.
        """

    async def sleep(self, level: int) -> None:
        """Give memory back: level 1 the KV cache, level 2 the weights too, which `update_weights` must bring anew.

        Samples held by `pause("keep")` stay in flight, and continue with their tokens after `wake` and `resume`; if
        the weights have not arrived by then, they end as aborted and nothing is sampled.
        """

    async def wake(self, tags: tuple[str, ...] = ()) -> None:
        """Take memory again after `sleep`: tags `weights`, `kv_cache`, or none for both.

        `weights` alone allows an update while the memory of the cache is still used by another process.
        """

    async def health(self) -> EngineHealth:
        """Return at once, whatever the engine is doing."""

    async def close(self) -> None:
        """Free everything. Requests in flight return as aborted."""


@runtime_checkable
class ReceivingEngine(RolloutEngine, Protocol):
    """A rollout engine whose workers take weights by themselves, each on its own device.

    Its capabilities declare it (`RolloutCapabilities.receives`), and before there is an engine its class, by the
    attribute `workers_receive`.
    """

    async def receive_weights(
        self, transport: str, addresses: Sequence[str], version: int, deadline_s: float, *, name: str
    ) -> WeightProof:
        """Take every tensor of a version from its senders, and serve it from now on, as after `update_weights`.

        Args:
            transport: name of the sender's, which brings weights to devices.
            addresses: of the sender to all workers, or for each worker, by rank, of its own. A sender waits for all
                workers of the engine that have its address.
            version: policy version.
            deadline_s: from here until all is proved and confirmed.
            name: of the engine, for errors: its workers are called "NAME.worker-0" and so on.

        Returns:
            What the workers hold together.

        Raises:
            WeightSyncError, DeadlineError: a worker, the sender or another engine failed, or the bytes differ. The
                engine then serves the old version or refuses.
        """


DroppedSettings = Mapping[str, tuple[str, ...]]
"""Type of `dropped_settings`, which the class of a rollout backend may have.

Settings that its process must not inherit from the user's environment: variable -> names, where the variable is a list
of `name:value` between commas, such as PYTORCH_ALLOC_CONF.
"""


@runtime_checkable
class ScoringEngine(RolloutEngine, Protocol):
    """A rollout engine that scores, too. Its capabilities declare it (`RolloutCapabilities.scores`)."""

    async def score(self, request: ScoreRequest) -> list[Floats]:
        """Log-probabilities of the continuations' tokens under the weights that are served.

        While the engine is paused or sleeps it scores nothing: the call waits, or raises.

        Returns:
            One [T] float32 for each continuation, nats, in order.

        Raises:
            DataError: see `ScoreRequest.check`.
            ConfigError: a temperature that the engine cannot score at.
        """


OnToken = Callable[[int, int, float], None]
"""Called with the number of the sample in its request, the token's id and its log-probability, nats."""


@runtime_checkable
class StreamingEngine(RolloutEngine, Protocol):
    """A rollout engine that reports each token when it is sampled."""

    async def stream(self, request: GenerateRequest, notify: OnToken) -> list[Completion]:
        """Do what `generate` does, and call `notify` in the event loop for each token before the completions return."""


@dataclass(frozen=True, kw_only=True)
class TracePlan:
    """Trace settings of one role.

    Args:
        role: such as "trainer-0".
        folder: takes a file `ROLE-STEP.json` for each step, in Chrome's format.
        first, last: the steps, from `first` up to, not including, `last`.
        max_bytes: of all its files.
    """

    role: str
    folder: str
    first: int
    last: int
    max_bytes: int


@runtime_checkable
class TracingEngine(RolloutEngine, Protocol):
    """A rollout engine that traces itself, in whichever processes it computes.

    Its capabilities declare it (`RolloutCapabilities.traces`), where it was given `RolloutEngineConfig.trace_folder`.
    """

    async def begin_trace(self) -> None:
        """Trace from here on."""

    async def end_trace(self) -> list[Path]:
        """Trace no further.

        Returns:
            One file in Chrome's format for each rank, in `trace_folder`: the caller's, to move or to remove.
        """


@dataclass(frozen=True, kw_only=True)
class RolloutEngineSettings:
    """Settings of any rollout backend that a user may choose."""

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
class HeldBytes:
    """Bytes of one number as a rollout engine holds it.

    A backend may have a static `held_bytes(settings: RolloutEngineSettings) -> HeldBytes`, which a plan asks. Of a
    backend without it the plan says that all numbers have the format of `dtype`.

    Args:
        matrices: of one weight of the layers' matrices; None: the format of `dtype`.
        cache: of one number of keys and values; None: the format of `dtype`.
        state: of one number of the states of layers with the gated delta rule; None: what the model's config.json says,
            or the format of `dtype`.
        states_per_sample: states of each such layer that a sample holds at a time.
    """

    matrices: int | None = None
    cache: int | None = None
    state: int | None = None
    states_per_sample: int = 1


@dataclass(frozen=True, kw_only=True)
class CacheNeeds:
    """Facts about a model and a device from which a rollout backend says what its cache will take there.

    Args:
        device_bytes: memory of the device; 0 if unknown.
        weight_bytes: of the weights on it.
        token_bytes: keys and values of one token on it.
        state_bytes: states of one sample on it, however long it is, in a model with the gated delta rule; else 0.
        shares_device: see `RolloutEngineConfig.shares_device`.
    """

    device_bytes: int
    weight_bytes: int
    token_bytes: float
    state_bytes: float = 0
    shares_device: bool = False


@dataclass(frozen=True, kw_only=True)
class CacheBudget:
    """Memory that an engine takes of one device: paged, so that samples for which there is no room wait.

    A backend may have a static `cache_budget(settings: RolloutEngineSettings, needs: CacheNeeds) -> CacheBudget`, which
    a plan asks. Of a backend without it the plan says that all running samples may grow to their longest.

    Args:
        cache_bytes: set aside for keys and values; 0 if it depends on a device whose memory is unknown.
        limit_bytes: for weights and cache together; 0: all of the device.
        advice: what to change where weights and one sample of `max_model_len` do not fit.
    """

    cache_bytes: int
    limit_bytes: int = 0
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class RolloutEngineConfig(RolloutEngineSettings):
    """Settings that every rollout backend needs to start."""

    model_path: str = setting(REQUIRED, "Hugging Face model folder: config.json, safetensors, tokenizer.")
    trust_remote_code: bool = setting(False, "Run code that comes with the model folder.")
    num_threads: int = setting(0, "CPU threads; 0 leaves the choice to the launcher.", "threads", ge=0)
    shares_device: bool = setting(False, "Others use its device in turn with it, while it sleeps.")
    trace_folder: str = setting("", "Where an engine that traces itself writes; empty: it will not be asked to.")
    return_routes: bool = setting(False, "Say of each completion which experts its tokens took, if the model has any.")
