"""Rewards as a driver reads them, without torch: whether a group can teach anything, and the penalty for length."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from offbeat_core import ConfigError, DataError
from offbeat_objectives._config.algorithm import SAME_REWARD, AlgorithmConfig
from offbeat_objectives._config.options import PassAtKOptions

_BY_PARTS: Final = "gdpo"


def has_signal(
    rewards: Sequence[float],
    config: AlgorithmConfig | None = None,
    *,
    parts: Sequence[Mapping[str, float]] = (),
    weights: Mapping[str, float] | None = None,
    greedy_reward: float | None = None,
    masked: Sequence[bool] = (),
) -> bool:
    """Return whether the samples of one prompt teach anything under the advantage of `config`.

    Give the rewards as they were scored, before the overlong penalty: DAPO judges whether answers are right, and wrong
    answers of different lengths are no reason to train a group.

    | advantage | a group has signal when |
    |---|---|
    | gdpo | a reward with a weight differs among the samples |
    | grpo_passk | the best reward is above the second best |
    | pass_at_k | the best reward of k samples depends on which k they are |
    | remax | a reward differs from the greedy one |
    | a function of the user's own | the rewards differ, or one of the parts does |
    | every other | the rewards differ |

    Under every advantage a sample that is left out of the loss teaches nothing itself.

    Args:
        rewards: one per sample, as scored.
        config: section "algorithm"; None: an advantage that compares rewards.
        parts: each sample's rewards by name, for gdpo and for functions of the user's own.
        weights: of each part; a part without weight does not count.
        greedy_reward: of the prompt's greedy completion, for remax.
        masked: for each sample whether it is left out of the loss (`mask_truncated`); empty: none is.

    Raises:
        DataError: a reward is not finite.

    Source: DAPO, 2503.14476, section 3.2 (dynamic sampling).
    """
    config, values = config or AlgorithmConfig(), _finite(rewards)
    learned = [value for value, is_masked in zip(values, masked or [False] * len(values), strict=True) if not is_masked]
    if not learned:
        return False
    if config.advantage == "remax" and greedy_reward is not None:
        [greedy] = _finite([greedy_reward])
        return any(_differ([value, greedy]) for value in learned)
    if config.advantage == _BY_PARTS or config.has_own_advantage:
        weighted = [name for name, weight in (weights or {}).items() if weight]
        columns = [_finite([each.get(name, 0.0) for each in parts]) for name in weighted]
        return any(map(_differ, columns)) or (config.has_own_advantage and _differ(values))
    if config.advantage in ("grpo_passk", "pass_at_k"):
        worst_best = sorted(values)[_least_best(config, len(values))]
        # Of grpo_passk the best sample alone has an advantage.
        best = max(learned if config.advantage == "grpo_passk" else values)
        return best - worst_best > SAME_REWARD
    return _differ(values)


def _least_best(config: AlgorithmConfig, count: int) -> int:
    """Return the place, from the worst, of the least reward that can be the best of those that are compared."""
    if config.advantage == "grpo_passk":
        return max(count - 2, 0)
    return min(config.read_options(PassAtKOptions).k, count) - 1


def _finite(rewards: Iterable[float]) -> list[float]:
    values = [float(reward) for reward in rewards]
    if not all(map(math.isfinite, values)):
        raise DataError(f"rewards must be finite numbers: got {values}; mend the reward function")
    return values


def _differ(values: Sequence[float]) -> bool:
    return bool(values) and max(values) - min(values) > SAME_REWARD


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> float:
    """Return the soft overlong punishment of one completion, to be added to its reward.

    0 up to max_tokens - buffer_tokens, then falling evenly to -factor at max_tokens, and -factor beyond.

    Args:
        num_tokens: its length.
        max_tokens: longest completion allowed.
        buffer_tokens: tokens before max_tokens over which the penalty grows; 0 < buffer_tokens <= max_tokens.
        factor: full size, in reward.

    Returns:
        A number in [-factor, 0].

    Raises:
        ConfigError: buffer_tokens is out of range.

    Source: DAPO, 2503.14476, equation 13.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ConfigError(
            f"algorithm.overlong_buffer_tokens must lie between 1 and the longest completion, {max_tokens}: "
            f"got {buffer_tokens}"
        )
    over = num_tokens - (max_tokens - buffer_tokens)
    return -factor * min(max(over / buffer_tokens, 0.0), 1.0)
