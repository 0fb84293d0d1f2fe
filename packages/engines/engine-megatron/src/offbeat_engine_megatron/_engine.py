"""The trainer: packs sequences, adds up gradients, steps, and hands out weights.

Shapes: T tokens of a sequence.
"""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from offbeat_core import (
    Floats,
    Inspection,
    LossFunction,
    Metrics,
    ModelError,
    OffbeatError,
    TrainEngineConfig,
    TrainLayout,
    TrainSequence,
    WeightPart,
)
from offbeat_device import Device, MemoryOffloader, open_device
from offbeat_engine_megatron._layout import Plan, plan_engine, plan_layout
from offbeat_engine_megatron._megatron import (
    HOST,
    join_groups,
    leave_groups,
    load_megatron,
    require_megatron,
    shim_for,
)
from offbeat_mesh import Mesh
from offbeat_training import ImageInputs, LossCalls, NoImages, StepCounts, Steps, TrainerRanks, with_loss_tokens

if TYPE_CHECKING:
    from offbeat_engine_megatron._optimizer import ClippedOptimizer
    from offbeat_engine_megatron._passes import Passes


log = logging.getLogger(__name__)

_KEPT = {"config", "parallel", "temperature", "_plan", "_device", "_shim", "_open"}
"""Attributes that an engine keeps when it is closed."""


class MegatronTrainEngine(StepCounts):
    """A causal language model in megatron-core, and its optimizer: implements `offbeat_core.TrainEngine`.

    Every rank calls every method, in the same order and with the same arguments: the sequences of the whole update.
    The engine takes its share, and each rank returns what one process would. Make one with `create`.

    Attributes:
        config: as given to `create`.
        parallel: sizes of the axes.
        mesh: over megatron-core's own groups.
        temperature: the sampler's; log-probabilities and entropies are those of softmax(logits / temperature).
        replays_routes: it replays the routes of sequences, of models with experts.
    """

    replays_routes: ClassVar[bool] = True
    _ranks: TrainerRanks
    _optimizer: "ClippedOptimizer"

    def __init__(self, plan: Plan, device: Device, given: Mesh | None) -> None:
        self.config, self.parallel, self.temperature = plan.config, plan.parallel, plan.options.temperature
        self._plan, self._device = plan, device
        self._shim = shim_for(device.torch_device)
        self._open, self._bad_loss = True, False
        self._reference: Passes | None = None
        self._offloader = MemoryOffloader(device)
        with self._shim:
            self.mesh = join_groups(plan.parallel, given, plan.config.device, plan.config.seed)
            try:
                self._build(plan, device)
            except BaseException:
                leave_groups()
                raise

    def _build(self, plan: Plan, device: Device) -> None:
        """Make the model and what works on it; these modules import megatron-core, which a device may patch before."""
        from offbeat_engine_megatron._checkpoint import Checkpoints
        from offbeat_engine_megatron._layers.embedding import image_processor
        from offbeat_engine_megatron._model import make_policy
        from offbeat_engine_megatron._optimizer import ClippedOptimizer, OptimizerState, wrap_parts
        from offbeat_engine_megatron._passes import Passes, Updates, device_attention

        mesh, target = self.mesh, device.torch_device
        everyone, speaks = mesh.group("dp", "cp", "tp", "pp"), bool(mesh.where(pp="last", tp=0, cp=0))
        self._ranks = TrainerRanks(everyone, mesh.group("dp"), target, speaks=speaks, pp=mesh.group("pp"))
        self._images: ImageInputs = NoImages()
        if plan.shape.tower:
            self._images = image_processor(plan.hf_config, plan.config.model_path)
        with self._ranks.together("make model"):
            self._policy = make_policy(plan, mesh)
        wrapped = wrap_parts(self._policy.parts, self._policy.config, plan.options)
        self._optimizer = ClippedOptimizer(wrapped, plan.config, plan.options)
        with self._ranks.together("load model"):  # when there are float32 copies, so that these lose nothing
            self._policy.load(plan, OptimizerState(self._optimizer).put_weights)
        layers, vision = plan.shape.mtp_layers, plan.options.train_vision
        self._attention = device_attention(plan, mesh)
        self._passes = Passes(
            *(wrapped, mesh, self._images), attention=self._attention, mtp_layers=layers, sees_always=vision
        )
        self._updates = Updates(self._ranks, plan, self._images)
        self._checkpoints = Checkpoints(self._ranks, mesh, self._policy, self._optimizer, device, plan)
        trained = self._policy.trained
        self._steps = Steps(
            self._optimizer,
            self._ranks.exchange,
            [slot.name for held in trained for slot in held.slots],
            lambda: next(filter(None, (held.first_not_finite() for held in trained)), ""),
        )

    @classmethod
    def plan(cls, config: TrainEngineConfig, num_ranks: int = 1) -> TrainLayout:
        """Check what can be checked before anything starts, and say how the ranks will share the model.

        Args:
            config: of the engine.
            num_ranks: processes that will train together.

        Raises:
            BackendError: megatron-core is not installed.
            ConfigError: the device is not here, a setting is out of range, or the layout cannot be.
            ModelError: the model folder is missing, or of a family that is not supported.
        """
        require_megatron()
        return plan_layout(config, num_ranks)

    @staticmethod
    def check_installed() -> None:
        """Raise when megatron-core is not installed.

        Raises:
            BackendError: with the install line.
        """
        require_megatron()

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
        require_megatron()
        plan = plan_engine(config, None if mesh is None else mesh.axes)
        device = open_device(config.device, mesh.device if mesh else None)
        kernels = plan.kernels(device)
        if mesh is None or not any(mesh.coordinates.values()):
            log.info("the model (%s) computes with %s", plan.shape.family, kernels)
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        device.prepare("megatron", plan.parallel.as_megatron_settings())
        load_megatron(compiled=device.torch_device.type != HOST)
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
            `sequence_tokens` (what they stand for); with `mtp_layers` the mean loss of each: `mtp_loss_1`, nats.
        """
        with_loss = with_loss_tokens(sequences)
        self._offloader.require("forward_backward", MemoryOffloader.WEIGHTS, MemoryOffloader.OPTIMIZER)
        with self._shim:
            packs = self._updates.packs("forward_backward", with_loss)
            losses = LossCalls(with_loss, loss)
            self._optimizer.begin_pass(learns=bool(with_loss))
            mtp_loss = self._policy.mtp_loss
            if mtp_loss is not None:
                mtp_loss.begin(with_loss)
            self._passes.train(packs, losses)
            losses.read()
            if mtp_loss is not None:
                losses.results.append(mtp_loss.metrics())
            self._bad_loss |= losses.not_finite
            try:
                return self._ranks.merge(losses.results, losses.failure)
            except Exception:
                # hanglint: ignore[HL013] merge raises on every rank when one has failed, so all of them are here
                self._clear_gradients()  # of the ranks that did not fail
                raise

    def step(self) -> Metrics:
        """Clip, update the weights, clear gradients.

        A step whose loss or gradient norm is not finite changes nothing but the count of refused steps: the weights,
        the moments and the schedule stay; the log and `last_refusal` name the first parameter concerned.

        Returns:
            `grad_norm` (before clipping; weight 0 when refused), `learning_rate`, `steps_refused` (0 or 1).
        """
        self._offloader.require("step", MemoryOffloader.WEIGHTS, MemoryOffloader.OPTIMIZER)
        with self._shim:
            norm = self._optimizer.grad_norm()
            metrics = self._steps.take(norm, bad_loss=any(self._ranks.exchange(self._bad_loss)))
            self._clear_gradients()
            return metrics

    def logprobs(self, sequences: Sequence[TrainSequence], *, reference: bool = False) -> list[Floats]:
        """Log-probability of each loss token, without gradient.

        Args:
            sequences: of any length.
            reference: ask the first policy: the weights of `model_path`, read again when first asked for; with LoRA
                the base without adapters.

        Returns:
            [T] float32 nats per sequence; 0 where loss_mask is False.
        """
        self._offloader.require("logprobs", MemoryOffloader.WEIGHTS, MemoryOffloader.OPTIMIZER)
        with self._shim:
            if not reference:
                return self._updates.logprobs("logprobs", sequences, self._passes)
            sequences = [replace(sequence, routes=()) for sequence in sequences]  # it did not sample: it chooses
            with self._first_policy() as passes:
                return self._updates.logprobs("logprobs of the first policy", sequences, passes)

    def inspect(self, sequence: TrainSequence, layer: int | None = None) -> Inspection:
        """Return what the model computes on the way to a sequence's log-probabilities; see `InspectedTrainEngine`.

        The last token, which predicts nothing, is left out, and so are positions, which megatron-core counts itself.
        Under context parallel, and with several parts of the model on a rank (`virtual_pipeline`), all values are.

        Raises:
            ModelError: the model has no such layer; on all ranks.
        """
        from offbeat_engine_megatron._inspection import record_points, whole_sequence

        num_layers = self._plan.shape.num_layers
        if layer is not None and not 0 <= layer < num_layers:
            raise ModelError(f"layer {layer} was asked for, and the model has layers 0 to {num_layers - 1}")
        parts = self._policy.parts if self.parallel.cp == self.parallel.vpp == 1 else ()
        with record_points(parts, layer, self.mesh, cuts_tokens=self.parallel.sp) as found:
            self.logprobs([sequence])
        return whole_sequence(found, len(sequence.ids) - 1, num_layers, self.mesh)

    def weights(self, dtype: str | None = None, *, part: WeightPart = "merged") -> Iterator[tuple[str, Tensor]]:
        """Iterate (Hugging Face name, tensor) in one order, a tied head once.

        With dtype bfloat16 the values are those that the trainer computes with, so that sending them in that format
        loses nothing; `save` and `save_weights` write the float32 copies that they are rounded from.

        Buckets are gathered over tp, ep and pp as the iteration proceeds, so every rank iterates to the end. The
        tensors are copies.

        Args:
            dtype: what ranks round their parts to before these are gathered; None: float32.
            part: see `TrainEngine.weights`.
        """
        self._offloader.require("weights", MemoryOffloader.WEIGHTS)
        adapters, wanted = self._policy.adapters, getattr(torch, dtype or "float32")
        if part == "adapter":
            return self._export(adapters.stream(dtype=wanted) if adapters is not None else iter(()))
        values = adapters.merged if adapters is not None and part == "merged" else Tensor.detach
        return self._export(self._policy.weights.gather(values, wanted))

    def _export(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        with self._shim:
            self._optimizer.gather_weights()
        yield from tensors

    def save_weights(self, folder: Path) -> None:
        """Write a folder that plain transformers loads: weights, config, tokenizer. All gather and write their files.

        Raises:
            RunFolderError: the folder cannot be written; on all ranks.
        """
        self._offloader.require("save_weights", MemoryOffloader.WEIGHTS)
        with self._shim:
            self._checkpoints.export(folder)

    def save(self, folder: Path) -> None:
        """Write weights as `save_weights`, and optimizer and schedule beside them; on disk when it returns anywhere.

        A checkpoint that the folder held is replaced when the new one is whole; killed before, the old one is there.

        Raises:
            RunFolderError: the folder cannot be written; on all ranks, and the engine can still train.
        """
        self._offloader.require("save", MemoryOffloader.WEIGHTS, MemoryOffloader.OPTIMIZER)
        with self._shim:
            self._checkpoints.save(folder, self._steps.refused, background=False)

    def save_in_background(self, folder: Path) -> None:
        """As `save`, but return when the host holds a copy: threads write it while training continues.

        The folder appears when it is whole. The next save, load or close waits for it, and so does the process's end;
        `finish_save` does nothing else. Each rank's host holds a copy of what that rank writes.

        Raises:
            RunFolderError: the checkpoint before this one could not be written; on all ranks.
        """
        self._offloader.require("save", MemoryOffloader.WEIGHTS, MemoryOffloader.OPTIMIZER)
        with self._shim:
            self._checkpoints.save(folder, self._steps.refused, background=True)

    def finish_save(self) -> None:
        """Wait for the write in the background, if there is one; `options.save_deadline_s` is its limit.

        Raises:
            RunFolderError: it has failed on some rank; on all ranks, once.
            DeadlineError: it takes too long.
        """
        self._checkpoints.finish()

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, on however many ranks and in whatever layout; a checkpoint of the torch engine too.

        Raises:
            ModelError: the folder is not a whole checkpoint of this model; on all ranks, and nothing has changed.
            OSError, SafetensorError, PeerFailedError: a read has failed in the middle; the engine is of no use after.
        """
        self._offloader.require("load", MemoryOffloader.WEIGHTS, MemoryOffloader.OPTIMIZER)
        with self._shim:
            self._optimizer.gather_weights()
            self._steps.refused = self._checkpoints.load(folder)
            self._clear_gradients()

    def sleep(self, level: int) -> None:
        """Give memory back: level 1 gradients, moments and the first policy, level 2 the weights too.

        What has values waits in main memory. On a CPU, which has no other, it waits in a file of the folder for
        temporary files (TMPDIR).

        Raises:
            ConfigError: another level.
            OffbeatError: there are gradients that no step has used; or no room in that folder.
        """
        tags = MemoryOffloader.tags_of(level)
        if self._optimizer.in_update:
            raise OffbeatError("sleep: there are gradients that no step has used; call step() first")
        self._checkpoints.finish()
        optimizer = self._optimizer
        others = self._reference.tensors() if self._reference else []
        self._offloader.offload(
            MemoryOffloader.OPTIMIZER, (), [*optimizer.state(), *others], drop=optimizer.gradients()
        )
        if MemoryOffloader.WEIGHTS in tags:
            self._offloader.offload(MemoryOffloader.WEIGHTS, (), self._passes.tensors())

    def wake(self, tags: tuple[str, ...] = ()) -> None:
        """Take memory again after `sleep`: tags `weights`, `optimizer` (all else), or none for both."""
        if self._offloader.restore(tags):
            self._clear_gradients()

    def close(self) -> None:
        """Free weights, gradients and moments, when a save in the background has ended. The engine is of no use after.

        Raises:
            RunFolderError, DeadlineError: that save has failed; everything is freed all the same.
        """
        if not self._open:
            return
        self._open = False
        try:
            self._checkpoints.finish()
        finally:
            self._free()

    def _free(self) -> None:
        for name in [name for name in vars(self) if name not in _KEPT]:
            del self.__dict__[name]
        leave_groups()
        gc.collect()  # megatron-core's hooks hold the model in a circle, and groups left over must not outlive a fork

    @property
    def replay_problem(self) -> str:
        """Why it cannot replay routes, "" where it can; see `TrainEngine`."""
        return "" if self._plan.shape.num_experts else "the model has no experts"

    @property
    def float32_weights(self) -> frozenset[str]:
        """Names of routers' biases; see `TrainEngine`."""
        return frozenset(slot.name for slot in self._policy.weights.slots if slot.frozen)

    @property
    def vocabulary_size(self) -> int:
        """Rows of the vocabulary head: token ids are below it."""
        return self._plan.shape.vocabulary

    @contextmanager
    def _first_policy(self) -> Iterator["Passes"]:
        """The weights as they were: with LoRA those of the policy without adapters, else read a second time."""
        if self._policy.adapters is not None:
            with self._policy.adapters.left_out():
                yield self._passes
            return
        if self._reference is None:
            from offbeat_engine_megatron._model import make_reference
            from offbeat_engine_megatron._passes import Passes

            with self._ranks.together("load the first policy"):
                parts = make_reference(self._plan, self.mesh)
            self._reference = Passes(parts, self.mesh, self._images, attention=self._attention)
        yield self._reference

    def _clear_gradients(self) -> None:
        self._optimizer.clear()
        self._bad_loss = False
