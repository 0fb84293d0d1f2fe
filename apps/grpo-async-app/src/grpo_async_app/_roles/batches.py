"""From sampled groups to what the training engine takes: advantages, old and reference log-probabilities, corrections.

Shapes: S samples of all groups; N their loss tokens, packed end to end.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from grpo_async_app._roles.groups import SampledGroup
from offbeat_objectives import AlgorithmConfig, compute_advantages, correct_rollouts, distill, kl_per_token
from offbeat_types import Floats, Metrics, TrainEngine, TrainSequence


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Sequences to train on, in group order.

    Args:
        sequences: one per trajectory.
        groups: for each sequence, the place of its group among the groups of the update.
        metrics: of the batch as a whole.
    """

    sequences: list[TrainSequence]
    groups: list[int]
    metrics: Metrics


def build_batch(groups: list[SampledGroup], config: AlgorithmConfig, engine: TrainEngine) -> TrainBatch:
    """Turn groups into sequences with every extra the loss reads.

    Args:
        groups: scored, nothing in them aborted.
        config: section `algorithm`.
        engine: asked for log-probabilities where the algorithm needs them.
    """
    samples = [
        (place, group, number) for place, group in enumerate(groups) for number in range(len(group.trajectories))
    ]
    trajectories = [group.trajectories[number] for _, group, number in samples]
    plain = [sequence for group in groups for sequence in _sequences(group)]
    lengths_S = torch.tensor([trajectory.num_tokens for trajectory in trajectories])
    packed: dict[str, Floats] = {"rollout_logprobs": np.concatenate([each.logprobs for each in trajectories])}
    metrics: Metrics = {}
    if config.needs_train_logprobs:
        packed["old_logprobs"] = _loss_values(plain, engine.logprobs(plain))
    else:
        packed["old_logprobs"] = packed["rollout_logprobs"]
    if config.needs_reference:
        packed["ref_logprobs"] = _loss_values(plain, engine.logprobs(plain, reference=True))
    packed["advantages"] = _advantages(samples, lengths_S, packed, config)
    if config.needs_teacher:
        teacher_N = np.concatenate([group.teacher_logprobs[number] for _, group, number in samples])
        distilled = distill(config, torch.from_numpy(packed["old_logprobs"]), torch.from_numpy(teacher_N), lengths_S)
        packed["advantages"] = packed["advantages"] + distilled.advantages_N.numpy()
        metrics.update(distilled.metrics)
    if config.correction != "none" and config.needs_train_logprobs:
        correction = correct_rollouts(
            torch.from_numpy(packed["old_logprobs"]),
            torch.from_numpy(packed["rollout_logprobs"]),
            torch.repeat_interleave(torch.arange(len(samples)), lengths_S),
            len(samples),
            config,
        )
        packed["correction_weights"] = correction.weights_N.numpy()
        packed["keep"] = correction.keep_N.numpy()
        metrics.update(correction.metrics)
    sequences = list(_with_extras(plain, packed, lengths_S.tolist()))
    return TrainBatch(sequences=sequences, groups=[place for place, _, _ in samples], metrics=metrics)


def _sequences(group: SampledGroup) -> list[TrainSequence]:
    """Of its trajectories; they share the pixels of one set of images."""
    images = tuple(picture.pixels() for picture in group.pictures)
    return [trajectory.to_sequence(group.prompt_ids, images) for trajectory in group.trajectories]


def split_batch(batch: TrainBatch, num_batches: int) -> Iterator[TrainBatch]:
    """Split by groups into mini batches as equal as can be; none is empty."""
    num_groups = max(batch.groups, default=-1) + 1
    for part in np.array_split(np.arange(num_groups), min(num_batches, max(num_groups, 1))):
        chosen = set(part.tolist())
        sequences = [sequence for sequence, group in zip(batch.sequences, batch.groups, strict=True) if group in chosen]
        yield TrainBatch(sequences=sequences, groups=[group for group in batch.groups if group in chosen], metrics={})


def _advantages(
    samples: list[tuple[int, SampledGroup, int]],
    lengths_S: torch.Tensor,
    packed: Mapping[str, Floats],
    config: AlgorithmConfig,
) -> Floats:
    kl_N = None
    if config.needs_reference and config.kl_in == "reward":
        old_N, reference_N = torch.from_numpy(packed["old_logprobs"]), torch.from_numpy(packed["ref_logprobs"])
        kl_N = kl_per_token(old_N, reference_N, config.resolved_kl_estimator)
    greedy_S = None
    if config.needs_greedy_reward:
        greedy_S = torch.tensor([group.greedy_reward for _, group, _ in samples], dtype=torch.float64)
    return compute_advantages(
        config,
        torch.tensor([group.rewards[number] for _, group, number in samples], dtype=torch.float64),
        torch.tensor([place for place, _, _ in samples]),
        lengths_S,
        kl_N=kl_N,
        greedy_rewards_S=greedy_S,
    ).numpy()


def _loss_values(sequences: list[TrainSequence], values: list[Floats]) -> Floats:
    """[N] float32: the values at the loss tokens of every sequence."""
    return np.concatenate([array[sequence.loss_mask] for sequence, array in zip(sequences, values, strict=True)])


def _with_extras(
    sequences: list[TrainSequence], packed: Mapping[str, Floats], lengths: list[int]
) -> Iterator[TrainSequence]:
    bounds = np.cumsum([0, *lengths])
    for number, sequence in enumerate(sequences):
        here = slice(int(bounds[number]), int(bounds[number + 1]))
        extras = {}
        for name, values_N in packed.items():
            extras[name] = np.zeros(len(sequence.ids), np.float32)
            extras[name][sequence.loss_mask] = values_N[here]
        yield replace(sequence, extras=extras)
