"""The training contract: what every engine that updates weights takes and gives.

Shapes: T tokens of one sequence, N loss tokens of one micro-batch (packed, no padding), S sequences in it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from offbeat_types._errors import ShapeError
from offbeat_types._requests import Ids, Image, check_images
from offbeat_types._rollout import Floats
from offbeat_types._settings import REQUIRED, setting

TensorT = TypeVar("TensorT")

Aggregation = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number with the way it combines over micro-batches, ranks and steps declared beside it.

    Args:
        value: the number.
        weight: its weight in a mean, such as the tokens it was taken over; ignored by the other aggregations.
        how: how two of them become one.
    """

    value: float
    weight: float = 1.0
    how: Aggregation = "mean"

    def merge(self, other: "Metric") -> "Metric":
        """Combine with a later metric of the same name and aggregation."""
        if self.how != other.how:
            raise ValueError(f"cannot merge a {self.how} with a {other.how}")
        if self.how == "mean":
            weight = self.weight + other.weight
            value = (self.value * self.weight + other.value * other.weight) / weight if weight else 0.0
            return Metric(value=value, weight=weight, how="mean")
        if self.how == "last":
            return other
        value = {"sum": self.value + other.value, "max": max(self.value, other.value)}.get(
            self.how, min(self.value, other.value)
        )
        return Metric(value=value, weight=self.weight + other.weight, how=self.how)


Metrics = dict[str, Metric]


def merge_metrics(batches: Sequence[Mapping[str, Metric]]) -> Metrics:
    """Merge metrics by name, in order."""
    merged: Metrics = {}
    for batch in batches:
        for name, metric in batch.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


@dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """One token sequence to learn from. Index t of every array belongs to token t, predicted from tokens before t.

    Args:
        ids: [T] int32.
        loss_mask: [T] bool; True where the token enters the loss. loss_mask[0] must be False.
        extras: per-token inputs of the loss, each [T] float32; entries where loss_mask is False are not read.
        images: each [H, W, 3] uint8, in the order of their placeholders, as in `GenerateRequest`. A placeholder in the
            loss was sampled: it is a token like any other, and stands for no image.

    Raises:
        ShapeError: the arrays differ in shape, or loss_mask[0] is True.
        DataError: an image that is not one.
    """

    ids: Ids
    loss_mask: npt.NDArray[np.bool_]
    extras: dict[str, Floats] = field(default_factory=dict)
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        check_images(self.images, "a sequence to learn from")
        shapes = {"loss_mask": self.loss_mask.shape, **{name: array.shape for name, array in self.extras.items()}}
        wrong = {name: shape for name, shape in shapes.items() if shape != self.ids.shape}
        if wrong:
            raise ShapeError(f"every array of a sequence needs the shape of ids {self.ids.shape}: got {wrong}")
        if len(self.ids) and self.loss_mask[0]:
            raise ShapeError("loss_mask[0] must be False: nothing comes before the first token to predict it from")


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


LossFunction = Callable[[LossTokens[Any]], tuple[Any, Metrics]]
"""Maps loss tokens to (scalar loss, metrics). The micro-batches' losses are summed, so divide by the totals."""


class TrainEngine(Protocol):
    """Holds a model and its optimizer. One update is any number of `forward_backward`, then one `step`.

    On several ranks every rank holds an engine and calls the same methods in the same order with the same arguments:
    the sequences of the whole update, not a share of them. The engine divides the work, and every rank is given the
    same answer, with metrics over all ranks. The loss function is called for the sequences of its own rank only, and
    must not wait for other ranks.
    """

    def forward_backward(self, sequences: Sequence[TrainSequence], loss: LossFunction) -> Metrics:
        """Split into micro-batches by the token budget, and add up gradients of the summed loss.

        An error that the loss raises on one rank is raised on all.

        Returns:
            The loss function's metrics merged, and the engine's own: `loss` (the sum) and others, such as
            `num_microbatches`, whose names hold no slash.
        """
        ...

    def step(self) -> Metrics:
        """Clip, update the weights, clear gradients. A step whose gradient is not finite is refused and counted.

        Returns:
            `grad_norm`, `learning_rate`, `steps_refused`.
        """
        ...

    def logprobs(self, sequences: Sequence[TrainSequence], *, reference: bool = False) -> list[Floats]:
        """[T] float32 nats per sequence; 0 where loss_mask is False. `reference` asks the frozen first policy."""
        ...

    def weights(self) -> Any:
        """Iterate (Hugging Face name, tensor) in one fixed order; LoRA is merged.

        On several ranks each step gathers a whole tensor, so every rank iterates to the end, whoever needs them.
        """
        ...

    def save_weights(self, folder: Path) -> None:
        """Write a folder in Hugging Face format: weights with LoRA merged, config, tokenizer."""
        ...

    def save(self, folder: Path) -> None:
        """Write what `save_weights` writes, and optimizer, schedule and RNG beside it, into a folder all ranks see.

        Everything is on disk when it returns on any rank; publishing it by a rename is the caller's.
        """
        ...

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, on whatever number of ranks."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


@runtime_checkable
class SleepingTrainEngine(TrainEngine, Protocol):
    """A training engine that can lend its device to rollout engines between updates. Every rank is told alike."""

    def sleep(self, level: int) -> None:
        """Give memory back: level 1 all but the weights, which can still be handed out; level 2 the weights too.

        Everything is kept where it takes no memory of the device, and `wake` brings it back. Until then a method that
        needs it raises. Sleeping again, or deeper, is fine.

        Raises:
            ConfigError: another level.
            OffbeatError: in the midst of an update; or there is no room for what is put away.
        """
        ...

    def wake(self, tags: tuple[str, ...] = ()) -> None:
        """Take memory again after `sleep`: tags `weights`, `optimizer` (all else), or none for both."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainLayout:
    """How the ranks of a trainer share the model and its updates.

    Args:
        dp, cp, tp, pp: data, context, tensor and pipeline parallel; their product is the number of ranks.
        ep: expert parallel, a second way of counting the ranks of a stage.
        zero_stage: what data and context parallel ranks share out: 0 nothing, 1 the optimizer's state, 2 gradients
            too, 3 weights too. Source: arXiv:1910.02054, figure 1.
        weight_bytes: of one weight that the model computes with.
        gradient_bytes: of one gradient that is kept until the step.
        optimizer_bytes: of the optimizer's state of one weight: two float32 moments, and 4 more for a float32 copy.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero_stage: int = 0
    weight_bytes: int = 4
    gradient_bytes: int = 4
    optimizer_bytes: int = 8

    @property
    def num_ranks(self) -> int:
        """How many train together."""
        return self.dp * self.cp * self.tp * self.pp

    def held_bytes(self, num_parameters: int, *, trains_all: bool = True) -> int:
        """Bytes of weights on one rank, and of their gradients and optimizer state where all of them train."""
        whole = num_parameters // (self.tp * self.pp)
        parts = [(3, self.weight_bytes)]
        if trains_all:
            parts += [(2, self.gradient_bytes), (1, self.optimizer_bytes)]
        return sum(whole * size // (self.dp * self.cp if self.zero_stage >= stage else 1) for stage, size in parts)

    def __str__(self) -> str:
        sizes = {axis: getattr(self, axis) for axis in ("tp", "cp", "pp", "dp", "ep")}
        return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"


class TrainBackend(Protocol):
    """What a package registers under the entry point `offbeat.engine`: the class of its engine."""

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
        ...

    def create(self, config: "TrainEngineConfig", mesh: Any = None) -> TrainEngine:
        """Load the model and make the optimizer.

        Args:
            config: the same on all ranks.
            mesh: offbeat-mesh's, of the ranks that train together; with no other axis than dp it is so many ranks,
                which the engine arranges as `plan` said. None for one process.

        Raises:
            BackendError, ConfigError, ModelError: as `plan`, and of weights that are missing or of another model.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class TrainEngineSettings:
    """What a user may set of any training backend."""

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


@dataclass(frozen=True, kw_only=True)
class TrainEngineConfig(TrainEngineSettings):
    """What every training backend needs to start."""

    model_path: str = setting(REQUIRED, "Hugging Face model folder: config.json, safetensors, tokenizer.")
    trust_remote_code: bool = setting(False, "Run code that comes with the model folder.")
    total_steps: int = setting(0, "Updates after which linear and cosine reach their end; 0: set by the app.", ge=0)
    adam_eps: float = setting(1e-8, "AdamW epsilon.", gt=0)
    num_threads: int = setting(0, "CPU threads; 0 leaves the choice to the launcher.", ge=0)
