"""The trainer role: the training engine in a process of its own."""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_async_app._roles.batches import TrainBatch, build_batch, split_batch
from grpo_async_app._roles.groups import SampledGroup
from grpo_async_app._roles.rendezvous import Rendezvous, leave
from grpo_async_app._roles.residence import resident_bytes
from offbeat_objectives import AlgorithmConfig, build_loss
from offbeat_run import disk_errors
from offbeat_types import (
    Metric,
    Metrics,
    SleepingTrainEngine,
    TracePlan,
    TrainEngine,
    TrainEngineConfig,
    WeightProof,
    load_backend,
    merge_metrics,
)
from offbeat_weightsync import (
    BucketPlan,
    WeightSender,
    describe_tensors,
    fp8_specs,
    new_address,
    open_sender,
    quantize_tensors,
)

ALONE = Rendezvous()


class TrainerRole:
    """Updates the policy, and hands its weights to rollout engines.

    Args:
        backend: name under the entry-point group `offbeat.engine`.
        config: the engine's.
        algorithm: section `algorithm`.
        socket_path: where rollout engines fetch weights: an address from `new_address` or `new_socket_path`.
        rollout_dtype: format the weights travel in.
        as_fp8: the layers' matrices travel as FP8 blocks instead.
        bucket_bytes: size of a weight bucket.
        checkpoint: folder to go on from, or empty.
        rendezvous: this process among the ranks of the trainer. All ranks are called alike; rank 0 sends weights.
        stall_after_s: a rank waits longer than this for another: all end, and the log says why.
        traces: which updates each rank traces, by its name.
    """

    def __init__(
        self,
        *,
        backend: str,
        config: TrainEngineConfig,
        algorithm: AlgorithmConfig,
        socket_path: str,
        rollout_dtype: str,
        bucket_bytes: int,
        checkpoint: str = "",
        rendezvous: Rendezvous = ALONE,
        stall_after_s: float = 60.0,
        as_fp8: bool = False,
        traces: list[TracePlan] = [],  # noqa: B006  never changed
    ) -> None:
        create = load_backend("offbeat.engine", backend).create
        mesh = rendezvous.join(config.device, stall_after_s)
        self._engine: TrainEngine = create(config, mesh) if mesh else create(config)
        if checkpoint:
            self._engine.load(Path(checkpoint))
        self._trace = make_trace(traces, rendezvous.rank, config.device)
        self._algorithm, self._loss = algorithm, build_loss(algorithm)
        specs = describe_tensors(self._engine.weights(), rollout_dtype)
        self._plan = BucketPlan.build(fp8_specs(specs) if as_fp8 else specs, bucket_bytes)
        self._as_fp8 = as_fp8
        self._leads = rendezvous.rank == 0
        self._senders: dict[str, WeightSender] = {}
        self._last_withdrawn = 0
        if self._leads:
            self._senders[""] = open_sender(socket_path, self._plan)

    def update(self, groups: list[SampledGroup], num_batches: int, number: int = 0) -> Metrics:
        """Train on groups: one optimizer step for each of `num_batches` mini batches.

        Args:
            groups: scored.
            num_batches: R / mini batch size.
            number: of the update, from 0.

        Returns:
            Metrics of the losses and steps, merged over the mini batches.
        """
        with self._trace(number):
            return self._update(groups, num_batches)

    def _update(self, groups: list[SampledGroup], num_batches: int) -> Metrics:
        batch = build_batch(groups, self._algorithm, self._engine)
        steps = [self._step(part) for part in split_batch(batch, num_batches)]
        return merge_metrics([batch.metrics, *steps])

    def _step(self, batch: TrainBatch) -> Metrics:
        losses = _named(self._engine.forward_backward(batch.sequences, self._loss))
        return {**losses, **{f"engine/{name}": metric for name, metric in self._engine.step().items()}}

    def listen(self, host: str) -> str:
        """Hand weights over TCP too, to engines that reach this machine as `host`.

        Returns:
            The address to give to `receive_weights` there, and to `send_weights`; "" on ranks that send nothing.
        """
        if not self._leads:
            return ""
        sender = open_sender(new_address(host), self._plan)
        self._senders[sender.address] = sender
        return sender.address

    def send_weights(
        self, version: int, deadline_s: float, address: str = "", transfer_id: int = 0
    ) -> list[WeightProof]:
        """Give the weights to one rollout engine that asks for `version`; the other ranks hand over their parts.

        Args:
            version: of the policy.
            deadline_s: for the engine to come, load and prove.
            address: what the engine was given, if it is one from `listen`.
            transfer_id: a number that grows with each call, for `withdraw`; 0 cannot be withdrawn.
        """
        weights = iter(self._engine.weights())
        try:
            return self._send(weights, version, deadline_s, address, transfer_id) if self._leads else []
        finally:
            deque(weights, maxlen=0)  # all ranks gather every tensor, also when the receiver has failed

    def _send(
        self, weights: Iterable[tuple[str, Any]], version: int, deadline_s: float, address: str, transfer_id: int
    ) -> list[WeightProof]:
        def is_withdrawn() -> bool:
            return 0 < transfer_id <= self._last_withdrawn

        if self._as_fp8:
            weights = quantize_tensors(weights)
        return self._senders[address].send(weights, version, 1, deadline_s=deadline_s, is_withdrawn=is_withdrawn)

    async def withdraw(self, transfer_id: int) -> None:
        """The engine of this transfer does not come any more: wait for it no longer, also if that has not begun yet.

        A coroutine, so that it is heard while `send_weights` waits in its thread.
        """
        self._last_withdrawn = max(self._last_withdrawn, transfer_id)

    def save(self, folder: str, with_optimizer: bool) -> None:
        """Write a checkpoint in Hugging Face format; with the optimizer it can be resumed exactly.

        Raises:
            RunFolderError: the disk takes no more.
        """
        with disk_errors(Path(folder)):
            if with_optimizer:
                self._engine.save(Path(folder))
            else:
                self._engine.save_weights(Path(folder))

    def sleep(self, level: int) -> int:
        """Give memory back between updates; see `SleepingTrainEngine.sleep`.

        Returns:
            Bytes of main memory that are held still.
        """
        self._sleeper.sleep(level)
        return resident_bytes()

    def wake(self, tags: tuple[str, ...] = ()) -> int:
        """Take memory again; see `SleepingTrainEngine.wake`.

        Returns:
            Bytes of main memory that are held now.
        """
        self._sleeper.wake(tags)
        return resident_bytes()

    @property
    def _sleeper(self) -> SleepingTrainEngine:
        assert isinstance(self._engine, SleepingTrainEngine)  # the preflight has seen to it
        return self._engine

    async def beat(self) -> None:
        """Answer, also while an update computes: the process is neither stopped nor stuck."""

    def close(self) -> None:
        """Stop listening, and free the engine."""
        for sender in self._senders.values():
            sender.close()
        self._engine.close()
        leave()


def make_trace(traces: list[TracePlan], rank: int, device: str) -> Callable[[int], AbstractContextManager[None]]:
    """Called with the number of an update: the block in which it runs, traced if this rank shall trace it."""
    plan = next((plan for plan in traces if plan.role == f"trainer-{rank}"), None)
    if plan is None:
        return lambda _: nullcontext()
    from offbeat_mesh import StepTracer, open_device

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
    """The run's names for what a loss measured."""
    named = {_NAMES[name]: metric for name, metric in metrics.items() if name in _NAMES}
    clips = [metric for name, metric in metrics.items() if name.startswith("policy/clip_")]
    if clips:
        named["train/clip_fraction"] = replace(clips[0], value=sum(clip.value for clip in clips))
    # Each optimizer step has a loss of its own, and parts of it: their mean is the update's.
    named |= {_LOSSES[name]: Metric(value=metric.value) for name, metric in metrics.items() if name in _LOSSES}
    named.setdefault("train/loss", Metric(value=0.0))
    # The engine's own names have no slash: see `TrainEngine.forward_backward`.
    named |= {f"engine/{name}": metric for name, metric in metrics.items() if "/" not in name and name != "loss"}
    return {**named, **{name: metric for name, metric in metrics.items() if name.startswith("correction/")}}
