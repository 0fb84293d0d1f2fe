"""The trainer role: the training engine in a process of its own."""

from collections import deque
from dataclasses import replace
from pathlib import Path

from grpo_async_app._groups import SampledGroup
from grpo_async_app._roles.batches import TrainBatch, build_batch, split_batch
from grpo_async_app._roles.team import TeamPlace, leave
from offbeat_objectives import AlgorithmConfig, build_loss
from offbeat_types import (
    Metric,
    Metrics,
    TrainEngine,
    TrainEngineConfig,
    WeightProof,
    load_backend,
    merge_metrics,
)
from offbeat_weightsync import BucketPlan, SharedMemorySender, describe_tensors

ALONE = TeamPlace()


class TrainerRole:
    """Updates the policy, and hands its weights to rollout engines.

    Args:
        backend: name under the entry-point group `offbeat.engine`.
        config: the engine's.
        algorithm: section `algorithm`.
        socket_path: where rollout engines fetch weights.
        rollout_dtype: format the weights travel in.
        bucket_bytes: size of a weight bucket.
        checkpoint: folder to go on from, or empty.
        team: this process among the ranks of the trainer. All ranks are called alike; rank 0 sends weights.
        stall_after_s: a rank waits longer than this for another: all end, and the log says why.
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
        team: TeamPlace = ALONE,
        stall_after_s: float = 60.0,
    ) -> None:
        create = load_backend("offbeat.engine", backend).create
        mesh = team.join(config.device, stall_after_s)
        self._engine: TrainEngine = create(config, mesh) if mesh else create(config)
        if checkpoint:
            self._engine.load(Path(checkpoint))
        self._algorithm, self._loss = algorithm, build_loss(algorithm)
        plan = BucketPlan.build(describe_tensors(self._engine.weights(), rollout_dtype), bucket_bytes)
        self._sender = SharedMemorySender(socket_path, plan) if team.rank == 0 else None

    def update(self, groups: list[SampledGroup], num_batches: int) -> Metrics:
        """Train on groups: one optimizer step for each of `num_batches` mini batches.

        Returns:
            Metrics of the losses and steps, merged over the mini batches.
        """
        batch = build_batch(groups, self._algorithm, self._engine)
        steps = [self._step(part) for part in split_batch(batch, num_batches)]
        return merge_metrics([batch.metrics, *steps])

    def _step(self, batch: TrainBatch) -> Metrics:
        losses = _named(self._engine.forward_backward(batch.sequences, self._loss))
        return {**losses, **{f"engine/{name}": metric for name, metric in self._engine.step().items()}}

    def send_weights(self, version: int, deadline_s: float) -> list[WeightProof]:
        """Give the weights to one rollout engine that asks for `version`; the other ranks hand over their parts."""
        weights = iter(self._engine.weights())
        try:
            return self._sender.send(weights, version, 1, deadline_s=deadline_s) if self._sender else []
        finally:
            deque(weights, maxlen=0)  # all ranks gather every tensor, also when the receiver has failed

    def save(self, folder: str, with_optimizer: bool) -> None:
        """Write a checkpoint in Hugging Face format; with the optimizer it can be resumed exactly."""
        if with_optimizer:
            self._engine.save(Path(folder))
        else:
            self._engine.save_weights(Path(folder))

    def close(self) -> None:
        """Stop listening, and free the engine."""
        if self._sender is not None:
            self._sender.close()
        self._engine.close()
        leave()


_NAMES = {
    "policy/entropy": "train/entropy",
    "policy/kl_reference": "train/kl_ref",
    "policy/kl_old": "train/kl_old",
    "policy/ratio_mean": "train/ratio_mean",
    "policy/ratio_max": "train/ratio_max",
    "policy/share_kept": "train/share_kept",
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
    # Each optimizer step has a loss of its own: their mean is the update's.
    named["train/loss"] = Metric(value=metrics["loss"].value if "loss" in metrics else 0.0)
    for name in ("packed_tokens", "sequence_tokens", "num_microbatches"):
        if name in metrics:
            named[f"engine/{name}"] = metrics[name]
    return {**named, **{name: metric for name, metric in metrics.items() if name.startswith("correction/")}}
