"""What happens to rewards before they become advantages: groups without signal, completions too long."""

import math
from collections.abc import Sequence
from typing import Final

from offbeat_types import ConfigError, DataError

SAME_REWARD: Final = 1e-6
"""Rewards closer than this count as equal: sums of weighted rewards differ in their last digits."""


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether a prompt's samples differ in reward. Equal rewards give a group advantage of 0 everywhere.

    Args:
        rewards: one per sample of one prompt, final (shaping included).

    Raises:
        DataError: a reward is not finite.

    Source: DAPO, 2503.14476, section 3.2 (dynamic sampling).
    """
    values = [float(reward) for reward in rewards]
    if not all(map(math.isfinite, values)):
        raise DataError(f"rewards must be finite numbers: got {values}; mend the reward function")
    return bool(values) and max(values) - min(values) > SAME_REWARD


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> float:
    """The soft overlong punishment of one completion, to be added to its reward.

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
