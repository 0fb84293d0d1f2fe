"""The advantage family: one function each, from `RewardedSamples` to `Advantages`, in float64.

Shapes: S samples of G prompts; N tokens of all samples, packed end to end in sample order.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat_core import ConfigError
from offbeat_objectives._config.algorithm import SAME_REWARD, AlgorithmConfig
from offbeat_objectives._config.options import GaeOptions, GrpoPasskOptions, PassAtKOptions
from offbeat_objectives._packing import reverse_scan, segment_sum

EPSILON: Final = 1e-6
"""Keeps a division by a standard deviation finite."""


@dataclass(frozen=True, kw_only=True)
class RewardedSamples:
    """Inputs of an advantage: the S samples of G prompts, with N loss tokens. A sample may have none.

    Args:
        rewards_S: [S] float64, finite: of each sample, shaping included, less the KL penalty of `kl_in = "reward"`.
        parts_S: each reward by name, [S] float64, before its weight and without shaping; empty if none were given.
        weights: of each part.
        prompts_S: [S] int64 in [0, G): the prompt of each sample.
        num_prompts: G.
        lengths_S: [S] int64: loss tokens of each sample.
        sequence_N: [N] int64 in [0, S), sorted: the sample of each token.
        token_rewards_N: [N] float64: the KL penalty of each token, negative, and at a trajectory's last its reward.
        trajectory_N: [N] int64, sorted: the trajectory of each token; None where each sample has one. A sample has
            several where an agent has branched: each is a conversation of its own, and ends with the sample's reward.
        values_N: [N] float64, what a critic expects at each token; None without one.
        bootstrap_N: [N] float64, what it expects after a trajectory that was cut off, at its last token; 0 elsewhere.
        greedy_rewards_S: [S] float64, reward of the prompt's greedy completion; None unless `advantage = "remax"`.
        in_loss_N: [N] bool, which tokens enter the loss: what is a mean over the batch is over these; None: all do.
        ranks: over which a batch is shared out; None where this process holds all of it.
    """

    rewards_S: Tensor
    prompts_S: Tensor
    num_prompts: int
    lengths_S: Tensor
    sequence_N: Tensor
    token_rewards_N: Tensor
    parts_S: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    trajectory_N: Tensor | None = None
    values_N: Tensor | None = None
    bootstrap_N: Tensor | None = None
    greedy_rewards_S: Tensor | None = None
    in_loss_N: Tensor | None = None
    ranks: "dist.ProcessGroup | None" = None

    def spread(self, values_S: Tensor) -> Tensor:
        """[N]: each sample's value at each of its tokens."""
        return values_S[self.sequence_N]

    def prompt_sum(self, values_S: Tensor) -> Tensor:
        """[S]: the sum over the samples of each sample's prompt."""
        return segment_sum(values_S, self.prompts_S, self.num_prompts)[self.prompts_S]

    def prompt_mean(self, values_S: Tensor, weights_S: Tensor | None = None) -> Tensor:
        """[S]: the mean over the samples of each sample's prompt; 0 where all weights are 0."""
        weights_S = torch.ones_like(values_S) if weights_S is None else weights_S.to(values_S.dtype)
        total_S = self.prompt_sum(weights_S)
        return self.prompt_sum(values_S * weights_S) / total_S.masked_fill(total_S == 0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """Result of an advantage function.

    Args:
        advantages_N: [N] float, finite: of each token, such as `samples.spread(values_S)`.
        metrics_N: [N] float or bool each, by name: a run shows the mean over all tokens as `advantage/NAME`.
    """

    advantages_N: Tensor
    metrics_N: Mapping[str, Tensor] = field(default_factory=dict)


def grpo(samples: RewardedSamples, config: AlgorithmConfig) -> Advantages:
    """(reward - group mean) / (group standard deviation + 1e-6), the deviation with n - 1.

    Source: GRPO, 2402.03300, section 4.1.2; n - 1 as in TRL and verl (the paper does not say).
    """
    return Advantages(advantages_N=samples.spread(_standardised(samples, samples.rewards_S)))


def dr_grpo(samples: RewardedSamples, config: AlgorithmConfig) -> Advantages:
    """Reward - group mean, without a division that favours very easy and very hard prompts.

    Source: Dr. GRPO, 2503.20783, section 3.
    """
    return Advantages(advantages_N=samples.spread(_centred(samples)))


def rloo(samples: RewardedSamples, config: AlgorithmConfig) -> Advantages:
    """Reward - mean reward of the group's other samples; 0 for a sample without others.

    Source: RLOO, 2402.14740.
    """
    # Reward - mean of the n - 1 others = (reward - mean of all n) · n / (n - 1).
    count_S = samples.prompt_sum(torch.ones_like(samples.rewards_S))
    return Advantages(advantages_N=samples.spread(_centred(samples) * count_S / (count_S - 1).clamp(min=1)))


def opo(samples: RewardedSamples, config: AlgorithmConfig) -> Advantages:
    """Reward - mean reward of the group weighted by length, the baseline of least variance.

    Source: OPO, 2505.23585.
    """
    baseline_S = samples.prompt_mean(samples.rewards_S, samples.lengths_S)
    return Advantages(advantages_N=samples.spread(samples.rewards_S - baseline_S))


def gpg(samples: RewardedSamples, config: AlgorithmConfig) -> Advantages:
    """α (reward - group mean), with α = S / (S - M), M the samples of prompts whose rewards are all equal.

    They have no gradient and still count in the mean that the loss takes: α takes them out of it. Both are counts of
    samples in the loss.

    Source: GPG, 2504.02546, with F_norm = 1.
    """
    centred_S = _centred(samples)
    # Not above 0: the mean of equal rewards may differ from them in its last bit.
    has_signal_S = samples.prompt_sum((centred_S.abs() > SAME_REWARD).double()) > 0
    in_loss_S = _in_loss(samples).double()
    # Over all ranks: α is one number for the whole batch.
    total = _sum_over(torch.stack([(has_signal_S * in_loss_S).sum(), in_loss_S.sum()]), samples.ranks)
    return Advantages(advantages_N=samples.spread(centred_S * total[1] / total[0].clamp(min=1)))


def gdpo(samples: RewardedSamples, config: AlgorithmConfig) -> Advantages:
    """Σ weight · (part - group mean) / (group standard deviation + 1e-6), then (x - mean) / (deviation + 1e-6).

    Each reward is normalised within its group by itself, so that a wide one does not drown a narrow one; the sum is
    normalised over the samples of the batch that are in the loss. Deviations are with n - 1.

    Source: GDPO, 2601.05242.
    """
    if not samples.weights or samples.weights.keys() - samples.parts_S.keys():
        raise ConfigError(
            f"compute_advantages needs parts_S and weights for gdpo: got {sorted(samples.parts_S)} and "
            f"{sorted(samples.weights)}"
        )
    sum_S = torch.zeros_like(samples.rewards_S)
    for name, weight in samples.weights.items():
        sum_S = sum_S + weight * _standardised(samples, samples.parts_S[name])
    return Advantages(advantages_N=samples.spread(_normalise(sum_S, samples.ranks, less=1, among=_in_loss(samples))))


def grpo_passk(samples: RewardedSamples, config: AlgorithmConfig) -> Advantages:
    """Best - second best reward of the group for the best sample, 0 for the others; over the group's deviation.

    What leaving a sample out takes from the best of its group, so that n samples are trained for pass@n. Where
    several are best, all get 0. `divide_by_std`: by (standard deviation with n - 1) + 1e-6.

    Source: 2503.19595, the leave-one-out advantage of pass@k; the division as in verl, verl/trainer/ppo/core_algos.py.
    """
    advantages_S = torch.zeros_like(samples.rewards_S)
    for members in _members(samples):
        if len(members) > 1:
            (best, second), places = samples.rewards_S[members].topk(2)
            advantages_S[members[places[0]]] = best - second
    if config.read_options(GrpoPasskOptions).divide_by_std:
        advantages_S = advantages_S / (_deviation(samples, samples.rewards_S) + EPSILON)
    return Advantages(advantages_N=samples.spread(advantages_S))


def pass_at_k(samples: RewardedSamples, config: AlgorithmConfig) -> Advantages:
    """(mean best of the k-subsets that hold the sample - R) / (σ + 1e-6), R and σ over all k-subsets of its group.

    R is the mean over all subsets of k samples of the best reward in them, σ its standard deviation. With rewards of 0
    and 1 this is the analytical form of the paper: (1 - R) / σ where right, (1 - R - C(W - 1, k - 1) / C(n - 1, k - 1))
    / σ where wrong, W being the wrong ones of n. A smaller group takes k down to its size.

    Source: Pass@k Training, 2508.10751, the analytical derivation; here for any rewards.
    """
    k = config.read_options(PassAtKOptions).k
    advantages_S = torch.zeros_like(samples.rewards_S)
    for members in _members(samples):
        advantages_S[members] = _best_of(samples.rewards_S[members], min(k, len(members)))
    return Advantages(advantages_N=samples.spread(advantages_S))


def _best_of(rewards_n: Tensor, k: int) -> Tensor:
    """[n]: of one group.

    Sorted from the worst, sample j is the best of C(j, k - 1) subsets, and of C(j - 1, k - 2) that hold a given i < j.
    """
    count = len(rewards_n)
    sorted_n, order_n = rewards_n.sort()
    # Python divides whole numbers of any size with one rounding.
    best_of = rewards_n.new_tensor([math.comb(j, k - 1) / math.comb(count, k) for j in range(count)])
    mean = (sorted_n * best_of).sum()
    deviation = ((sorted_n - mean).square() * best_of).sum().sqrt()
    all_with_i = math.comb(count - 1, k - 1)
    alone = rewards_n.new_tensor([math.comb(j, k - 1) / all_with_i for j in range(count)])
    # math.comb takes no negative numbers; of such a size there is no subset.
    beaten = [math.comb(j - 1, k - 2) / all_with_i if j and k > 1 else 0.0 for j in range(count)]
    # A sum from the end; the shift by one takes each sample itself out of its own.
    by_better_n = (sorted_n * rewards_n.new_tensor(beaten)).flip(0).cumsum(0).flip(0).roll(-1)
    by_better_n[-1] = 0.0  # the shift has put the whole sum here, and none is better than the best
    with_i_n = sorted_n * alone + by_better_n
    return torch.empty_like(rewards_n).index_copy(0, order_n, (with_i_n - mean) / (deviation + EPSILON))


def reinforce_plus_plus(samples: RewardedSamples, config: AlgorithmConfig) -> Advantages:
    """Return the discounted return of each token in its trajectory, normalised over the tokens of the batch.

    Source: REINFORCE++, 2501.03262, section 3 (global advantage normalisation).
    """
    scanned_N = _trajectories_of(samples)
    returns_N = reverse_scan(samples.token_rewards_N, config.gamma, scanned_N, count_of(scanned_N))
    return Advantages(advantages_N=_normalise(returns_N, samples.ranks, among=samples.in_loss_N))


def reinforce_plus_plus_baseline(samples: RewardedSamples, config: AlgorithmConfig) -> Advantages:
    """Reward - group mean at each token, normalised over the tokens of the batch.

    Source: REINFORCE++-baseline, 2501.03262.
    """
    centred_N = samples.spread(_centred(samples))
    return Advantages(advantages_N=_normalise(centred_N, samples.ranks, among=samples.in_loss_N))


def remax(samples: RewardedSamples, config: AlgorithmConfig) -> Advantages:
    """Reward - reward of the prompt's greedy completion.

    Source: ReMax, 2310.10505.
    """
    greedy_S = required(samples.greedy_rewards_S, "remax", "greedy_rewards_S")
    return Advantages(advantages_N=samples.spread(samples.rewards_S - greedy_S))


def gae(samples: RewardedSamples, config: AlgorithmConfig) -> Advantages:
    """See `gae_advantages`; then normalised over the tokens of the batch, unless the option `normalise` is false.

    Source: GAE, 1506.02438, equation 16; normalised as by OpenAI's baselines, verl and TRL.
    """
    values_N, scanned_N = required(samples.values_N, "gae", "values_N"), _trajectories_of(samples)
    advantages_N = gae_advantages(
        samples.token_rewards_N,
        values_N,
        scanned_N,
        count_of(scanned_N),
        config.gamma,
        config.resolved_gae_lambda,
        bootstrap_N=samples.bootstrap_N,
    )
    normalises = config.read_options(GaeOptions).normalise
    if normalises:
        advantages_N = _normalise(advantages_N, samples.ranks, among=samples.in_loss_N)
    return Advantages(advantages_N=advantages_N)


def gae_advantages(
    rewards_N: Tensor,
    values_N: Tensor,
    sequence_N: Tensor,
    num_sequences: int,
    gamma: float,
    lam: float,
    *,
    bootstrap_N: Tensor | None = None,
) -> Tensor:
    """A_t = δ_t + γλ A_{t+1} with δ_t = reward_t + γ V_{t+1} - V_t; A is 0 after a sequence's last token, and so is V.

    Args:
        rewards_N: [N], reward for each token.
        values_N: [N], value before each token.
        sequence_N: [N] int64 in [0, S), sorted.
        num_sequences: S.
        gamma: discount per token, in [0, 1].
        lam: λ, in [0, 1].
        bootstrap_N: [N], read at each sequence's last token: V after it, where the sequence was cut off and has not
            ended; None: 0 everywhere.

    Returns:
        [N] float64, not normalised.

    Source: GAE, 1506.02438, equation 16; V after a time limit: 1712.00378, section 3.2.
    """
    values_N = values_N.double()
    next_N = torch.zeros_like(values_N) if bootstrap_N is None else bootstrap_N.to(values_N.dtype).clone()
    # V of the next token of the same sequence; at its last token the bootstrap stays.
    next_N[:-1] = torch.where(sequence_N[1:] == sequence_N[:-1], values_N[1:], next_N[:-1])
    return reverse_scan(rewards_N.double() + gamma * next_N - values_N, gamma * lam, sequence_N, num_sequences)


def _in_loss(samples: RewardedSamples) -> Tensor:
    """[S] bool: which samples enter the loss; one without tokens, which was not left out of it, counts."""
    if samples.in_loss_N is None:
        return torch.ones_like(samples.rewards_S, dtype=torch.bool)
    num_in_S, num_out_S = (
        segment_sum(each_N.double(), samples.sequence_N, len(samples.rewards_S))
        for each_N in (samples.in_loss_N, ~samples.in_loss_N)
    )
    return (num_in_S > 0) | (num_out_S == 0)


def _trajectories_of(samples: RewardedSamples) -> Tensor:
    """[N] int64, sorted: tokens of one number follow each other in time."""
    return samples.sequence_N if samples.trajectory_N is None else samples.trajectory_N


def count_of(sequence_N: Tensor) -> int:
    """Return how many sequences these numbers name, from 0 to the largest."""
    return int(sequence_N[-1]) + 1 if len(sequence_N) else 0


def _centred(samples: RewardedSamples) -> Tensor:
    """[S]: reward - group mean."""
    return samples.rewards_S - samples.prompt_mean(samples.rewards_S)


def _deviation(samples: RewardedSamples, values_S: Tensor) -> Tensor:
    """[S]: the standard deviation within each sample's group, with n - 1; 0 for a sample alone."""
    squares_S = samples.prompt_sum((values_S - samples.prompt_mean(values_S)).square())
    count_S = samples.prompt_sum(torch.ones_like(values_S))
    return (squares_S / (count_S - 1).clamp(min=1)).sqrt()


def _standardised(samples: RewardedSamples, values_S: Tensor) -> Tensor:
    centred_S = values_S - samples.prompt_mean(values_S)
    return centred_S / (_deviation(samples, values_S) + EPSILON)


def _members(samples: RewardedSamples) -> list[Tensor]:
    """Return the samples of each prompt."""
    sizes = torch.bincount(samples.prompts_S, minlength=samples.num_prompts)
    return list(torch.split(samples.prompts_S.argsort(stable=True), sizes.tolist()))


def _normalise(
    values: Tensor, ranks: "dist.ProcessGroup | None", *, less: int = 0, among: Tensor | None = None
) -> Tensor:
    """(x - mean) / (standard deviation + 1e-6), both over `among` the values of all ranks, with n - `less`."""
    among = torch.ones_like(values) if among is None else among.to(values.dtype)
    count = _sum_over(among.sum(), ranks)
    centred = values - _sum_over((values * among).sum(), ranks) / count.clamp(min=1)
    # From centred values: the difference of two large sums would lose digits.
    variance = _sum_over((centred.square() * among).sum(), ranks) / (count - less).clamp(min=1)
    return centred / (variance.sqrt() + EPSILON)


def _sum_over(total: Tensor, ranks: "dist.ProcessGroup | None") -> Tensor:
    if ranks is not None:
        dist.all_reduce(total, group=ranks)
    return total


def required(tensor: Tensor | None, chosen: str, name: str) -> Tensor:
    """Return an input that the chosen advantage, or the place of the KL penalty, needs."""
    if tensor is None:
        raise ConfigError(f"compute_advantages needs {name} for {chosen}: got None")
    return tensor


AdvantageFunction = Callable[[RewardedSamples, AlgorithmConfig], Advantages]
ADVANTAGE_FUNCTIONS: Final[dict[str, AdvantageFunction]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "gdpo": gdpo,
    "grpo_passk": grpo_passk,
    "pass_at_k": pass_at_k,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "gae": gae,
}
