"""From rewards to advantages.

Shapes: S samples, grouped by prompt; N tokens of all samples, packed end to end in sample order.
Everything is computed in float64 (equal rewards then give an advantage of 0, not of rounding error) and returned as
float32.
"""

from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat_objectives._config import AlgorithmConfig
from offbeat_objectives._packing import reverse_scan, segment_sum, sequence_of_tokens
from offbeat_types import ConfigError, DataError, ShapeError

EPSILON: Final = 1e-6
"""Keeps a division by a standard deviation finite."""

GroupAdvantage = Callable[[Tensor, Tensor, Tensor], Tensor]


@torch.no_grad()
def compute_advantages(
    config: AlgorithmConfig,
    rewards_S: Tensor,
    prompts_S: Tensor,
    lengths_S: Tensor,
    *,
    kl_N: Tensor | None = None,
    values_N: Tensor | None = None,
    greedy_rewards_S: Tensor | None = None,
    group: "dist.ProcessGroup | None" = None,
) -> Tensor:
    """The advantage of every token. `.split(lengths_S.tolist())` gives one array per sample.

    Args:
        config: `advantage`, `gamma`, `gae_lambda`, and `kl_coefficient` where `kl_in` is "reward".
        rewards_S: [S] float, one per sample, shaping included.
        prompts_S: [S] int64, equal for the samples of one prompt; any numbers, any order.
        lengths_S: [S] int64, loss tokens of each sample; 0 is allowed.
        kl_N: [N] nats, the penalty of each token before its coefficient; needed where `kl_in` is "reward".
        values_N: [N], the critic's value at each token; needed by gae.
        greedy_rewards_S: [S], reward of the prompt's greedy completion; needed by remax.
        group: ranks over which reinforce_plus_plus normalises; all must call. None: this process holds the batch.

    Returns:
        [N] float32.

    Raises:
        ConfigError: an input that the chosen advantage needs is missing.
        DataError: a reward is not finite.
        ShapeError: the inputs do not fit together.
    """
    rewards_S, lengths_S = rewards_S.double(), lengths_S.long()
    sequence_N = sequence_of_tokens(lengths_S)
    _check_inputs(rewards_S, {"prompts_S": prompts_S, "lengths_S": lengths_S, "greedy_rewards_S": greedy_rewards_S})
    _check_inputs(sequence_N, {"kl_N": kl_N, "values_N": values_N})
    penalty_N = _kl_penalty(config, kl_N, sequence_N)
    if not config.needs_reward:
        return torch.zeros(len(sequence_N), device=sequence_N.device)
    if config.advantage == "reinforce_plus_plus":
        token_rewards_N = _token_rewards(rewards_S, lengths_S, penalty_N)
        returns_N = reverse_scan(token_rewards_N, config.gamma, sequence_N, len(rewards_S))
        return _normalise(returns_N, group).float()
    if config.advantage == "gae":
        token_rewards_N = _token_rewards(rewards_S, lengths_S, penalty_N)
        lam = 0.95 if config.gae_lambda is None else config.gae_lambda
        values_N = _required(values_N, "gae", "values_N")
        return gae_advantages(token_rewards_N, values_N, sequence_N, len(rewards_S), config.gamma, lam).float()
    shaped_S = rewards_S - segment_sum(penalty_N, sequence_N, len(rewards_S))
    if config.advantage == "remax":
        advantages_S = shaped_S - _required(greedy_rewards_S, "remax", "greedy_rewards_S").double()
    else:
        index_S = torch.unique(prompts_S, return_inverse=True)[1]
        advantages_S = GROUP_ADVANTAGES[config.advantage](shaped_S, index_S, lengths_S)
    return advantages_S[sequence_N].float()


def grpo_advantages(rewards_S: Tensor, index_S: Tensor, lengths_S: Tensor) -> Tensor:
    """(reward - group mean) / (group standard deviation + 1e-6), the deviation with n - 1.

    Source: GRPO, 2402.03300, section 4.1.2; n - 1 as in TRL and verl (the paper does not say).
    """
    centred_S = dr_grpo_advantages(rewards_S, index_S, lengths_S)
    num_groups = _num_groups(index_S)
    squares_G = segment_sum(centred_S.square(), index_S, num_groups)
    count_G = segment_sum(torch.ones_like(rewards_S), index_S, num_groups)
    std_G = (squares_G / (count_G - 1).clamp(min=1)).sqrt()
    return centred_S / (std_G[index_S] + EPSILON)


def dr_grpo_advantages(rewards_S: Tensor, index_S: Tensor, lengths_S: Tensor) -> Tensor:
    """Reward - group mean, without a division that favours very easy and very hard prompts.

    Source: Dr. GRPO, 2503.20783, section 3.
    """
    return rewards_S - _weighted_group_mean(rewards_S, index_S, torch.ones_like(rewards_S))


def rloo_advantages(rewards_S: Tensor, index_S: Tensor, lengths_S: Tensor) -> Tensor:
    """Reward - mean reward of the group's other samples; 0 for a sample without others.

    Source: RLOO, 2402.14740.
    """
    count_S = torch.bincount(index_S)[index_S]
    return dr_grpo_advantages(rewards_S, index_S, lengths_S) * count_S / (count_S - 1).clamp(min=1)


def opo_advantages(rewards_S: Tensor, index_S: Tensor, lengths_S: Tensor) -> Tensor:
    """Reward - mean reward of the group weighted by length, the baseline of least variance.

    Source: OPO, 2505.23585.
    """
    return rewards_S - _weighted_group_mean(rewards_S, index_S, lengths_S.to(rewards_S.dtype))


GROUP_ADVANTAGES: Final[dict[str, GroupAdvantage]] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "opo": opo_advantages,
}


def gae_advantages(
    rewards_N: Tensor, values_N: Tensor, sequence_N: Tensor, num_sequences: int, gamma: float, lam: float
) -> Tensor:
    """A_t = δ_t + γλ A_{t+1} with δ_t = reward_t + γ V_{t+1} - V_t; V and A are 0 after a sequence's last token.

    Args:
        rewards_N: [N], reward for each token.
        values_N: [N], value before each token.
        sequence_N: [N] int64 in [0, S), sorted.
        num_sequences: S.
        gamma: discount per token, in [0, 1].
        lam: λ, in [0, 1].

    Returns:
        [N] float64, not normalised.

    Source: GAE, 1506.02438, equation 16.
    """
    values_N = values_N.double()
    next_N = torch.zeros_like(values_N)
    next_N[:-1] = torch.where(sequence_N[1:] == sequence_N[:-1], values_N[1:], 0.0)
    return reverse_scan(rewards_N.double() + gamma * next_N - values_N, gamma * lam, sequence_N, num_sequences)


def _normalise(returns_N: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
    """(x - mean) / (standard deviation + 1e-6) over all tokens of all members.

    Source: REINFORCE++, 2501.03262, section 3 (global advantage normalisation).
    """
    count = _sum_over(returns_N.new_tensor(float(len(returns_N))), group).clamp(min=1)
    centred_N = returns_N - _sum_over(returns_N.sum(), group) / count
    variance = _sum_over(centred_N.square().sum(), group) / count
    return centred_N / (variance.sqrt() + EPSILON)


def _sum_over(total: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


def _weighted_group_mean(values_S: Tensor, index_S: Tensor, weights_S: Tensor) -> Tensor:
    """[S]: the mean of each sample's group; 0 where the weights are 0."""
    num_groups = _num_groups(index_S)
    total_G = segment_sum(values_S * weights_S, index_S, num_groups)
    weight_G = segment_sum(weights_S, index_S, num_groups)
    return (total_G / weight_G.masked_fill(weight_G == 0, 1.0))[index_S]


def _num_groups(index_S: Tensor) -> int:
    return int(index_S.max()) + 1 if len(index_S) else 0


def _token_rewards(rewards_S: Tensor, lengths_S: Tensor, penalty_N: Tensor) -> Tensor:
    """[N]: minus the penalty at every token, plus the sample's reward at its last."""
    token_rewards_N = -penalty_N
    last_S = lengths_S.cumsum(0) - 1
    has_tokens_S = lengths_S > 0
    token_rewards_N[last_S[has_tokens_S]] += rewards_S[has_tokens_S]
    return token_rewards_N


def _kl_penalty(config: AlgorithmConfig, kl_N: Tensor | None, sequence_N: Tensor) -> Tensor:
    if not config.needs_reference or config.kl_in != "reward":
        return torch.zeros(len(sequence_N), dtype=torch.float64, device=sequence_N.device)
    return config.kl_coefficient * _required(kl_N, "kl_in = reward", "kl_N").double()


def _required(tensor: Tensor | None, chosen: str, name: str) -> Tensor:
    if tensor is None:
        raise ConfigError(f"compute_advantages needs {name} for {chosen}: got None")
    return tensor


def _check_inputs(first: Tensor, others: dict[str, Tensor | None]) -> None:
    wrong = {name: tuple(t.shape) for name, t in others.items() if t is not None and t.shape != first.shape}
    if wrong:
        raise ShapeError(f"compute_advantages needs the shape {tuple(first.shape)}: got {wrong}")
    if not bool(first.isfinite().all()):
        bad = [i for i, finite in enumerate(first.isfinite().tolist()) if not finite]
        raise DataError(f"rewards must be finite numbers: samples {bad[:8]} are not; mend the reward function")
