"""The trainer: packs sequences, adds up gradients, steps, and hands out weights.

Shapes: T tokens of a sequence or a pack, E hidden size, N loss tokens of a micro-batch, S sequences in it.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final, Self

import torch
from torch import Tensor

from offbeat_core import (
    ConfigError,
    Floats,
    Inspection,
    LossFunction,
    Metric,
    Metrics,
    OffbeatError,
    TrainEngineConfig,
    TrainLayout,
    TrainSequence,
    WeightPart,
    check_schedule,
)
from offbeat_device import Device, MemoryOffloader, open_device
from offbeat_engine_torch._layers.balance import statistics
from offbeat_engine_torch._layout import (
    TorchEngineOptions,
    arrange,
    check_copies,
    check_numerics,
    check_optimizer,
    layout_of,
    plan_layout,
    split_replicas,
)
from offbeat_engine_torch._optimizer import make_optimizer
from offbeat_engine_torch._parallel.ranks import Ranks, ShardedRanks, SingleRank
from offbeat_engine_torch._parallel.sharding import add_up_gradients, free_gathered, partial_gradients
from offbeat_engine_torch._pieces import collect_gradients, memory_of
from offbeat_engine_torch._policy import FORMATS, Known, Policy, make_policy
from offbeat_engine_torch._reduction import choose_reduce_once
from offbeat_engine_torch._state.checkpoint import (
    export_weights,
    iterate_adapter,
    iterate_weights,
    load_state,
    save_state,
)
from offbeat_engine_torch._state.copies import PackedState, PeerCopies, pack_state
from offbeat_mesh import Mesh
from offbeat_training import (
    ClippedAdamW,
    LossCalls,
    Share,
    StepCounts,
    Steps,
    answers_of_all,
    idle_micro_batch,
    lora_layers,
    plan_shares,
    record_points,
    rounds_with_images,
    with_loss_tokens,
    without_lora,
)

_EVERYONE: Final = ("dp", "cp", "tp")


class TorchTrainEngine(StepCounts):
    """A causal language model and its optimizer: implements `offbeat_core.TrainEngine`, on one rank or many.

    Weights and gradients are float32, and so are moments unless option moments_dtype says otherwise. With dtype
    bfloat16 the matrix products of the blocks run in bfloat16 under autocast, and weights that adapters leave frozen
    are held in it. Make one with `create`.

    On a mesh every rank calls every method, in the same order and with the same arguments: the sequences of the whole
    update. The engine takes its share, and each rank returns what one process would.

    With `config.head` "score" it is a classifier with one output: a loss token's log-probability is then the score of
    what comes before it, and what is saved is a folder of `AutoModelForSequenceClassification`.

    Attributes:
        config: as given to `create`.
        temperature: the sampler's; log-probabilities and entropies are those of softmax(logits / temperature).
        heads: values of `config.head` that it knows.
        replays_routes: it replays the routes of sequences, of models whose routers it understands.
        computes_exactly: it knows option numerics.
        copies: with option peer_copies, what `keep_copies` has left on this rank; else None.
    """

    heads: ClassVar[tuple[str, ...]] = ("tokens", "score")
    replays_routes: ClassVar[bool] = True
    computes_exactly: ClassVar[bool] = True
    _ranks: Ranks
    _optimizer: ClippedAdamW

    def __init__(
        self,
        config: TrainEngineConfig,
        options: TorchEngineOptions,
        device: Device,
        policy: Policy,
        ranks: Ranks,
        mesh: Mesh | None,
    ) -> None:
        self.config = config
        self.temperature = options.temperature
        self._options, self._device, self._policy, self._ranks, self._mesh = options, device, policy, ranks, mesh
        self._optimizer = make_optimizer(policy, config, options, device, ranks)
        self._partial = partial_gradients(policy.model)
        names, first_not_finite = [piece.name for piece in policy.pieces], self._optimizer.first_not_finite
        self._steps = Steps(self._optimizer, ranks.exchange, names, first_not_finite)
        self._offloader = MemoryOffloader(device)
        self._routers = policy.routers
        self._reference: Policy | None = None
        self._bad_loss = False
        self._reduce_once: bool | None = None
        self.copies = PeerCopies() if options.peer_copies else None

    @classmethod
    def plan(cls, config: TrainEngineConfig, num_ranks: int = 1) -> TrainLayout:
        """Check what can be checked before anything starts, and say how the ranks will share the model.

        Args:
            config: of the engine.
            num_ranks: processes that will train together.

        Raises:
            ConfigError: the device is not here, a setting is out of range, or the ranks cannot share this model.
            ModelError: the model folder is missing, corrupt, or of a family that is not supported.
        """
        return plan_layout(config, num_ranks)

    @classmethod
    def create(cls, config: TrainEngineConfig, mesh: Mesh | None = None) -> Self:
        """Load the model and make the optimizer.

        Args:
            config: of the engine, the same on all ranks.
            mesh: of the ranks that train together, along dp, cp, tp and ep; with dp alone, options tensor_parallel,
                context_parallel and expert_parallel say how they share the work. None, or a mesh of one, for one
                process.

        Raises:
            ConfigError: the device is not here, or a setting or option is out of range.
            ModelError: the model folder is missing, corrupt, or of a family that is not supported.
        """
        return cls._make(config, mesh)

    @classmethod
    def _make(cls, config: TrainEngineConfig, mesh: Mesh | None, known: PackedState | None = None) -> Self:
        """Make the engine; of a `known` state it has the weights, and `restore` gives it the rest."""
        options = TorchEngineOptions.parse(config.options)
        check_schedule(config)
        check_optimizer(config, options)
        check_numerics(config, options, shares_weights=mesh is not None and mesh.size > 1)
        device = open_device(config.device, mesh.device if mesh else None)
        check_copies(options, mesh.size if mesh else 1)
        mesh = arrange(mesh, options)
        if FORMATS[config.dtype] not in (None, *device.autocast_dtypes):
            raise ConfigError(f"device {device.torch_device} does not compute in {config.dtype}; use float32")
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        torch.manual_seed(config.seed)
        ranks = SingleRank() if mesh is None else ShardedRanks(mesh, device.torch_device, split_replicas(mesh, options))
        start = Known(fill=known.fill, limit=known.limit) if known else None
        policy = make_policy(config, options, device, ranks, mesh, start)
        return cls(config, options, device, policy, ranks, mesh)

    @classmethod
    def recover(cls, config: TrainEngineConfig, mesh: Mesh, copies: PeerCopies | None) -> tuple[Self, int, bytes]:
        """Make the engine anew, in the state from which all ranks can continue; see `RecoverableTrainEngine`."""
        copies = copies or PeerCopies()
        version = copies.recover(mesh.group(*_EVERYONE))
        state = PackedState(copies.held[version].own)
        engine = cls._make(config, mesh, state)
        state.restore(engine._optimizer, engine._device)
        engine.copies, engine._steps.refused = copies, state.steps_refused
        engine._clear_gradients()  # routers have counted, if their family was checked
        return engine, version, state.note

    def forward_backward(self, sequences: Sequence[TrainSequence], loss: LossFunction) -> Metrics:
        """Add up gradients of the summed loss, one micro-batch at a time.

        Sequences without a loss token take no part. `LossTokens.total_*` count the sequences of this call.

        Args:
            sequences: of any length; one above the token budget goes alone.
            loss: called once per micro-batch; `LossTokens.entropy_N` carries gradient with `entropy_gradient`.

        Returns:
            The loss function's metrics merged, and `loss` (their sum), `num_microbatches`, `packed_tokens` (computed),
            `sequence_tokens` (what they stand for). Of a mixture of experts also `router_max_load`,
            `router_unused_experts`, and with option router_aux_loss the loss of that name, before its coefficient.
        """
        with_loss = with_loss_tokens(sequences)
        losses = LossCalls(with_loss, loss)
        shares = self._plan("forward_backward", with_loss, self._policy)
        rounds = list(zip(shares[self._ranks.share], rounds_with_images(with_loss, shares), strict=True))
        keeps = len(rounds) > 1 and self._reduces_once()
        with self._policy.weights_converted_once():
            for number, (families, tower) in enumerate(rounds, 1):
                # Every rank runs a backward pass in each round, so all of them add up in the same one.
                add_up_gradients(self._policy.model, now=not keeps or number == len(rounds))
                if losses.failure is not None and self._ranks.size == 1:
                    break
                # After an error too: other ranks wait in this pass, and those that share the pack in its own shapes.
                batch = self._policy.lay_out(with_loss, families) if families else idle_micro_batch()
                with self._routers.watching(batch, len(with_loss)):
                    logprobs, entropy, differing = self._policy.ask(batch, through_tower=tower)
                    self._routers.counted()
                    self._backward(losses.of(batch, logprobs, entropy, differing), logprobs)
        losses.read()
        # Kept for `step`, in which all ranks refuse together.
        self._bad_loss |= losses.not_finite
        try:
            return {**self._ranks.merge(losses.results, losses.failure), **self._routed()}
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
        self._offloader.require("step", MemoryOffloader.WEIGHTS, MemoryOffloader.OPTIMIZER)
        norm = self._grad_norm()
        metrics = self._steps.take(norm, bad_loss=self._bad_loss)
        if not metrics["steps_refused"].value:
            self._routers.move_biases()
        self._clear_gradients()
        return metrics

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
        policy, scope = self._asked_policy(reference=reference)
        if reference:  # it did not sample: its own routers choose
            sequences = [replace(sequence, routes=()) for sequence in sequences]
        shares = self._plan("logprobs of the first policy" if reference else "logprobs", sequences, policy)
        answers = []
        with scope, policy.weights_converted_once():
            for batch, tower in zip(shares[self._ranks.share], rounds_with_images(sequences, shares), strict=True):
                # Without sequences a rank computes one token: the others meet it in every layer.
                pack = policy.lay_out(sequences, batch) if batch else idle_micro_batch()
                answer = policy.ask(pack, through_tower=tower)[0]
                if batch:
                    answers.append(answer.float())
        free_gathered(policy.model)
        return answers_of_all(self._ranks, sequences, shares, answers)

    def inspect(self, sequence: TrainSequence, layer: int | None = None) -> Inspection:
        """Return what the model computes on the way to the log-probabilities of a sequence; see `InspectedTrainEngine`.

        The last token, which predicts nothing, is left out. Under tensor parallel queries and keys are those of the
        rank, and under context parallel all values are left out.

        Raises:
            ModelError: the model has no such layer, or names none.
        """
        with record_points(self._policy.model.whole, layer, is_compiled=self._policy.is_compiled) as found:
            self.logprobs([sequence])
        num_tokens = len(sequence.ids) - 1  # without one, this was a pack of another rank's
        return {point: values.numpy() for point, values in found.items() if len(values) == num_tokens}

    @property
    def replay_problem(self) -> str:
        """Why it cannot replay routes, "" where it can; see `TrainEngine`."""
        return self._policy.model.routing.problem

    @property
    def float32_weights(self) -> frozenset[str]:
        """Names of routers' correction biases, and of what else the family keeps in float32; see `TrainEngine`."""
        return frozenset(piece.name for piece in self._policy.pieces if piece.in_float32)

    def weights(self, dtype: str | None = None, *, part: WeightPart = "merged") -> Iterator[tuple[str, Tensor]]:
        """Iterate (Hugging Face name, tensor) in the model's order; a tied head once.

        On a mesh each step gathers one whole tensor on every rank, so every rank iterates to the end. In one process
        a tensor is the trainer's own: read it before the next step, and do not write to it.

        Args:
            dtype: what ranks round their parts to before these are gathered; None: float32. Layers whose adapters are
                merged and `float32_weights` come in float32 all the same, and what is not gathered as it is held.
            part: see `TrainEngine.weights`.
        """
        self._offloader.require("weights", MemoryOffloader.WEIGHTS)
        wanted: torch.dtype | None = getattr(torch, dtype) if dtype else None
        if part == "adapter":
            return iterate_adapter(self._policy.pieces, self._ranks, wanted)
        return iterate_weights(
            self._policy.model, self._policy.pieces, self._ranks, dtype=wanted, merge=part == "merged"
        )

    def save_weights(self, folder: Path) -> None:
        """Write a folder that plain transformers loads: weights with LoRA merged, config, tokenizer."""
        with self._ranks.together("save_weights"):
            self._offloader.require("save_weights", MemoryOffloader.WEIGHTS)
            self._export(folder)

    def save(self, folder: Path) -> None:
        """Write weights as `save_weights`, and optimizer, schedule and random state beside them, synced to disk.

        On a mesh the leader writes the weights and each rank its own moments, into one folder that all of them see;
        everything is on disk when it returns on any rank.
        """
        with self._ranks.together("save"):
            self._offloader.require("save", MemoryOffloader.WEIGHTS, MemoryOffloader.OPTIMIZER)
            self._export(folder)
            save_state(folder, self._policy, self._optimizer, self._device, self._ranks, self.steps_refused)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, on however many ranks; the next step is the one an undisturbed run would take.

        Raises:
            ModelError: the folder is not a whole checkpoint of this model.
            PeerFailedError: another rank has found it so.
        """
        with self._ranks.together("load"):
            self._offloader.require("load", MemoryOffloader.WEIGHTS, MemoryOffloader.OPTIMIZER)
            refused = load_state(folder, self._policy, self._optimizer, self._device, self._ranks, self.config)
        self._steps.refused = refused
        self._clear_gradients()  # they are of other weights

    def keep_copies(self, version: int, note: bytes = b"") -> None:
        """Copy the state of each rank, and begin to send it to another one; see `RecoverableTrainEngine`."""
        self._offloader.require("keep_copies", MemoryOffloader.WEIGHTS, MemoryOffloader.OPTIMIZER)
        assert self.copies is not None
        assert self._mesh is not None
        self.copies.wait()  # so that there are never more than two versions
        state = pack_state(self._policy, self._optimizer, self._device, self.steps_refused, note)
        self.copies.begin(version, state, self._mesh.group(*_EVERYONE, channel="copies"))

    def sleep(self, level: int) -> None:
        """Give memory back: level 1 moments and the first policy, level 2 the weights too.

        They wait in main memory. Those of a CPU, which has no other, wait in a file of the folder for temporary files
        (TMPDIR).

        Raises:
            ConfigError: another level.
            OffbeatError: there are gradients that no step has used; or no room in that folder.
        """
        tags = MemoryOffloader.tags_of(level)
        if any(piece.parameter.grad is not None for piece in self._policy.pieces):
            raise OffbeatError("sleep: there are gradients that no step has used; call step() first")
        if MemoryOffloader.OPTIMIZER in tags:
            # Moments are this engine's own, and were shown to numpy if they have been saved.
            reference = memory_of(self._reference.pieces) if self._reference else []
            own, shared = self._by_owner(reference)
            self._offloader.offload(MemoryOffloader.OPTIMIZER, [*self._optimizer.moments(), *own], shared)
        if MemoryOffloader.WEIGHTS in tags:
            self._offloader.offload(MemoryOffloader.WEIGHTS, *self._by_owner(memory_of(self._policy.pieces)))

    def wake(self, tags: tuple[str, ...] = ()) -> None:
        """Take memory again after `sleep`: tags `weights`, `optimizer` (all else), or none for both."""
        self._offloader.restore(tags)

    def close(self) -> None:
        """Free weights, gradients and moments. The engine cannot be used afterwards."""
        if self.copies is not None:
            self.copies.close()  # before the group goes over which ranks agree
        for name in ("_policy", "_optimizer", "_steps", "_reference", "_offloader", "_routers"):
            self.__dict__.pop(name, None)

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below it."""
        return self._policy.vocabulary_size

    def _by_owner(self, weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters that this engine alone holds, and those that FSDP holds too, all of one kind."""
        return (weights, []) if self._mesh is None else ([], weights)

    def _plan(self, what: str, sequences: Sequence[TrainSequence], policy: Policy) -> list[Share]:
        """Micro-batches of every share, after making sure that all ranks were asked for the same."""
        self._offloader.require(what, MemoryOffloader.WEIGHTS, MemoryOffloader.OPTIMIZER)
        self._ranks.check_same(what, sequences)
        policy.check(sequences)  # of what all have: all raise, or none
        return plan_shares(
            sequences,
            budget=self.config.max_tokens_per_microbatch,
            share_prompts=self._options.share_prompts,
            num_shares=self._ranks.num_shares,
        )

    def _backward(self, value: Tensor | None, logprobs: Tensor) -> None:
        """Run the backward pass; without a loss one of zeros, as other ranks run one and meet this rank in every layer.

        The step is then refused, or learns nothing from this micro-batch.
        """
        if value is not None and value.requires_grad:
            value.backward()  # type: ignore[no-untyped-call]
        elif self._ranks.size > 1 or self._options.router_aux_loss:
            logprobs.backward(torch.zeros_like(logprobs))  # type: ignore[no-untyped-call]

    def _routed(self) -> Metrics:
        """Add up, over all ranks, what routers chose since the last call; keep it for the step."""
        counts, loss = self._routers.take()
        if not counts:
            return {}
        flat = self._ranks.add_up(torch.cat(counts))
        counts = list(torch.split(flat, [len(each) for each in counts]))
        self._routers.keep(counts)
        found = statistics(counts)
        if self._options.router_aux_loss and found:
            found["router_aux_loss"] = Metric(value=float(self._ranks.add_up(loss)))
        return found

    def _reduces_once(self) -> bool:
        """Return whether to add up gradients with the last micro-batch alone; the first call, of all ranks, chooses."""
        if self._reduce_once is None:
            sizes = {axis: self._mesh.axes[axis] if self._mesh else 1 for axis in ("dp", "cp", "tp", "ep")}
            layout = layout_of(self.config, self._options, self._device, **sizes)
            self._reduce_once = choose_reduce_once(
                self._options.reduce_once,
                self.config,
                layout,
                self._device,
                self._ranks,
                self._policy.pieces,
                keeps_reference=self._reference is not None,
            )
        return self._reduce_once

    def _grad_norm(self) -> float:
        """L2 norm over the gradients of all ranks; NaN when a loss was not finite on one of them."""
        collect_gradients(self._policy.pieces, self._optimizer.parameters)
        grads = {name: p.grad for name, p in self._optimizer.parameters.items() if p.grad is not None}
        # Before the norm, which is of whole gradients.
        self._ranks.add_partial([grad for name, grad in grads.items() if name in self._partial])
        # What several ranks hold is counted by one of them.
        owned = {piece.name for piece in self._policy.pieces if piece.owned}
        # No norm where a loss was not finite: this step is refused on all ranks.
        found = self._ranks.exchange([self._bad_loss, 0.0 if self._bad_loss else self._optimizer.grad_norm(owned)])
        self._bad_loss = any(bad for bad, _ in found)
        return math.nan if self._bad_loss else math.hypot(*(norm for _, norm in found))

    def _clear_gradients(self) -> None:
        self._optimizer.clear()
        for piece in self._policy.pieces:
            piece.parameter.grad = None
        self._routers.drop()
        self._bad_loss = False

    def _export(self, folder: Path) -> None:
        tokenizer = Path(self.config.model_path).expanduser()
        export_weights(self._policy, self._ranks, folder, tokenizer)

    def _asked_policy(self, *, reference: bool) -> tuple[Policy, AbstractContextManager[None]]:
        """Return the policy to ask, and the state to ask it in."""
        if not reference:
            return self._policy, nullcontext()
        if self.config.lora_rank:
            # Without its adapters the policy is the first one still: no second copy is needed.
            return self._policy, without_lora(lora_layers(self._policy.model).values())
        if self._reference is None:
            self._reference = make_policy(self.config, self._options, self._device, self._ranks, self._mesh)
            self._reference.model.requires_grad_(requires_grad=False)
        return self._reference, nullcontext()
