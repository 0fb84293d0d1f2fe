"""From sampled groups to what the training engine takes: advantages, old and reference log-probabilities, corrections.

Shapes: S samples of all groups; T their trajectories, one each unless an agent has branched; N loss tokens of all
trajectories, packed end to end. A sample's advantage is that of each token of all its trajectories; where an advantage
looks at the order of tokens, each trajectory is a sequence of its own that ends with the sample's reward.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from grpo_async_app._roles.groups import SampledGroup
from offbeat_core import Floats, Metric, Metrics, TrainEngine, TrainSequence, Trajectory
from offbeat_objectives import (
    AlgorithmConfig,
    Correction,
    compute_advantages,
    compute_returns,
    correct_rollouts,
    distill,
    kl_per_token,
)


def build_batches(
    groups: list[SampledGroup],
    config: AlgorithmConfig,
    engine: TrainEngine,
    num_batches: int,
    *,
    single_step: bool = False,
    version: int = 0,
    reward_weights: Mapping[str, float] | None = None,
    critic: TrainEngine | None = None,
    critic_lambda: float | None = None,
    bootstrap_truncated: bool = False,
    keeps_routes: bool = False,
) -> tuple[list[list[TrainSequence]], Metrics]:
    """Turn groups into sequences with every extra the losses read; the engine is asked for log-probabilities.

    Args:
        groups: sampled, with their rewards.
        config: of the loss.
        engine: that trains.
        num_batches: at most so many.
        single_step: see `AlgorithmConfig.needs_train_logprobs`.
        version: of the policy before the update, against which lags are counted.
        reward_weights: of the rewards by name, for advantages that look at each; None where there are none.
        critic: asked for the value before each token; None without one.
        critic_lambda: λ of what its values should become; None: that of the advantages.
        bootstrap_truncated: the value after a trajectory that was cut off is what the critic says there, not 0.
        keeps_routes: sequences say which experts their tokens took, where that is known; the engine replays them.

    Returns:
        Mini batches of whole groups, as equal as can be, none empty; and metrics of all of them.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    plain = [sequence for group in groups for sequence in _sequences(group)]
    plain = plain if keeps_routes else without_routes(plain)
    layout = _Layout.of(groups)
    packed: dict[str, Floats] = {"rollout_logprobs": np.concatenate([each.logprobs for each in trajectories])}
    needs_logprobs = config.needs_train_logprobs(single_step=single_step)
    if needs_logprobs:
        packed["old_logprobs"] = _loss_values(plain, engine.logprobs(plain))
    elif config.correction_form == "bypass":
        packed["old_logprobs"] = packed["rollout_logprobs"]
    if config.needs_reference:
        packed["ref_logprobs"] = _loss_values(plain, engine.logprobs(plain, reference=True))
    after_N: Floats | None = None
    if critic is not None:
        is_cut_T = [bootstrap_truncated and trajectory.ended != "done" for trajectory in trajectories]
        packed["values"], after_N = _critic_values(without_routes(plain), critic, is_cut_T)
    is_masked_T = _masked(groups) if config.mask_truncated else [False] * len(trajectories)
    in_loss_N = ~torch.tensor(is_masked_T)[layout.trajectory_N]
    packed["advantages"], metrics = _advantages(
        groups, layout, packed, after_N, config, reward_weights or {}, in_loss_N
    )
    if critic is not None:
        packed["returns"] = _returns(groups, layout, packed, after_N, config, critic_lambda)
        if (learned_N := in_loss_N.numpy()).any():
            values_N, returns_N = packed["values"][learned_N], packed["returns"][learned_N]
            metrics["critic/explained_variance"] = _explained_variance(values_N, returns_N)
    if config.needs_teacher:
        teacher_N = np.concatenate([logprobs for group in groups for logprobs in group.teacher_logprobs])
        old_N = torch.from_numpy(packed["old_logprobs"])
        distilled = distill(config, old_N, torch.from_numpy(teacher_N), layout.lengths_T)
        packed["advantages"] = packed["advantages"] + distilled.advantages_N.numpy()
        metrics.update(distilled.metrics)
    if config.corrects and needs_logprobs:
        correction = _correct(packed, layout, in_loss_N, config)
        packed["correction_weights"] = correction.weights_N.numpy()
        packed["keep"] = correction.keep_N.numpy()
        metrics.update(correction.metrics)
    parts = np.array_split(np.arange(len(groups)), min(num_batches, len(groups)))
    num_first = sum(groups[number].num_tokens for number in parts[0])
    packed["lagged"] = _lagged(trajectories, version, len(packed["rollout_logprobs"]) if needs_logprobs else num_first)
    if config.mask_truncated:
        metrics["train/masked_share"] = Metric(value=float(np.mean(is_masked_T)), weight=float(len(is_masked_T)))
    sequences = list(_with_extras(plain, packed, layout.lengths_T.tolist(), is_masked_T))
    ends = np.cumsum([0, *(len(group.trajectories) for group in groups)])
    return [sequences[ends[part[0]] : ends[part[-1] + 1]] for part in parts], metrics


def _correct(
    packed: dict[str, Floats], layout: "_Layout", in_loss_N: torch.Tensor, config: AlgorithmConfig
) -> Correction:
    """Correct the tokens in the loss, normalised and measured over them alone; what is not trained is as if equal."""
    trajectory_N = layout.trajectory_N[in_loss_N]
    is_left_T = torch.bincount(trajectory_N, minlength=len(layout.lengths_T)) > 0
    sequence_N = (is_left_T.cumsum(0) - 1)[trajectory_N]
    old_N, rollout_N = (torch.from_numpy(packed[name])[in_loss_N] for name in ("old_logprobs", "rollout_logprobs"))
    found = correct_rollouts(old_N, rollout_N, sequence_N, int(is_left_T.sum()), config)
    weights_N, keep_N = torch.ones(len(in_loss_N)), torch.ones(len(in_loss_N))
    weights_N[in_loss_N], keep_N[in_loss_N] = found.weights_N, found.keep_N
    return Correction(weights_N=weights_N, keep_N=keep_N, metrics=found.metrics)


def _lagged(trajectories: Sequence[Trajectory], version: int, num_scored: int) -> Floats:
    """[N] 0 where the trainer's log-probability is of exactly the weights that sampled the token, else 1.

    Args:
        trajectories: of all groups.
        version: of the policy before the update.
        num_scored: tokens whose log-probability is that of this policy; the trainer has made a step before the others.
    """
    runs = [(segment.version, segment.num_tokens) for each in trajectories for segment in each.segments]
    versions, counts = np.array(runs, np.int64).reshape(-1, 2).T
    lagged_N = np.asarray(np.repeat(versions, counts) != version, np.float32)
    lagged_N[num_scored:] = 1
    return lagged_N


def after_a_step(batches: list[list[TrainSequence]]) -> list[list[TrainSequence]]:
    """Return the same mini batches, marked as of a trainer that has made a step since their old policy."""
    return [
        [replace(each, extras={**each.extras, "lagged": each.loss_mask.astype(np.float32)}) for each in batch]
        for batch in batches
    ]


def without_routes(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Return the same sequences for a model that did not sample them: its routers choose."""
    return [replace(sequence, routes=()) if sequence.routes else sequence for sequence in sequences]


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Layout of tokens, trajectories, samples and groups.

    Args:
        group_S: [S] int64, the group of each sample.
        lengths_S: [S] int64, loss tokens of each sample, all its trajectories together.
        lengths_T: [T] int64, loss tokens of each trajectory.
        trajectory_N: [N] int64, sorted: the trajectory of each token.
    """

    group_S: torch.Tensor
    lengths_S: torch.Tensor
    lengths_T: torch.Tensor
    trajectory_N: torch.Tensor

    @classmethod
    def of(cls, groups: list[SampledGroup]) -> Self:
        num_samples = torch.tensor([len(group.rewards) for group in groups])
        sizes_S = torch.tensor([size for group in groups for size in group.sample_sizes])
        lengths_T = torch.tensor([each.num_tokens for group in groups for each in group.trajectories])
        sample_T = torch.repeat_interleave(torch.arange(len(sizes_S)), sizes_S)
        return cls(
            group_S=torch.repeat_interleave(torch.arange(len(groups)), num_samples),
            lengths_S=torch.zeros(len(sizes_S), dtype=lengths_T.dtype).index_add(0, sample_T, lengths_T),
            lengths_T=lengths_T,
            trajectory_N=torch.repeat_interleave(torch.arange(len(lengths_T)), lengths_T),
        )


def _critic_values(plain: list[TrainSequence], critic: TrainEngine, is_cut_T: list[bool]) -> tuple[Floats, Floats]:
    """Return the critic's value before each token, and after the last one of what was cut off (0 elsewhere); [N] each.

    The head answers for a token at the one before it. One more token behind a sequence that was cut off has it answer
    at the sequence's last one in the same pass; a causal model sees nothing of it before.
    """
    asked = [_with_one_more(sequence) if is_cut else sequence for sequence, is_cut in zip(plain, is_cut_T, strict=True)]
    found = critic.logprobs(asked)
    values = [array[: len(sequence.ids)] for sequence, array in zip(plain, found, strict=True)]
    after = [np.zeros(len(sequence.ids), np.float32) for sequence in plain]
    for array, after_last, is_cut in zip(found, after, is_cut_T, strict=True):
        if is_cut:
            after_last[-1] = array[-1]
    return _loss_values(plain, values), _loss_values(plain, after)


def _with_one_more(sequence: TrainSequence) -> TrainSequence:
    ids, mask = np.append(sequence.ids, sequence.ids[-1:]), np.append(sequence.loss_mask, True)
    return replace(sequence, ids=ids, loss_mask=mask)


def _sequences(group: SampledGroup) -> list[TrainSequence]:
    """Return the sequences of its trajectories; they share the pixels of one set of images."""
    images = tuple(picture.pixels() for picture in group.pictures)
    return [trajectory.to_sequence(group.prompt_ids, images) for trajectory in group.trajectories]


def _advantages(
    groups: list[SampledGroup],
    layout: _Layout,
    packed: Mapping[str, Floats],
    after_N: Floats | None,
    config: AlgorithmConfig,
    weights: Mapping[str, float],
    in_loss_N: torch.Tensor,
) -> tuple[Floats, Metrics]:
    greedy_S = None
    if config.needs_greedy_reward:
        greedy = [group.greedy_reward for group in groups]
        assert None not in greedy, "groups without a greedy reward are sampled anew on resume"
        greedy_S = torch.tensor(greedy, dtype=torch.float64)[layout.group_S]
    parts = [each for group in groups for each in group.parts]
    advantages_N, metrics = compute_advantages(
        config,
        _rewards(groups),
        layout.group_S,
        layout.lengths_S,
        parts_S={name: torch.tensor([each.get(name, 0.0) for each in parts], dtype=torch.float64) for name in weights},
        weights=weights,
        kl_N=_kl_in_reward(packed, config),
        values_N=torch.from_numpy(packed["values"]) if "values" in packed else None,
        bootstrap_N=None if after_N is None else torch.from_numpy(after_N),
        trajectory_N=layout.trajectory_N,
        greedy_rewards_S=greedy_S,
        in_loss_N=in_loss_N,
    )
    return advantages_N.numpy(), metrics


def _returns(
    groups: list[SampledGroup],
    layout: _Layout,
    packed: Mapping[str, Floats],
    after_N: Floats | None,
    config: AlgorithmConfig,
    lam: float | None,
) -> Floats:
    returns_N = compute_returns(
        config,
        _rewards(groups),
        layout.lengths_S,
        torch.from_numpy(packed["values"]),
        lam=config.resolved_gae_lambda if lam is None else lam,
        kl_N=_kl_in_reward(packed, config),
        bootstrap_N=None if after_N is None else torch.from_numpy(after_N),
        trajectory_N=layout.trajectory_N,
    )
    return np.asarray(returns_N.numpy(), np.float32)


def _rewards(groups: list[SampledGroup]) -> torch.Tensor:
    """[S] float64."""
    return torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float64)


def _kl_in_reward(packed: Mapping[str, Floats], config: AlgorithmConfig) -> torch.Tensor | None:
    """[N] nats, where the penalty is subtracted from the reward."""
    if not config.needs_reference or config.kl_in != "reward":
        return None
    old_N, reference_N = torch.from_numpy(packed["old_logprobs"]), torch.from_numpy(packed["ref_logprobs"])
    return kl_per_token(old_N, reference_N, config.resolved_kl_estimator)


def _explained_variance(values_N: Floats, returns_N: Floats) -> Metric:
    """1 - Var(return - value) / Var(return): 1 for a critic that knows all, 0 for one that says the same of all."""
    variance = float(np.var(returns_N, dtype=np.float64))
    left = float(np.var(returns_N - values_N, dtype=np.float64))
    return Metric(value=1 - left / variance if variance > 0 else 0.0)


def _masked(groups: list[SampledGroup]) -> list[bool]:
    """Return for each trajectory whether a limit has cut off its sample: any trajectory of it."""
    found: list[bool] = []
    for sample in (sample for group in groups for sample in group.samples):
        found += [any(trajectory.ended != "done" for trajectory in sample)] * len(sample)
    return found


def _loss_values(sequences: list[TrainSequence], values: list[Floats]) -> Floats:
    """[N] float32: the values at the loss tokens of every sequence."""
    return np.concatenate([array[sequence.loss_mask] for sequence, array in zip(sequences, values, strict=True)])


def _with_extras(
    sequences: list[TrainSequence], packed: Mapping[str, Floats], lengths: list[int], is_masked: list[bool]
) -> Iterator[TrainSequence]:
    """Yield the sequences with their extras; masked ones without a token in the loss, nor in what it divides by."""
    bounds = np.cumsum([0, *lengths])
    for number, sequence in enumerate(sequences):
        here = slice(int(bounds[number]), int(bounds[number + 1]))
        extras = {}
        for name, values_N in packed.items():
            extras[name] = np.zeros(len(sequence.ids), np.float32)
            extras[name][sequence.loss_mask] = values_N[here]
        mask = np.zeros_like(sequence.loss_mask) if is_masked[number] else sequence.loss_mask
        yield replace(sequence, extras=extras, loss_mask=mask)
