"""The trainer: packs sequences, adds up gradients, steps, and hands out weights.

Shapes: T tokens of a sequence, N loss tokens of a micro-batch, S sequences in it.
"""

import gc
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from offbeat_dist import Device, Mesh, open_device
from offbeat_engine_megatron._cpu_shim import ACCELERATOR, shim_for
from offbeat_engine_megatron._megatron import load_megatron, require_megatron
from offbeat_engine_megatron._options import MegatronEngineOptions, read_options
from offbeat_engine_megatron._packing import Pack, lay_out_all
from offbeat_engine_megatron._parallel import Parallel, check_model_fits, choose_parallel
from offbeat_engine_megatron._shape import ModelShape, read_model
from offbeat_engine_megatron._shares import Share, plan_shares, spread_values
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

if TYPE_CHECKING:
    from offbeat_engine_megatron._optimizer import ClippedOptimizer
    from offbeat_engine_megatron._passes import Passes
    from offbeat_engine_megatron._ranks import Ranks
    from offbeat_engine_megatron._weights import HeldWeights

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an engine was asked for, checked before anything starts.

    Args:
        config: of the engine.
        options: of this backend.
        hf_config: transformers' config of the model.
        shape: of the model.
        parallel: sizes of the axes.
    """

    config: TrainEngineConfig
    options: MegatronEngineOptions
    hf_config: Any
    shape: ModelShape
    parallel: Parallel


def plan_engine(config: TrainEngineConfig, axes: dict[str, int] | None = None) -> Plan:
    """Check everything that can be checked without megatron-core and without other ranks.

    Args:
        config: of the engine.
        axes: sizes of the mesh's axes; None for one process.

    Raises:
        ConfigError: a setting is out of range, or the ranks cannot share the model that way.
        ModelError: the model folder is missing, or of a family that is not supported.
    """
    options = read_options(config.options)
    if config.lora_rank:
        raise ConfigError(
            "the megatron engine trains all weights: got lora_rank > 0; set it to 0, or use the torch engine"
        )
    if config.dtype != "float32":
        raise ConfigError(f"the megatron engine computes in float32: got dtype = {config.dtype}; use the torch engine")
    parallel = choose_parallel(axes or dict.fromkeys(("dp", "cp", "tp", "pp", "ep"), 1), options)
    hf_config, shape = read_model(config.model_path, trust_remote_code=config.trust_remote_code)
    check_model_fits(shape, parallel)
    return Plan(config=config, options=options, hf_config=hf_config, shape=shape, parallel=parallel)


class MegatronTrainEngine:
    """A causal language model in megatron-core, and its optimizer: implements `offbeat_types.TrainEngine`.

    Every rank calls every method, in the same order and with the same arguments: the sequences of the whole update.
    The engine takes its share, and each rank returns what one process would. Make one with `create`.

    Attributes:
        config: as given to `create`.
        parallel: sizes of the axes.
        mesh: over megatron-core's own groups.
        temperature: the sampler's; log-probabilities and entropies are those of softmax(logits / temperature).
        last_refusal: why the last refused step was refused; empty when none was.
    """

    _passes: "Passes"
    _optimizer: "ClippedOptimizer"
    _held: "HeldWeights"
    _ranks: "Ranks"

    def __init__(self, plan: Plan, device: Device, given: Mesh | None) -> None:
        from offbeat_engine_megatron._build import build
        from offbeat_engine_megatron._groups import join_groups, leave_groups

        self.config, self.parallel, self.temperature = plan.config, plan.parallel, plan.options.temperature
        self.last_refusal = ""
        self._plan, self._device = plan, device
        self._shim = shim_for(device.torch_device)
        self._steps_refused, self._bad_loss, self._open = 0, False, True
        self._reference: Passes | None = None
        with self._shim:
            self.mesh = join_groups(plan.parallel, given, plan.config.device, plan.config.seed)
            try:
                build(self, plan)
            except BaseException:
                leave_groups()
                raise

    @classmethod
    def create(cls, config: TrainEngineConfig, mesh: Mesh | None = None) -> "MegatronTrainEngine":
        """Load the model and make the optimizer.

        Args:
            config: of the engine, the same on all ranks.
            mesh: of the ranks that train together; with dp alone, `config.options` say how they share the model.

        Raises:
            BackendError: megatron-core is not installed.
            ConfigError: the device is not here, a setting is out of range, or the layout cannot be.
            ModelError: the model folder is missing, corrupt, or of a family that is not supported.
        """
        plan = plan_engine(config, None if mesh is None else mesh.axes)
        require_megatron()
        device = _open_device(config, mesh)
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        load_megatron(compiled=device.torch_device.type == ACCELERATOR)
        from offbeat_engine_megatron._optimizer import check_schedule

        check_schedule(config)
        return cls(plan, device, mesh)

    def forward_backward(self, sequences: Sequence[TrainSequence], loss: LossFunction) -> Metrics:
        """Add up gradients of the summed loss, one micro-batch at a time.

        Sequences without a loss token take no part. `LossTokens.total_*` count the sequences of this call.

        Args:
            sequences: of any length; one above the token budget goes alone.
            loss: called once per micro-batch, on all ranks of the last stage that share it; `LossTokens.entropy_N`
                carries gradient with `entropy_gradient`.

        Returns:
            The loss function's metrics merged, and `loss` (their sum), `num_microbatches`, `packed_tokens` (computed),
            `sequence_tokens` (what they stand for).
        """
        with_loss = [sequence for sequence in sequences if sequence.loss_mask.any()]
        if len({frozenset(sequence.extras) for sequence in with_loss}) > 1:
            raise ShapeError("all sequences of an update need the same extras; give each the arrays the loss reads")
        with self._shim:
            packs = self._packs("forward_backward", with_loss)
            losses = _Losses(self, with_loss, packs, loss)
            self._optimizer.begin_pass()
            self._passes.train(packs, losses.of)
            try:
                return self._ranks.merge(merge_metrics(losses.results), losses.failure)
            except Exception:
                self._clear_gradients()  # of the ranks that did not fail
                raise

    def step(self) -> Metrics:
        """Clip, update the weights, clear gradients.

        A step whose loss or gradient norm is not finite changes nothing but the count of refused steps: the weights,
        the moments and the schedule stay; the log and `last_refusal` name the first parameter concerned.

        Returns:
            `grad_norm` (before clipping; weight 0 when refused), `learning_rate`, `steps_refused` (0 or 1).
        """
        with self._shim:
            rate, norm = self._optimizer.learning_rate, self._optimizer.grad_norm()
            self._bad_loss = any(self._ranks.exchange(self._bad_loss))
            refused = self._bad_loss or not math.isfinite(norm)
            if refused:
                self._refuse()
            else:
                self._optimizer.step(norm)
            self._clear_gradients()
        return {
            "grad_norm": Metric(value=0.0 if refused else norm, weight=0.0 if refused else 1.0),
            "learning_rate": Metric(value=rate, how="last"),
            "steps_refused": Metric(value=float(refused), how="sum"),
        }

    def logprobs(self, sequences: Sequence[TrainSequence], *, reference: bool = False) -> list[Floats]:
        """Log-probability of each loss token, without gradient.

        Args:
            sequences: of any length.
            reference: ask the first policy: the weights of `model_path`, read again when first asked for.

        Returns:
            [T] float32 nats per sequence; 0 where loss_mask is False.
        """
        with self._shim:
            shares = self._shares("logprobs of the first policy" if reference else "logprobs", sequences)
            packs = lay_out_all(sequences, shares[self._ranks.share], self.parallel)
            passes = self._first_policy() if reference else self._passes
            answers = [each.float().cpu().numpy() for each in passes.answer(packs)] if packs else []
            counts = [
                sum(int(sequences[member].loss_mask.sum()) for members in share for member in members)
                for share in shares
            ]
            own = np.concatenate(answers) if answers else np.zeros(0, np.float32)
            found = self._ranks.gather_shares(own, counts, self._device.torch_device) if any(counts) else []
            return spread_values(sequences, shares if found else [], found)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate (Hugging Face name, float32 tensor) in one order, a tied head once.

        Buckets are gathered over tp, ep and pp as the iteration goes on, so every rank iterates to the end. The
        tensors are copies.
        """
        with self._shim:
            self._optimizer.gather_weights()
        yield from self._held.gather()

    def save_weights(self, folder: Path) -> None:
        """Write a folder that plain transformers loads: weights, config, tokenizer. All gather, the leader writes."""
        from offbeat_engine_megatron._weights import write_model

        with self._ranks.together("save_weights"):
            weights = self.weights()
            if self.leader:
                write_model(folder, weights, self._plan.hf_config, Path(self.config.model_path).expanduser())
            else:
                for _ in weights:
                    pass

    def save(self, folder: Path) -> None:
        """Write weights as `save_weights`, and optimizer and schedule beside them; on disk when it returns anywhere."""
        from offbeat_engine_megatron._checkpoint import save_state

        self.save_weights(folder)
        with self._ranks.together("save"), self._shim:
            save_state(folder, self._held, self._optimizer, self._steps_refused, leader=self.leader)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, on however many ranks and in whatever layout.

        Raises:
            ModelError: the folder is not a whole checkpoint of this model.
        """
        from offbeat_engine_megatron._checkpoint import load_state

        with self._ranks.together("load"), self._shim:
            self._optimizer.gather_weights()
            self._steps_refused = load_state(folder, self._plan.shape, self._held, self._optimizer)
            self._clear_gradients()

    def close(self) -> None:
        """Free weights, gradients and moments. The engine cannot be used afterwards."""
        if not self._open:
            return
        from offbeat_engine_megatron._groups import leave_groups

        self._open = False
        for name in ("_passes", "_optimizer", "_held", "_reference", "_ranks", "mesh"):
            self.__dict__.pop(name, None)
        leave_groups()
        gc.collect()  # megatron-core's hooks hold the model in a circle, and groups left over must not outlive a fork

    @property
    def vocabulary_size(self) -> int:
        """Rows of the vocabulary head: token ids are below it."""
        return self._plan.shape.vocabulary

    @property
    def num_ranks(self) -> int:
        """Processes that train together."""
        return self._ranks.size

    @property
    def leader(self) -> bool:
        """Whether this rank is the one to report, send and write what only one should."""
        return self._ranks.leader

    @property
    def steps_taken(self) -> int:
        """Updates done, refused ones not counted."""
        return self._optimizer.steps_taken

    @property
    def steps_refused(self) -> int:
        """Updates refused since the run began."""
        return self._steps_refused

    def _packs(self, what: str, sequences: Sequence[TrainSequence]) -> list[Pack]:
        """Lay out the micro-batches of this rank, one at least: the ranks meet in each."""
        share = self._shares(what, sequences)[self._ranks.share] or [[]] * self._round
        return lay_out_all(sequences, share, self.parallel)

    @property
    def _round(self) -> int:
        """What the number of micro-batches must be a multiple of."""
        return self.parallel.pp if self.parallel.vpp > 1 else 1

    def _shares(self, what: str, sequences: Sequence[TrainSequence]) -> list[Share]:
        """Micro-batches of every share, after making sure that all ranks were asked for the same."""
        self._check_ids(sequences)
        self._ranks.check_same(what, sequences)
        return plan_shares(
            sequences,
            budget=self.config.max_tokens_per_microbatch,
            num_shares=self.parallel.dp,
            round_up_to=self._round,
        )

    def _check_ids(self, sequences: Sequence[TrainSequence]) -> None:
        found = [sequence.ids for sequence in sequences if len(sequence.ids)]
        low = min((int(ids.min()) for ids in found), default=0)
        high = max((int(ids.max()) for ids in found), default=0)
        if low < 0 or high >= self.vocabulary_size:
            raise ModelError(
                f"token ids must be in [0, {self.vocabulary_size}): got {low} to {high}; "
                "use the tokenizer of this model"
            )

    def _first_policy(self) -> "Passes":
        if self._reference is None:
            from offbeat_engine_megatron._build import build_reference

            self._reference = build_reference(self, self._plan)
        return self._reference

    def _refuse(self) -> None:
        self._steps_refused += 1
        found = set(self._ranks.exchange(self._held.first_not_finite()))
        name = next((slot.name for slot in self._held.slots if slot.name in found), "")
        where = f"the gradient of {name} is" if name else "the loss is" if self._bad_loss else "the gradient norm is"
        self.last_refusal = f"update {self.steps_taken}: {where} not finite; the weights were left as they were"
        log.warning("step refused (%d so far): %s", self._steps_refused, self.last_refusal)

    def _clear_gradients(self) -> None:
        self._optimizer.clear()
        self._bad_loss = False


class _Losses:
    """Calls the loss function for each micro-batch, and keeps what it said.

    A loss that raises or is not finite must not end the pass, in which other ranks wait for this one: its gradient
    becomes zero, and all ranks hear of it afterwards.
    """

    def __init__(
        self, engine: MegatronTrainEngine, sequences: Sequence[TrainSequence], packs: Sequence[Pack], loss: LossFunction
    ) -> None:
        self._engine, self._sequences, self._packs, self._loss = engine, sequences, packs, loss
        self._totals = sum(int(sequence.loss_mask.sum()) for sequence in sequences), len(sequences)
        self.results: list[Metrics] = []
        self.failure: Exception | None = None

    def of(self, number: int, values_2N: Tensor) -> Tensor:
        """The loss of a micro-batch, from log-probabilities and entropies."""
        pack, nothing = self._packs[number], values_2N.sum() * 0.0
        if not pack.members or self.failure is not None:
            return nothing
        try:
            value, metrics = self._loss(self._tokens(pack, values_2N))
        except Exception as error:  # noqa: BLE001  raised on all ranks when the pass is over
            self.failure = error
            return nothing
        self.results.append({**metrics, **self._counts(pack, float(value.detach()))})
        if not torch.isfinite(value.detach()):
            self._engine._bad_loss = True
            return nothing
        return value + nothing if isinstance(value, Tensor) else nothing

    def _tokens(self, pack: Pack, values_2N: Tensor) -> LossTokens[Tensor]:
        device = values_2N.device
        names = sorted(self._sequences[pack.members[0]].extras)
        return LossTokens(
            logprobs_N=values_2N[0],
            entropy_N=values_2N[1],
            sequence_N=torch.from_numpy(pack.sequence_N).to(device),
            num_sequences=len(pack.members),
            extras={name: torch.from_numpy(self._extra(pack, name)).to(device) for name in names},
            total_tokens=self._totals[0],
            total_sequences=self._totals[1],
        )

    def _extra(self, pack: Pack, name: str) -> Floats:
        """[N] float32: one extra of every sequence at its loss tokens."""
        found = [self._sequences[member] for member in pack.members]
        return np.concatenate([each.extras[name][each.loss_mask] for each in found]).astype(np.float32)

    def _counts(self, pack: Pack, loss: float) -> Metrics:
        counts = {
            "loss": loss,
            "num_microbatches": 1.0,
            "packed_tokens": float(len(pack.ids_T)),
            "sequence_tokens": float(sum(len(self._sequences[member].ids) for member in pack.members)),
        }
        return {name: Metric(value=value, how="sum") for name, value in counts.items()}


def _open_device(config: TrainEngineConfig, mesh: Mesh | None) -> Device:
    """The device of `config`; on a mesh each rank has its own already, of which the config may say the kind."""
    if mesh is None:
        return open_device(config.device)
    kind = config.device.partition(":")[0]
    if kind not in ("auto", mesh.device.kind):
        raise ConfigError(f"the mesh computes on {mesh.device.kind}, the engine is set to {config.device}; use auto")
    return mesh.device
