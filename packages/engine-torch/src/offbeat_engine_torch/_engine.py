"""The trainer: packs sequences, adds up gradients, steps, and hands out weights.

Shapes: T tokens of a sequence or a pack, E hidden size, N loss tokens of a micro-batch, S sequences in it.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from offbeat_dist import Device, open_device
from offbeat_engine_torch._checkpoint import export_weights, load_state, save_state
from offbeat_engine_torch._logprobs import token_logprobs
from offbeat_engine_torch._lora import add_lora, without_lora
from offbeat_engine_torch._model import CausalModel, load_model, plain_name
from offbeat_engine_torch._optimizer import ClippedAdamW, check_schedule
from offbeat_engine_torch._options import TorchEngineOptions, read_options
from offbeat_engine_torch._packing import Pack, lay_out, plan_packs
from offbeat_engine_torch._rows import AttentionPlan
from offbeat_types import (
    ConfigError,
    Floats,
    LossFunction,
    LossTokens,
    Metric,
    Metrics,
    ModelError,
    ShapeError,
    TrainEngineConfig,
    TrainSequence,
    merge_metrics,
)

log = logging.getLogger(__name__)

_FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchTrainEngine:
    """A causal language model and its optimizer in one process: implements `offbeat_types.TrainEngine`.

    Weights, gradients and moments are float32; with dtype bfloat16 the matrix products of the blocks run in bfloat16
    under autocast. Make one with `create`.

    Attributes:
        config: as given to `create`.
        temperature: the sampler's; log-probabilities and entropies are those of softmax(logits / temperature).
        last_refusal: why the last refused step was refused; empty when none was.
    """

    def __init__(
        self, config: TrainEngineConfig, options: TorchEngineOptions, device: Device, model: CausalModel
    ) -> None:
        self.config = config
        self.temperature = options.temperature
        self.last_refusal = ""
        self._options, self._device, self._model = options, device, model
        self._kernel: str = getattr(device, "packed_attention", "rows")
        self._optimizer = ClippedAdamW(_trained(model), config)
        self._reference: CausalModel | None = None
        self._steps_refused = 0
        self._bad_loss = False

    @classmethod
    def create(cls, config: TrainEngineConfig) -> "TorchTrainEngine":
        """Load the model and make the optimizer.

        Raises:
            ConfigError: the device is not here, or a setting or option is out of range.
            ModelError: the model folder is missing, corrupt, or of a family that is not supported.
        """
        options = read_options(config.options)
        check_schedule(config)
        device = open_device(config.device)
        if config.dtype != "float32" and _FORMATS[config.dtype] not in device.autocast_dtypes:
            raise ConfigError(f"device {device.torch_device} does not compute in {config.dtype}; use float32")
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        torch.manual_seed(config.seed)
        model = load_model(config.model_path, device=device.torch_device, trust_remote_code=config.trust_remote_code)
        if config.lora_rank:
            model.whole.requires_grad_(False)
            alpha = config.lora_alpha or 2.0 * config.lora_rank
            add_lora(model.backbone, rank=config.lora_rank, alpha=alpha, seed=config.seed)
        if config.activation_checkpointing:
            whole = model.whole  # transformers renamed the method in 5.2x
            enable = getattr(whole, "activation_checkpointing_enable", None) or whole.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            whole.train()  # dropout is zero already: training mode only turns checkpointing on
        return cls(config, options, device, model)

    def forward_backward(self, sequences: Sequence[TrainSequence], loss: LossFunction) -> Metrics:
        """Add up gradients of the summed loss, one micro-batch at a time.

        Sequences without a loss token take no part. `LossTokens.total_*` count the sequences of this call.

        Args:
            sequences: of any length; one above the token budget goes alone.
            loss: called once per micro-batch; `LossTokens.entropy_N` carries gradient with `entropy_gradient`.

        Returns:
            The loss function's metrics merged, and `loss` (their sum), `num_microbatches`, `packed_tokens` (computed),
            `sequence_tokens` (what they stand for).
        """
        with_loss = [sequence for sequence in sequences if sequence.loss_mask.any()]
        if len({frozenset(sequence.extras) for sequence in with_loss}) > 1:
            raise ShapeError("all sequences of an update need the same extras; give each the arrays the loss reads")
        totals = sum(int(sequence.loss_mask.sum()) for sequence in with_loss), len(with_loss)
        results = []
        for pack in self._packs(with_loss):
            tokens = self._loss_tokens(with_loss, pack, totals)
            value, metrics = loss(tokens)
            self._backward(value)
            results.append({**metrics, **_counts(with_loss, pack, float(value.detach()))})
        return merge_metrics(results)

    def step(self) -> Metrics:
        """Clip, update the weights, clear gradients.

        A step whose loss or gradient norm is not finite changes nothing but the count of refused steps: the weights,
        the moments and the schedule stay; the log and `last_refusal` name the first parameter concerned.

        Returns:
            `grad_norm` (before clipping; weight 0 when refused), `learning_rate`, `steps_refused` (0 or 1).
        """
        optimizer, rate = self._optimizer, self._optimizer.learning_rate
        norm = math.nan if self._bad_loss else optimizer.grad_norm()
        refused = not math.isfinite(norm)
        if refused:
            self._refuse()
        else:
            optimizer.step(norm)
        optimizer.clear()
        self._bad_loss = False
        return {
            "grad_norm": Metric(value=0.0 if refused else norm, weight=0.0 if refused else 1.0),
            "learning_rate": Metric(value=rate, how="last"),
            "steps_refused": Metric(value=float(refused), how="sum"),
        }

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TrainSequence], *, reference: bool = False) -> list[Floats]:
        """Log-probability of each loss token, without gradient.

        Args:
            sequences: of any length.
            reference: ask the first policy: the weights of `model_path`, read again when first asked for, or with
                LoRA the base without adapters.

        Returns:
            [T] float32 nats per sequence; 0 where loss_mask is False.
        """
        model, scope = self._policy(reference=reference)
        found = [np.zeros(len(sequence.ids), np.float32) for sequence in sequences]
        with scope:
            for pack in self._packs(sequences):
                values = self._head(model, pack)[0].float().cpu().numpy()
                bounds = np.searchsorted(pack.sequence_N, np.arange(len(pack.members) + 1))
                for place, member in enumerate(pack.members):
                    here = slice(bounds[place], bounds[place + 1])
                    found[member][pack.token_N[here]] = values[here]
        return found

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate (Hugging Face name, float32 tensor) in the model's order; a tied head once, LoRA merged.

        A tensor is the trainer's own: read it before the next step, and do not write to it.
        """
        return self._model.weights()

    def save_weights(self, folder: Path) -> None:
        """Write a folder that plain transformers loads: weights with LoRA merged, config, tokenizer."""
        export_weights(self._model, folder, tokenizer_from=Path(self.config.model_path).expanduser())

    def save(self, folder: Path) -> None:
        """Write weights as `save_weights`, and optimizer, schedule and random state beside them, synced to disk."""
        self.save_weights(folder)
        save_state(folder, self._model, self._optimizer, self._device, {"steps_refused": self._steps_refused})

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; the next step is the one an undisturbed run would take.

        Raises:
            ModelError: the folder is not a whole checkpoint of this model.
        """
        counts = load_state(folder, self._model, self._optimizer, self._device)
        self._steps_refused = counts["steps_refused"]
        self._optimizer.clear()
        self._bad_loss = False

    def close(self) -> None:
        """Free weights, gradients and moments. The engine cannot be used afterwards."""
        for name in ("_model", "_optimizer", "_reference"):
            self.__dict__.pop(name, None)

    @property
    def vocabulary_size(self) -> int:
        """Rows of the vocabulary head: token ids are below it."""
        return self._model.head.out_features

    @property
    def steps_taken(self) -> int:
        """Updates done, refused ones not counted."""
        return self._optimizer.steps_taken

    @property
    def steps_refused(self) -> int:
        """Updates refused since the run began."""
        return self._steps_refused

    def _packs(self, sequences: Sequence[TrainSequence]) -> Iterator[Pack]:
        budget, share = self.config.max_tokens_per_microbatch, self._options.share_prompts
        for families in plan_packs(sequences, budget=budget, share_prompts=share):
            pack = lay_out(sequences, families)
            self._check_ids(pack)
            yield pack

    def _check_ids(self, pack: Pack) -> None:
        ids = np.concatenate([pack.ids_T, pack.target_N])
        if ids.min() < 0 or ids.max() >= self.vocabulary_size:
            raise ModelError(
                f"token ids must be in [0, {self.vocabulary_size}): got {ids.min()} to {ids.max()}; "
                "use the tokenizer of this model"
            )

    def _loss_tokens(
        self, sequences: Sequence[TrainSequence], pack: Pack, totals: tuple[int, int]
    ) -> LossTokens[Tensor]:
        logprobs, entropy = self._head(self._model, pack)
        names = sorted(sequences[pack.members[0]].extras)
        return LossTokens(
            logprobs_N=logprobs,
            entropy_N=entropy,
            sequence_N=self._tensor(pack.sequence_N),
            num_sequences=len(pack.members),
            extras={name: self._tensor(_extra(sequences, pack, name)) for name in names},
            total_tokens=totals[0],
            total_sequences=totals[1],
        )

    def _head(self, model: CausalModel, pack: Pack) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N] and entropies [N] of a pack's loss tokens."""
        plan = AttentionPlan(pack.segments, self._device.torch_device)
        with self._autocast():
            hidden_TE = model.hidden(self._tensor(pack.ids_T), self._tensor(pack.positions_T), plan, self._kernel)
        matmul = model.head.weight.dtype if self._options.head_dtype == "float32" else torch.bfloat16
        return token_logprobs(
            hidden_TE.index_select(0, self._tensor(pack.predictor_N)),
            model.head.weight,
            model.head.bias,
            self._tensor(pack.target_N),
            scale=model.logit_scale / self.temperature,
            matmul_dtype=matmul,
            entropy_gradient=self._options.entropy_gradient,
        )

    def _backward(self, value: Tensor) -> None:
        if not torch.isfinite(value.detach()):
            self._bad_loss = True  # the step will be refused: its gradients need not be computed
        elif value.requires_grad:
            value.backward()  # type: ignore[no-untyped-call]

    def _refuse(self) -> None:
        self._steps_refused += 1
        name = self._optimizer.first_not_finite()
        where = f"the gradient of {name} is" if name else "the loss is" if self._bad_loss else "the gradient norm is"
        self.last_refusal = f"update {self.steps_taken}: {where} not finite; the weights were left as they were"
        log.warning("step refused (%d so far): %s", self._steps_refused, self.last_refusal)

    def _policy(self, *, reference: bool) -> tuple[CausalModel, AbstractContextManager[None]]:
        """The model to ask, and the state to ask it in."""
        if not reference:
            return self._model, nullcontext()
        if self.config.lora_rank:
            return self._model, without_lora(self._model.whole)
        if self._reference is None:
            config, device = self.config, self._device.torch_device
            self._reference = load_model(config.model_path, device=device, trust_remote_code=config.trust_remote_code)
            self._reference.whole.requires_grad_(False)
        return self._reference, nullcontext()

    def _autocast(self) -> AbstractContextManager[object]:
        if self.config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self._device.torch_device.type, dtype=_FORMATS[self.config.dtype])

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device.torch_device)


def _trained(model: CausalModel) -> dict[str, nn.Parameter]:
    return {plain_name(name): p for name, p in model.whole.named_parameters() if p.requires_grad}


def _extra(sequences: Sequence[TrainSequence], pack: Pack, name: str) -> Floats:
    """[N] float32: one extra of every sequence at its loss tokens."""
    parts = [sequences[member].extras[name][sequences[member].loss_mask] for member in pack.members]
    return np.concatenate(parts).astype(np.float32)


def _counts(sequences: Sequence[TrainSequence], pack: Pack, loss: float) -> Metrics:
    counts = {
        "loss": loss,
        "num_microbatches": 1.0,
        "packed_tokens": float(len(pack.ids_T)),
        "sequence_tokens": float(sum(len(sequences[member].ids) for member in pack.members)),
    }
    return {name: Metric(value=value, how="sum") for name, value in counts.items()}
