"""The training contract: what every engine that updates weights takes and gives, and what all do with an update.

Shapes: T tokens of one sequence, N loss tokens of one micro-batch (packed, no padding), S sequences in it.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, Self, TypeVar, runtime_checkable

import numpy as np

from offbeat_core._config.setting import REQUIRED, setting
from offbeat_core._contracts.metrics import DeferredMetrics, Metric, Metrics
from offbeat_core._contracts.requests import Floats
from offbeat_core._contracts.trajectory import TrainSequence
from offbeat_core._errors import ConfigError, ModelError, OffbeatError

TensorT = TypeVar("TensorT")


@dataclass(frozen=True, kw_only=True)
class LossTokens(Generic[TensorT]):
    """The loss tokens of one micro-batch, packed: what a loss function reads.

    Args:
        logprobs_N: [N] float32, nats, carries gradient.
        entropy_N: [N] float32, nats; carries gradient when the engine was asked for it.
        sequence_N: [N] int64 in [0, S), sorted: the sequence of each token.
        num_sequences: S.
        extras: the sequences' extras at the loss tokens, each [N] float32.
        total_tokens: loss tokens of the whole update, over all micro-batches and ranks.
        total_sequences: sequences with at least one loss token in the whole update.
    """

    logprobs_N: TensorT
    entropy_N: TensorT
    sequence_N: TensorT
    num_sequences: int
    extras: dict[str, TensorT]
    total_tokens: int
    total_sequences: int


LossMetrics = Metrics | DeferredMetrics
LossFunction = Callable[[LossTokens[Any]], tuple[Any, LossMetrics]]
"""Maps loss tokens to (scalar loss, metrics). The micro-batches' losses are summed, so divide by the totals.

With `DeferredMetrics`, and no other look at a number on the device, nothing waits between micro-batches.
"""


WeightPart = Literal["merged", "base", "adapter"]
"""Part of a policy with LoRA: weights with the adapter merged, without it, or its tensors alone with PEFT's names."""


class TrainEngine(Protocol):
    """Holds a model and its optimizer. One update is any number of `forward_backward`, then one `step`.

    On several ranks every rank holds an engine and calls the same methods in the same order with the same arguments:
    the sequences of the whole update, not a share of them. The engine divides the work, and every rank is given the
    same answer, with metrics over all ranks. The loss function is called for the sequences of its own rank only, and
    must not wait for other ranks.

    An engine may have a property `replay_problem`, a text: why it cannot replay the routes of sequences, or "" where it
    can. It does so in `forward_backward` and `logprobs`, but not for the reference. An engine without it cannot, and
    ignores them.

    An engine may have a property `float32_weights`, a frozenset: names of the tensors that stay in float32 whatever
    format the others are in, such as routers' correction biases. Trainer and sampling engines compute with them in
    float32, so that is how they travel, by any channel, and how they are proved. An engine without it has none.
    """

    def forward_backward(self, sequences: Sequence[TrainSequence], loss: LossFunction) -> Metrics:
        """Split into micro-batches by the token budget, and add up gradients of the summed loss.

        An error that the loss raises on one rank is raised on all.

        Returns:
            The loss function's metrics merged, and the engine's own: `loss` (the sum) and others, such as
            `num_microbatches`, whose names hold no slash.
        """

    def step(self) -> Metrics:
        """Clip, update the weights, clear gradients. A step whose gradient is not finite is refused and counted.

        Returns:
            `grad_norm`, `learning_rate`, `steps_refused`.
        """

    def logprobs(self, sequences: Sequence[TrainSequence], *, reference: bool = False) -> list[Floats]:
        """[T] float32 nats per sequence; 0 where loss_mask is False. `reference` asks the frozen first policy."""

    def weights(self, dtype: str | None = None, *, part: WeightPart = "merged") -> Any:
        """Iterate (Hugging Face name, tensor) in one fixed order.

        On several ranks each step gathers a whole tensor, so every rank iterates to the end, whichever ranks need them.

        Args:
            dtype: format in which floating-point tensors are wanted, such as "bfloat16"; None: the engine's own. A rank
                rounds its part before it is gathered, so that fewer bytes travel. What is not gathered may come in the
                engine's own format, and the caller converts it. `float32_weights` are never rounded.
            part: of a policy with LoRA; without, "merged" and "base" are the same, and "adapter" is nothing.
        """

    def save_weights(self, folder: Path) -> None:
        """Write a folder in Hugging Face format: weights with LoRA merged, config, tokenizer."""

    def save(self, folder: Path) -> None:
        """Write what `save_weights` writes, and optimizer, schedule and RNG beside it, into a folder all ranks see.

        Everything is on disk when it returns on any rank; publishing it by a rename is the caller's.
        """

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, on whatever number of ranks."""

    def close(self) -> None:
        """Free everything."""


@runtime_checkable
class SleepingTrainEngine(TrainEngine, Protocol):
    """A training engine that can lend its device to rollout engines between updates. All ranks get the same calls."""

    def sleep(self, level: int) -> None:
        """Give memory back: level 1 all but the weights, which can still be handed out; level 2 the weights too.

        Everything is kept where it takes no memory of the device, and `wake` brings it back. Until then a method that
        needs it raises. Sleeping again, or deeper, is fine.

        Raises:
            ConfigError: another level.
            OffbeatError: in the midst of an update; or there is no room for what is put away.
        """

    def wake(self, tags: tuple[str, ...] = ()) -> None:
        """Take memory again after `sleep`: tags `weights`, `optimizer` (all else), or none for both."""


@runtime_checkable
class RecoverableTrainEngine(TrainEngine, Protocol):
    """A training engine whose ranks hold copies of each other's state. All ranks get the same calls.

    Attributes:
        copies: what this rank holds, which outlives the engine; None where the settings ask for no copies.
    """

    copies: Any

    def keep_copies(self, version: int, note: bytes = b"") -> None:
        """Copy the state of each rank to another one, in place of the copies of the version before.

        It may return before they have arrived: those of the version before are held until then, and the next call
        waits.

        Args:
            version: grows with each call; the same on all ranks.
            note: kept with this rank's state.
        """

    @classmethod
    def recover(cls, config: "TrainEngineConfig", mesh: Any, copies: Any) -> tuple[Self, int, bytes]:
        """Make the engine anew in the newest state of which every part is left, in place of `create`.

        What a model was checked for when it was created is not checked again.

        Args:
            config: as it was created with, on all ranks.
            mesh: of the ranks, as many as before, each in the place that it had.
            copies: of this rank's engine before; None on a rank that takes the place of one that has died.

        Returns:
            The engine, the version of its state, and the note that this rank gave, or the one whose place it takes.

        Raises:
            OffbeatError: there is no such state: a rank has died together with the one that held its copy.
        """


@dataclass(frozen=True, kw_only=True)
class TrainLayout:
    """Layout of a trainer's ranks: how they share the model and its updates.

    Args:
        dp, cp, tp, pp: data, context, tensor and pipeline parallel; their product is the number of ranks.
        ep: expert parallel, a second way of counting the ranks of a stage.
        zero_stage: what data and context parallel ranks share out: 0 nothing, 1 the optimizer's state, 2 gradients
            too, 3 weights too. Source: arXiv:1910.02054, figure 1.
        replicas: of what data and context parallel ranks share out, each over an equal part of them.
        weight_bytes: of one weight that the model computes with.
        frozen_weight_bytes: of one that adapters leave as it is, where it is held in a narrower format; embedding and
            head are then held in `vocabulary_bytes`. 0: as any other.
        gradient_bytes: of one gradient that is kept until the step.
        optimizer_bytes: of the optimizer's state of one weight: two float32 moments, and 4 more for a float32 copy;
            less where moments are held in other formats, and not a whole number where they have scales.
        vocabulary_optimizer_bytes: of the optimizer's state of one weight of embedding and head, where another rule
            updates these; 0: as any other.
        whole_gradient_bytes: of one gradient of all weights that each data parallel rank holds between micro-batches,
            beside its part of the sums; 0 where ranks add up gradients with each micro-batch.
        vocabulary_bytes: of one number of embedding and head, and of its gradient, where ranks gather them.
        whole_parameters: of the model, that each of the tensor parallel ranks holds whole.
        offloads_optimizer: the optimizer's state waits in main memory, and passes through the device in each step.
        offloads_inputs: inputs of layers, where these are recomputed, wait in main memory for the backward pass.
        fuses_recurrence: layers with the gated delta rule compute with kernels that keep little but their inputs for
            the backward pass, on devices other than processors.
        copied_bytes: of the copies of states, at most, for each weight that a rank trains: in main memory.
        kernels: description of what computes on the device, where the backend has a choice.
        max_sequence_tokens: longest sequence for which the backend computes what the model's family computes; 0 for
            any. (A backend may find out about a shorter one when it loads the weights.)
        max_sequence_reason: what changes beyond it, and the key of the model's config.json that says so.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero_stage: int = 0
    replicas: int = 1
    weight_bytes: int = 4
    frozen_weight_bytes: float = 0
    gradient_bytes: int = 4
    optimizer_bytes: float = 8
    vocabulary_optimizer_bytes: float = 0
    whole_gradient_bytes: int = 0
    vocabulary_bytes: int = 4
    whole_parameters: int = 0
    offloads_optimizer: bool = False
    offloads_inputs: bool = False
    fuses_recurrence: bool = False
    copied_bytes: int = 0
    kernels: str = field(default="", compare=False)
    max_sequence_tokens: int = 0
    max_sequence_reason: str = field(default="", compare=False)

    @property
    def num_ranks(self) -> int:
        """Return how many train together."""
        return self.dp * self.cp * self.tp * self.pp

    def held_bytes(self, num_parameters: int, *, trains_all: bool = True) -> int:
        """Bytes of weights on one rank, and of their gradients and optimizer state where all of them train.

        Embedding and head are counted as other weights are.
        """
        whole = ((num_parameters - self.whole_parameters) // self.tp + self.whole_parameters) // self.pp
        parts: list[tuple[int, float]] = [
            (3, self.weight_bytes if trains_all else self.frozen_weight_bytes or self.weight_bytes)
        ]
        if trains_all:
            parts += [(2, self.gradient_bytes), (1, self.optimizer_bytes)]
        shares = (
            (size, self.dp * self.cp // self.replicas if self.zero_stage >= stage else 1) for stage, size in parts
        )
        return sum(int(whole * size // share) for size, share in shares)

    def __str__(self) -> str:
        sizes = {axis: getattr(self, axis) for axis in ("tp", "cp", "pp", "dp", "ep")}
        shared = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"
        return ", ".join(filter(None, (shared, self.kernels)))


class TrainBackend(Protocol):
    """Class that a package registers under the entry point `offbeat.engine`.

    A class attribute `heads` names the values of `TrainEngineConfig.head` that it knows; without one it is "tokens".
    Another, `replays_routes`, says that its engines may have no `replay_problem`, see `TrainEngine`; `computes_exactly`
    that they and sampling engines that say so too find the same bits with their option numerics = "exact".
    """

    def plan(self, config: "TrainEngineConfig", num_ranks: int = 1) -> TrainLayout:
        """Check what can be checked before anything starts, and say how the ranks will share the model.

        Starts no process, joins no group and reads no weights; needs no device but those that the settings name.

        Args:
            config: of the engine; its options say how the ranks share the model, where the backend knows several ways.
            num_ranks: processes that will train together, on devices of the kind that `config.device` names.

        Raises:
            BackendError: what the backend needs is not installed; with the install line.
            ConfigError: a setting or option is out of range, or so many ranks cannot share this model that way.
            ModelError: the model folder is missing, corrupt, or of a family that is not supported.
        """

    def create(self, config: "TrainEngineConfig", mesh: Any = None) -> TrainEngine:
        """Load the model and make the optimizer.

        Args:
            config: the same on all ranks.
            mesh: offbeat-mesh's, of the ranks that train together; with no other axis than dp it is so many ranks,
                which the engine arranges as `plan` said. None for one process.

        Raises:
            BackendError, ConfigError, ModelError: as `plan`, and of weights that are missing or of another model.
        """


@dataclass(frozen=True, kw_only=True)
class TrainEngineSettings:
    """Settings of any training backend that a user may choose."""

    device: str = setting("auto", "auto, cpu, or a device such as cuda:0.")
    dtype: str = setting("float32", "Number format of the matrix products.", choices=("float32", "bfloat16"))
    learning_rate: float = setting(1e-6, "Peak learning rate.", ge=0)
    schedule: str = setting("constant", "Learning rate after the warm-up.", choices=("constant", "linear", "cosine"))
    warmup_steps: int = setting(0, "Optimizer steps over which the learning rate rises from 0.", "steps", ge=0)
    min_learning_rate_ratio: float = setting(0.0, "End of the schedule, as a share of the peak.", ge=0, le=1)
    weight_decay: float = setting(0.0, "AdamW weight decay on matrices.", ge=0)
    adam_beta1: float = setting(0.9, "AdamW first moment decay.", ge=0, lt=1)
    adam_beta2: float = setting(0.95, "AdamW second moment decay.", ge=0, lt=1)
    max_grad_norm: float = setting(1.0, "Gradients are scaled down to this norm; 0 turns it off.", ge=0)
    max_tokens_per_microbatch: int = setting(
        8192, "Token budget of one forward and backward pass: bounds memory, changes no result.", "tokens", ge=16
    )
    activation_checkpointing: bool = setting(False, "Recompute activations in the backward pass to save memory.")
    lora_rank: int = setting(0, "Rank of LoRA adapters; 0 trains all weights.", ge=0, le=65536)
    lora_alpha: float = setting(0.0, "LoRA scale; 0 means twice the rank.", ge=0)
    seed: int = setting(0, "Seed of everything random in the engine.", ge=0)
    options: dict[str, Any] = setting({}, "Extras of the backend, checked against its own settings.")

    @property
    def lora_scale(self) -> float:
        """Return what the product of an adapter's matrices is multiplied with: alpha / rank. There must be adapters."""
        return (self.lora_alpha or 2.0 * self.lora_rank) / self.lora_rank


@dataclass(frozen=True, kw_only=True)
class TrainEngineConfig(TrainEngineSettings):
    """Settings that every training backend needs to start."""

    model_path: str = setting(REQUIRED, "Hugging Face model folder: config.json, safetensors, tokenizer.")
    trust_remote_code: bool = setting(False, "Run code that comes with the model folder.")
    total_steps: int = setting(0, "Updates after which linear and cosine reach their end; 0: set by the app.", ge=0)
    head: str = setting(
        "tokens",
        "What the model answers at a loss token: tokens, its log-probability; score, one number that a sequence "
        "classification head reads off the token before it.",
        choices=("tokens", "score"),
    )
    adam_eps: float = setting(1e-8, "AdamW epsilon.", gt=0)
    num_threads: int = setting(0, "CPU threads; 0 leaves the choice to the launcher.", ge=0)


def learning_rate_at(step: int, config: TrainEngineConfig) -> float:
    """Learning rate of update `step`, counted from 0.

    It rises linearly over the warm-up, reaching its peak at update `warmup_steps`, and falls to
    `min_learning_rate_ratio` of it at update `total_steps`, where it stays.
    """
    peak, warmup, floor = config.learning_rate, config.warmup_steps, config.min_learning_rate_ratio
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return peak
    done = min((step - warmup) / max(config.total_steps - warmup, 1), 1.0)
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (floor + (1.0 - floor) * left)


def check_schedule(config: TrainEngineConfig, *, length_keys: Sequence[str] = ()) -> None:
    """Refuse a schedule that has no end, or ends before its warm-up does, and a scale of adapters that are not there.

    Args:
        config: of the engine.
        length_keys: an application's settings that say how many steps a run makes, such as "engine.max_updates"; its
            other settings of the engine are those of section `engine`. Empty: errors name only the engine's.

    Raises:
        ConfigError: with the setting to change.
    """
    section = "engine." if length_keys else ""
    if config.lora_alpha and not config.lora_rank:
        raise ConfigError(f"{section}lora_alpha has no effect while {section}lora_rank is 0: set both or neither")
    if config.schedule == "constant" or config.total_steps > config.warmup_steps:
        return
    if length_keys:
        raise ConfigError(
            f"engine.schedule = {config.schedule!r} needs more optimizer steps than engine.warmup_steps = "
            f"{config.warmup_steps}: the run makes {config.total_steps} ({', '.join(length_keys)}); make it longer, "
            "lower engine.warmup_steps, or set engine.schedule = 'constant'"
        )
    raise ConfigError(
        f"schedule {config.schedule!r} needs total_steps above warmup_steps: "
        f"got {config.total_steps} and {config.warmup_steps}; set total_steps, or schedule = 'constant'"
    )


def check_token_ids(sequences: Sequence[TrainSequence], vocabulary: int) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        ModelError: with the range found.
    """
    found = [sequence.ids for sequence in sequences if len(sequence.ids)]
    low = min((int(ids.min()) for ids in found), default=0)
    high = max((int(ids.max()) for ids in found), default=0)
    if low < 0 or high >= vocabulary:
        raise ModelError(
            f"token ids must be in [0, {vocabulary}): got {low} to {high}; use the tokenizer of this model"
        )


def loss_extras(sequences: Sequence[TrainSequence]) -> dict[str, Floats]:
    """Return the extras of a micro-batch's sequences at their loss tokens, each [N] float32, by name in order."""
    return {
        name: np.concatenate([each.extras[name][each.loss_mask] for each in sequences]).astype(np.float32)
        for name in sorted(sequences[0].extras)
    }


def call_loss(loss: LossFunction, tokens: LossTokens[TensorT]) -> tuple[TensorT, LossMetrics]:
    """Call the caller's loss and check what it returns, before anything is done with it that other ranks wait for.

    Returns:
        A scalar, and metrics: deferred ones as they are, of others the numbers are plain ones.

    Raises:
        OffbeatError: it returned something else; and whatever the loss raises.
    """
    value: Any
    value, metrics = loss(tokens)
    is_tensor = isinstance(value, type(tokens.logprobs_N))
    if not is_tensor or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)
        raise OffbeatError(f"the loss must return (scalar tensor, metrics): got {got} for the scalar")
    if isinstance(metrics, DeferredMetrics):
        return value.reshape(()), metrics
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise OffbeatError(f"the loss must return its metrics as Metric(value=...): got {name} = {metric!r}")
    return value.reshape(()), {
        name: Metric(value=float(metric.value), weight=float(metric.weight), how=metric.how)
        for name, metric in metrics.items()
    }


def count_micro_batch(sequences: Sequence[TrainSequence], num_computed: int, loss: float) -> Metrics:
    """Return what an engine reports of a micro-batch beside the metrics of the loss function.

    Args:
        sequences: of the micro-batch.
        num_computed: tokens that were computed for them.
        loss: of the micro-batch.
    """
    counts = {
        "loss": loss,
        "num_microbatches": 1.0,
        "packed_tokens": float(num_computed),
        "sequence_tokens": float(sum(len(sequence.ids) for sequence in sequences)),
    }
    return {name: Metric(value=value, how="sum") for name, value in counts.items()}


def spread_values(
    sequences: Sequence[TrainSequence], members: Sequence[Sequence[int]], values: Sequence[Floats]
) -> list[Floats]:
    """Bring each share's values, one per loss token in its order, to the sequences.

    Args:
        sequences: of the whole update.
        members: for each share, which of them it computed.
        values: of each share.

    Returns:
        [T] float32 for each sequence, 0 outside the loss mask.
    """
    found = [np.zeros(len(sequence.ids), np.float32) for sequence in sequences]
    for share, theirs in zip(members, values, strict=True):
        start = 0
        for member in share:
            mask = sequences[member].loss_mask
            stop = start + int(mask.sum())
            found[member][mask] = theirs[start:stop]
            start = stop
    return found


def digest_sequences(sequences: Sequence[TrainSequence]) -> str:
    """Digest of everything that the plan of an update and its loss read."""
    digest = hashlib.blake2b(digest_size=16)
    for sequence in sequences:
        digest.update(f"group {sequence.group}".encode())
        digest.update(f"routes {[(each.start, each.shape, each.highest) for each in sequence.routes]}".encode())
        packed = [each.packed for each in sequence.routes]
        unnamed = [("", array) for array in (sequence.ids, sequence.loss_mask, *sequence.images, *packed)]
        for name, array in (*unnamed, *sorted(sequence.extras.items())):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()
