"""The trainer role: the training engine in a process of its own."""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from grpo_async_app._config.critic import CRITIC_FOLDER
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._roles.batches import after_a_step, build_batches, without_routes
from grpo_async_app._roles.copies import Copies
from grpo_async_app._roles.groups import SampledGroup
from grpo_async_app._roles.process_memory import resident_bytes
from offbeat_core import (
    Fingerprint,
    Floats,
    Ids,
    InspectedTrainEngine,
    Inspection,
    Metric,
    Metrics,
    ModelError,
    RoleName,
    SleepingTrainEngine,
    TensorSpec,
    TracePlan,
    TrainEngine,
    TrainEngineConfig,
    TrainSequence,
    WeightPart,
    WeightProof,
    disk_errors,
    fingerprint,
    load_backend,
    merge_metrics,
)
from offbeat_device import StepTracer, open_device
from offbeat_mesh import Mesh, Rendezvous, current_world, interrupt_calls
from offbeat_objectives import ValueLoss, build_loss, summarise_mismatch
from offbeat_run import check_shared, counted_loss, log_line, log_loaded, log_start, size_text
from offbeat_weightsync import (
    BucketPlan,
    WeightCopy,
    WeightSender,
    describe_tensors,
    fp8_specs,
    is_fp8_weight,
    new_address,
    open_transport,
    quantize_tensors,
)


class TrainerRole:
    """Updates the policy, and hands its weights to rollout engines. A critic, where there is one, is updated before it.

    Args:
        config: of the run.
        model_path: folder it starts from.
        num_updates: of the whole run, for the learning rate's schedule.
        num_threads: of each rank.
        socket_paths: for each rank the address where engines on its machine fetch weights from it, from `new_address`
            or `new_socket_path`; "" for a rank that sends none.
        checkpoint: folder to resume from, or empty.
        rendezvous: this process among the ranks of the trainer; None for the only one. All are called alike. The
            launcher shows each rank devices of its own, so all take the same one by name.
        trace_folder: takes the traces of section `profile`; its parent, the run folder, takes checkpoints,
            and weights that go by the disk.
        is_spare: it is no rank yet: `rejoin` makes it one.
    """

    _engine: TrainEngine
    _critic: TrainEngine | None

    def __init__(
        self,
        *,
        config: GrpoConfig,
        model_path: str,
        num_updates: int,
        num_threads: int,
        socket_paths: list[str],
        checkpoint: str = "",
        rendezvous: Rendezvous | None = None,
        trace_folder: str = "",
        is_spare: bool = False,
    ) -> None:
        began_s = time.monotonic()
        log_start(config.engine.device, num_threads)
        if trace_folder:
            check_shared(Path(trace_folder).parent)
        self._config, self._trace_folder, self._checkpoint = config, trace_folder, checkpoint
        self._settings = config.train_engine(model_path, num_updates, num_threads)
        self._critic_settings = config.critic_engine(model_path, num_updates, num_threads)
        self._single_step = config.steps_per_update == 1
        self._algorithm, self._loss = config.algorithm, build_loss(config.algorithm, single_step=self._single_step)
        self._critic_config, self._value_loss = config.critic, ValueLoss(config.critic.clip)
        self._reward_weights = config.reward.all_weights if config.reward.is_set else {}
        self._rollout = config.rollout
        self._senders: dict[str, WeightSender] = {}
        self._copies: Copies | None = None
        self._last_withdrawn, self._so_far = 0, ""
        if is_spare:
            load_backend("offbeat.engine", config.engine.backend)  # imports what takes long
            log_line("waits for the place of a rank")
            return
        mesh = self._join(rendezvous)
        self._engine, self._critic = _create(config.engine.backend, self._settings, mesh), None
        if config.algorithm.needs_critic:
            self._critic = _create(config.critic.backend, self._critic_settings, mesh)
        self._know_engine()
        self._lay_out({part: self._specs_of(part) for part in config.rollout.weight_parts})
        if checkpoint:
            self._engine.load(Path(checkpoint))
            if self._critic is not None:
                self._critic.load(Path(checkpoint) / CRITIC_FOLDER)
        self._copies = Copies.of(self._engine, self._specs)
        if self._copies is not None:
            self._copies.keep(0, {})
        log_loaded(checkpoint or model_path, self._settings.dtype, began_s)
        self._open_senders(socket_paths)
        log_line("ready")

    def _join(self, rendezvous: Rendezvous | None) -> Mesh | None:
        """Become a rank, and meet the others."""
        self._rank, self._is_alone = rendezvous.rank if rendezvous else 0, rendezvous is None
        self._role, device = RoleName("trainer", self._rank), self._config.engine.device
        stall_after_s = self._config.liveness.stall_after_s
        return rendezvous.join(device, name=str(self._role), stall_after_s=stall_after_s) if rendezvous else None

    def _know_engine(self) -> None:
        """Keep what the engine says of its model."""
        config = self._config
        self._replays = self._follows_routes(config.rollout.replay_routes)
        self._trace = make_trace(config.profile.plan(self._role, Path(self._trace_folder)), config.engine.device)
        self._in_float32: frozenset[str] = getattr(self._engine, "float32_weights", frozenset())

    def _lay_out(self, specs: Mapping[WeightPart, Sequence[TensorSpec]]) -> None:
        """Plan how the tensors of each part travel to the samplers."""
        self._specs = specs
        self._plans = {part: BucketPlan.build(each, self._rollout.sync_bucket_bytes) for part, each in specs.items()}

    def _open_senders(self, socket_paths: list[str]) -> None:
        """Offer the weights to the engines that fetch them from this rank."""
        rollout, socket_path = self._rollout, socket_paths[self._rank]
        everything = [spec for plan in self._plans.values() for spec in plan.specs]
        self._plan = BucketPlan.build(everything, rollout.sync_bucket_bytes)
        changes = rollout.full_sync_every - 1
        self._copy = WeightCopy(changes) if changes and socket_path else None
        folder = rollout.weight_folder or str(Path(self._trace_folder).parent / "weights")
        self._transport = open_transport(rollout.weight_transport, self._config.engine.device, folder)
        if socket_path and self._transport.reach != "network":
            self._senders[""] = self._transport.open_sender(socket_path, self._plan, name=str(self._role))

    async def interrupt(self) -> None:
        """Break off what this rank waits for, as another has died.

        A coroutine, so that it runs while another method waits in its thread.
        """
        interrupt_calls()

    def rejoin(self, rendezvous: Rendezvous, socket_paths: list[str]) -> None:
        """Be a rank of a trainer of which one has died: go on with the state after the last update of all ranks.

        Args:
            rendezvous: of all ranks, the new ones too.
            socket_paths: as of all of them now.
        """
        began_s, is_new = time.monotonic(), self._copies is None
        held = self._copies.held if self._copies is not None else None
        if world := current_world():
            self._engine.close()
            del self._engine
            world.abandon()
            gc.unfreeze()  # what the actor has built at its start, and FSDP ties in circles
            gc.collect()
        backend, mesh = load_backend("offbeat.engine", self._config.engine.backend), self._join(rendezvous)
        self._copies = Copies.recovered(*backend.recover(self._settings, mesh, held))
        self._engine = self._copies.engine
        gc.freeze()
        if is_new:
            self._critic = None
            self._know_engine()
            self._lay_out(self._copies.specs)
            self._open_senders(socket_paths)
        seconds = time.monotonic() - began_s
        log_line(f"{self._role} goes on from the state of update {self._copies.version}, after {seconds:.1f} s")

    def _follows_routes(self, wanted: str) -> bool:
        """Return whether sequences keep their routes.

        Raises:
            ModelError: it is wanted, and the engine cannot for this model.
        """
        problem = getattr(self._engine, "replay_problem", "the engine does not replay routes")
        if problem and wanted in ("on", "measure"):
            raise ModelError(f"rollout.replay_routes = {wanted}: {problem}; set it to auto or off")
        if problem and wanted != "off":
            log_line(f"rollout.replay_routes = {wanted}: the trainer chooses experts itself, as {problem}")
        return wanted != "off" and not problem

    def _specs_of(self, part: WeightPart) -> list[TensorSpec]:
        """Describe the tensors of a part as they travel; a call of all ranks."""
        described = describe_tensors(self._gather(part), self._rollout.dtype)
        specs = [replace(spec, dtype="float32") if spec.name in self._in_float32 else spec for spec in described]
        return fp8_specs(specs, self._is_fp8) if self._as_fp8(part) else specs

    def _is_fp8(self, spec: TensorSpec) -> bool:
        return is_fp8_weight(spec) and spec.name not in self._in_float32

    def _as_fp8(self, part: WeightPart) -> bool:
        return self._rollout.weight_format == "fp8" and part != "adapter"

    def _gather(self, part: WeightPart) -> Iterator[tuple[str, Tensor]]:
        """The engine's tensors, rounded before ranks gather them; blocks of FP8 are made of what is not rounded yet."""
        return iter(self._engine.weights(None if self._as_fp8(part) else self._rollout.dtype, part=part))

    def update(self, groups: list[SampledGroup], num_batches: int, number: int = 0) -> Metrics:
        """Train on groups: one optimizer step for each of `num_batches` mini batches in each pass; merge metrics."""
        began_s = time.monotonic()
        if self._copies is not None and number < self._copies.version:
            return self._copies.metrics  # a rank died after this update, which is in the state of all
        with self._trace(number):
            metrics = self._update(groups, num_batches, number)
            if self._copies is not None:
                self._copies.keep(number + 1, metrics)
        log_line(f"update {number + 1}: {len(groups)} groups in {time.monotonic() - began_s:.1f} s")
        return metrics

    def _update(self, groups: list[SampledGroup], num_batches: int, number: int) -> Metrics:
        self._so_far = "looking at the samples"
        batches, metrics = build_batches(
            groups,
            self._algorithm,
            self._engine,
            num_batches,
            single_step=self._single_step,
            version=number,
            reward_weights=self._reward_weights,
            critic=self._critic,
            critic_lambda=self._critic_config.gae_lambda,
            bootstrap_truncated=self._critic_config.bootstrap_truncated,
            keeps_routes=self._replays,
        )
        steps, passes = [], range(self._algorithm.num_passes)
        if self._critic is not None:
            steps += [self._step_critic(self._critic, without_routes(batch)) for _ in passes for batch in batches]
        if self._critic is None or number >= self._critic_config.warmup_updates:
            steps += [self._step(batch) for batch in batches]
            # Log-probabilities that are not recomputed are the trainer's own: after a pass those of other weights.
            recomputes = self._algorithm.needs_train_logprobs(single_step=self._single_step)
            later = batches if recomputes else after_a_step(batches)
            steps += [self._step(batch) for _ in passes[1:] for batch in later]
        return summarise_mismatch(merge_metrics([metrics, *steps]))

    def _step(self, sequences: list[TrainSequence]) -> Metrics:
        loss = counted_loss(self._loss, self._note, is_alone=self._is_alone)
        losses = _named(self._engine.forward_backward(sequences, loss))
        return {**losses, **{f"engine/{name}": metric for name, metric in self._engine.step().items()}}

    def _note(self, so_far: str) -> None:
        self._so_far = so_far

    def _step_critic(self, critic: TrainEngine, sequences: list[TrainSequence]) -> Metrics:
        loss = counted_loss(self._value_loss, lambda so_far: self._note(f"critic: {so_far}"), is_alone=self._is_alone)
        losses = critic.forward_backward(sequences, loss)
        measured = {name: metric for name, metric in losses.items() if name.startswith("critic/")}
        # Each optimizer step has a loss of its own: their mean is the update's.
        measured["critic/loss"] = Metric(value=measured["critic/loss"].value) if measured else Metric(value=0.0)
        return {**measured, **{f"critic/{name}": metric for name, metric in critic.step().items()}}

    def listen(self, host: str) -> str:
        """Listen for engines that reach this machine as `host`.

        Returns:
            The address for `pull_weights` there, and for `push_weights`; "" on all ranks but the first.
        """
        if self._rank:
            return ""
        sender = self._transport.open_sender(new_address(host), self._plan)
        self._senders[sender.address] = sender
        return sender.address

    def push_weights(
        self,
        version: int,
        num_engines: list[int],
        deadline_s: float,
        address: str = "",
        transfer_id: int = 0,
        part: WeightPart = "merged",
    ) -> list[WeightProof]:
        """Give the weights to rollout engines that ask for `version`, and gather them with the other ranks.

        Args:
            version: policy version.
            num_engines: for each rank the number of engines that ask it; a rank without engines gathers all the same.
            deadline_s: for the engines to come, load and prove.
            address: where they ask rank 0, from `listen`; "" is this rank's socket path.
            transfer_id: grows with each call, for `withdraw`; 0 cannot be withdrawn.
            part: one of `RolloutConfig.weight_parts`.

        Returns:
            What each engine has proved to this rank.
        """

        def is_withdrawn() -> bool:
            return 0 < transfer_id <= self._last_withdrawn

        weights, num_asking, began_s = self._gather(part), num_engines[self._rank], time.monotonic()
        try:
            if not num_asking:
                return []
            proofs = self._senders[address].send(
                quantize_tensors(weights, self._is_fp8) if self._as_fp8(part) else weights,
                version,
                num_asking,
                deadline_s=deadline_s,
                is_withdrawn=is_withdrawn,
                plan=self._plans[part],
                copy=self._copy,
            )
            size, seconds = size_text(self._plans[part].num_bytes), time.monotonic() - began_s
            engines = f"{num_asking} engine{'s' * (num_asking != 1)}"
            log_line(f"sent weights: version {version} to {engines}, {size} in {seconds:.1f} s")
            return proofs
        finally:
            deque(weights, maxlen=0)  # all ranks gather every tensor, also when a receiver has failed

    async def withdraw(self, transfer_id: int) -> None:
        """Not all engines of this transfer will come: wait for them no longer, also if that has not begun yet.

        A coroutine, so that it runs while `push_weights` waits in its thread.
        """
        self._last_withdrawn = max(self._last_withdrawn, transfer_id)

    def save(self, folder: str, with_optimizer: bool) -> None:
        """Write a checkpoint in Hugging Face format; with the optimizer it can be resumed exactly."""
        with disk_errors(Path(folder)):
            if with_optimizer:
                self._engine.save(Path(folder))
                if self._critic is not None:
                    self._critic.save(Path(folder) / CRITIC_FOLDER)
            else:
                self._engine.save_weights(Path(folder))

    # ── diagnosis ─────────────────────────────────────────────────────────────────────────────────────────────────

    def logprobs(self, sequences: list[TrainSequence]) -> list[Floats]:
        """Log-probabilities under the weights of now, at the sampler's temperature; see `TrainEngine`."""
        return self._engine.logprobs(sequences if self._replays else without_routes(sequences))

    def inspect(self, ids: Ids, layer: int | None) -> Inspection:
        """Return what the engine computes on the way, where it says so; nothing else from other engines."""
        if not isinstance(self._engine, InspectedTrainEngine):
            return {}
        return self._engine.inspect(TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) > 0), layer)

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Return the fingerprints of the model's weights as engines get them, without an adapter that goes alone.

        All ranks gather, and the first one's answer counts.
        """
        weights, dtype = self._gather(self._rollout.weight_parts[0]), getattr(torch, self._rollout.dtype)
        found = {}
        for name, tensor in weights:
            if self._rank == 0:
                held = tensor if name in self._in_float32 else tensor.to(dtype)
                found[name] = fingerprint(held.float().cpu().numpy())
        return found

    def sleep(self, level: int) -> int:
        """Give memory back between updates; the bytes of main memory that are held still."""
        for engine in self._sleepers:
            engine.sleep(level)
        return resident_bytes()

    def wake(self, tags: tuple[str, ...] = ()) -> int:
        """Take memory again; the bytes of main memory that are held now."""
        for engine in self._sleepers:
            engine.wake(tags)
        return resident_bytes()

    @property
    def _sleepers(self) -> list[SleepingTrainEngine]:
        engines = [self._engine] if self._critic is None else [self._engine, self._critic]
        assert all(isinstance(engine, SleepingTrainEngine) for engine in engines)  # the preflight has seen to it
        return cast(list[SleepingTrainEngine], engines)

    async def beat(self) -> str:
        """Answer how far an update is, also while it computes: the process is neither stopped nor stuck."""
        return self._so_far

    def close(self) -> None:
        if not hasattr(self, "_engine"):  # a spare
            return
        for sender in self._senders.values():
            sender.close()
        self._transport.close()
        self._engine.close()
        if self._critic is not None:
            self._critic.close()
        if world := current_world():
            world.leave()
        log_line("ended")


def _create(backend: str, settings: TrainEngineConfig, mesh: Mesh | None) -> TrainEngine:
    create = load_backend("offbeat.engine", backend).create
    engine: TrainEngine = create(settings) if mesh is None else create(settings, mesh)
    return engine


def make_trace(plan: TracePlan | None, device: str) -> Callable[[int], AbstractContextManager[None]]:
    """Called with the number of an update: the block in which it runs, traced if this rank shall trace it."""
    if plan is None:
        return lambda _: nullcontext()
    return StepTracer(open_device(device), plan).step


_NAMES = {
    "policy/entropy": "train/entropy",
    "policy/kl_reference": "train/kl_ref",
    "policy/kl_old": "train/kl_old",
    "policy/ratio_mean": "train/ratio_mean",
    "policy/ratio_max": "train/ratio_max",
    "policy/share_kept": "train/share_kept",
}
_LOSSES = {
    "loss": "train/loss",
    "loss/policy": "train/loss_policy",
    "loss/kl": "train/loss_kl",
    "loss/entropy": "train/loss_entropy",
}
"""From the names of offbeat-objectives to those of a run's report."""


def _named(metrics: Metrics) -> Metrics:
    """Return the run's names for what a loss measured."""
    named = {_NAMES[name]: metric for name, metric in metrics.items() if name in _NAMES}
    clips = [metric for name, metric in metrics.items() if name.startswith("policy/clip_")]
    if clips:
        named["train/clip_fraction"] = replace(clips[0], value=sum(clip.value for clip in clips))
    # Each optimizer step has a loss of its own, and parts of it: their mean is the update's.
    named |= {_LOSSES[name]: Metric(value=metric.value) for name, metric in metrics.items() if name in _LOSSES}
    named.setdefault("train/loss", Metric(value=0.0))
    # The engine's own names have no slash: see `TrainEngine.forward_backward`.
    named |= {f"engine/{name}": metric for name, metric in metrics.items() if "/" not in name and name != "loss"}
    kept = ("correction/", "objective/", "mismatch_sums/")
    return {**named, **{name: metric for name, metric in metrics.items() if name.startswith(kept)}}
