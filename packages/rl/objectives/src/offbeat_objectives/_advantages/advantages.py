"""From rewards to the advantage of every token.

Shapes: S samples, grouped by prompt; N tokens of all samples, packed end to end in sample order.
Everything is computed in float64 (equal rewards then give an advantage of 0, not of rounding error) and returned as
float32.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat_core import DataError, Metrics, ShapeError, as_written, find_function
from offbeat_objectives._advantages.estimators import (
    ADVANTAGE_FUNCTIONS,
    AdvantageFunction,
    Advantages,
    RewardedSamples,
    required,
)
from offbeat_objectives._config.algorithm import AlgorithmConfig
from offbeat_objectives._packing import read_metrics, segment_sum, sequence_of_tokens


@torch.no_grad()
def compute_advantages(
    config: AlgorithmConfig,
    rewards_S: Tensor,
    prompts_S: Tensor,
    lengths_S: Tensor,
    *,
    parts_S: Mapping[str, Tensor] | None = None,
    weights: Mapping[str, float] | None = None,
    kl_N: Tensor | None = None,
    values_N: Tensor | None = None,
    bootstrap_N: Tensor | None = None,
    trajectory_N: Tensor | None = None,
    greedy_rewards_S: Tensor | None = None,
    in_loss_N: Tensor | None = None,
    group: "dist.ProcessGroup | None" = None,
) -> tuple[Tensor, Metrics]:
    """Return the advantage of every token. `.split(lengths_S.tolist())` gives one array per sample.

    Args:
        config: `advantage` and what belongs to it, and `kl_coefficient` where `kl_in` is "reward".
        rewards_S: [S] float, one per sample, shaping included.
        prompts_S: [S] int64, equal for the samples of one prompt; any numbers, any order.
        lengths_S: [S] int64, loss tokens of each sample; 0 is allowed.
        parts_S: each reward by name, [S] float, before its weight; needed by gdpo.
        weights: of each part; needed by gdpo.
        kl_N: [N] nats, the penalty of each token before its coefficient; needed where `kl_in` is "reward".
        values_N: [N], the critic's value at each token; needed by gae.
        bootstrap_N: [N], its value after each trajectory that was cut off, at the last token; 0 elsewhere. None: 0.
        trajectory_N: [N] int64, sorted: the trajectory of each token, where samples have several; None: one each.
        greedy_rewards_S: [S], reward of the prompt's greedy completion; needed by remax.
        in_loss_N: [N] bool, which tokens enter the loss, where some do not (`mask_truncated`): those, or their samples,
            that advantages are normalised over. None: all.
        group: ranks over which reinforce_plus_plus, gpg and gdpo normalise; all must call. None: this process holds the
            batch.

    Returns:
        [N] float32, and metrics under `advantage/`.

    Raises:
        ConfigError: an input that the chosen advantage needs is missing, or there is no such function.
        DataError: a reward is not finite, or an advantage that a function of the user's own returns.
        ShapeError: the inputs do not fit together, or a function of the user's own returns another shape.
    """
    rewards_S, lengths_S = rewards_S.double(), lengths_S.long()
    sequence_N = sequence_of_tokens(lengths_S)
    parts_S = {name: values_S.double() for name, values_S in (parts_S or {}).items()}
    of_samples = {"prompts_S": prompts_S, "lengths_S": lengths_S, "greedy_rewards_S": greedy_rewards_S, **parts_S}
    _check_inputs(rewards_S, of_samples)
    trajectory_N = trajectories(sequence_N, trajectory_N)
    of_tokens = {"kl_N": kl_N, "values_N": values_N, "bootstrap_N": bootstrap_N, "in_loss_N": in_loss_N}
    _check_inputs(sequence_N, of_tokens)
    penalty_N = kl_penalty(config, kl_N, sequence_N)
    if not config.needs_reward:
        return torch.zeros(len(sequence_N), device=sequence_N.device), {}
    prompts, prompts_S = torch.unique(prompts_S, return_inverse=True)
    samples = RewardedSamples(
        rewards_S=rewards_S - segment_sum(penalty_N, sequence_N, len(rewards_S)),
        parts_S=parts_S,
        weights=dict(weights or {}),
        prompts_S=prompts_S,
        num_prompts=len(prompts),
        lengths_S=lengths_S,
        sequence_N=sequence_N,
        token_rewards_N=token_rewards(rewards_S, sequence_N, trajectory_N, penalty_N),
        trajectory_N=trajectory_N,
        values_N=None if values_N is None else values_N.double(),
        bootstrap_N=None if bootstrap_N is None else bootstrap_N.double(),
        greedy_rewards_S=None if greedy_rewards_S is None else greedy_rewards_S.double(),
        in_loss_N=in_loss_N,
        ranks=group,
    )
    found = find_advantage(config)(samples, config)
    if config.has_own_advantage:
        _check_own(config, found, sequence_N)
    return found.advantages_N.float(), _mean_metrics(found)


def find_advantage(config: AlgorithmConfig) -> AdvantageFunction:
    """Return the function that `config.advantage` names, which must not be none."""
    name = config.advantage
    return find_function("algorithm.advantage", name) if config.has_own_advantage else ADVANTAGE_FUNCTIONS[name]


def token_rewards(rewards_S: Tensor, sequence_N: Tensor, trajectory_N: Tensor, penalty_N: Tensor) -> Tensor:
    """[N]: minus the penalty at every token, plus the sample's reward at the last of each of its trajectories."""
    is_last_N = torch.ones_like(trajectory_N, dtype=torch.bool)
    is_last_N[:-1] = trajectory_N[1:] != trajectory_N[:-1]
    return torch.where(is_last_N, rewards_S[sequence_N], 0.0) - penalty_N


def trajectories(sequence_N: Tensor, trajectory_N: Tensor | None) -> Tensor:
    """[N]: the trajectory of each token, numbered from 0; one for each sample where none are given."""
    if trajectory_N is None:
        return sequence_N
    _check_inputs(sequence_N, {"trajectory_N": trajectory_N})
    begins_N = trajectory_N[1:] != trajectory_N[:-1]
    if bool((trajectory_N[1:] < trajectory_N[:-1]).any() | (~begins_N & (sequence_N[1:] != sequence_N[:-1])).any()):
        raise ShapeError("compute_advantages needs trajectory_N in ascending order, each trajectory within one sample")
    return torch.cat([begins_N.new_zeros(min(len(trajectory_N), 1)), begins_N]).cumsum(0)


def kl_penalty(config: AlgorithmConfig, kl_N: Tensor | None, sequence_N: Tensor) -> Tensor:
    """[N] float64: what is subtracted from the reward at every token; 0 where the penalty is not in the reward."""
    if not config.needs_reference or config.kl_in != "reward":
        return torch.zeros(len(sequence_N), dtype=torch.float64, device=sequence_N.device)
    return config.kl_coefficient * required(kl_N, "kl_in = reward", "kl_N").double()


def _check_inputs(first: Tensor, others: dict[str, Tensor | None]) -> None:
    wrong = {name: tuple(t.shape) for name, t in others.items() if t is not None and t.shape != first.shape}
    if wrong:
        raise ShapeError(f"compute_advantages needs the shape {tuple(first.shape)}: got {wrong}")
    if not bool(first.isfinite().all()):
        bad = [i for i, finite in enumerate(first.isfinite().tolist()) if not finite]
        raise DataError(f"rewards must be finite numbers: samples {bad[:8]} are not; mend the reward function")


def _check_own(config: AlgorithmConfig, found: Advantages, sequence_N: Tensor) -> None:
    named = {"advantages_N": found.advantages_N, **found.metrics_N}
    wrong = {name: tuple(values_N.shape) for name, values_N in named.items() if values_N.shape != sequence_N.shape}
    if wrong:
        raise ShapeError(
            f"algorithm.advantage {as_written(config.advantage)} must return {tuple(sequence_N.shape)}: got {wrong}"
        )
    if not bool(found.advantages_N.isfinite().all()):
        raise DataError(
            f"algorithm.advantage {as_written(config.advantage)} returned advantages that are no finite numbers"
        )


def _mean_metrics(found: Advantages) -> Metrics:
    num_tokens = len(found.advantages_N)
    if num_tokens == 0:
        return {}
    means = {f"advantage/{name}": values_N.double().mean() for name, values_N in found.metrics_N.items()}
    return read_metrics({name: (mean, num_tokens, "mean") for name, mean in means.items()})
