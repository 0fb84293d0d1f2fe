"""The critic of PPO: what its values should become, and the loss that brings them there.

Shapes: S samples; N loss tokens of all samples, or of one micro-batch, packed end to end.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from offbeat_core import DeferredMetrics, LossTokens, ShapeError
from offbeat_objectives._advantages.advantages import kl_penalty, token_rewards, trajectories
from offbeat_objectives._advantages.estimators import count_of, gae_advantages
from offbeat_objectives._config.algorithm import AlgorithmConfig
from offbeat_objectives._packing import Measure, defer_metrics, require_tokens, sequence_of_tokens

VALUES: Final = "values"
RETURNS: Final = "returns"


@torch.no_grad()
def compute_returns(
    config: AlgorithmConfig,
    rewards_S: Tensor,
    lengths_S: Tensor,
    values_N: Tensor,
    *,
    lam: float,
    kl_N: Tensor | None = None,
    bootstrap_N: Tensor | None = None,
    trajectory_N: Tensor | None = None,
) -> Tensor:
    """Return what a critic's value of every token should become: its advantage under `lam`, and the value itself.

    Args:
        config: `gamma`, and `kl_coefficient` where `kl_in` is "reward".
        rewards_S: [S] float, one per sample, shaping included.
        lengths_S: [S] int64, loss tokens of each sample; 0 is allowed.
        values_N: [N], the critic's value before each token.
        lam: λ of the critic, in [0, 1]; with 1 and gamma 1 the sum of the rewards still to come.
        kl_N: [N] nats, as for `compute_advantages`.
        bootstrap_N: [N], the value after each trajectory that was cut off, as there.
        trajectory_N: [N] int64, the trajectory of each token, as there.

    Returns:
        [N] float32.

    Source: GAE, 1506.02438, equation 16; a λ of the critic's own: VC-PPO, 2503.01491, section 3.2.
    """
    lengths_S = lengths_S.long()
    sequence_N = sequence_of_tokens(lengths_S)
    trajectory_N = trajectories(sequence_N, trajectory_N)
    rewards_N = token_rewards(rewards_S.double(), sequence_N, trajectory_N, kl_penalty(config, kl_N, sequence_N))
    advantages_N = gae_advantages(
        rewards_N, values_N, trajectory_N, count_of(trajectory_N), config.gamma, lam, bootstrap_N=bootstrap_N
    )
    return (advantages_N + values_N.double()).float()


@dataclass(frozen=True)
class ValueLoss:
    """½ (V - return)², mean over the tokens of the update; a `LossFunction` that can be pickled.

    With `clip` it is the larger of that and the same of V held within ± clip of the value before the update, so that a
    step moves a value no further.

    Extras it reads, each [N] float32: `values`, before the update, and `returns`, as made by `compute_returns`. The
    engine's head is "score": what it answers at a token is the value before it.

    Args:
        clip: in reward; None does not clip.

    Source: OpenAI baselines, ppo2 (the clipped loss is not in the paper of PPO); arXiv:2005.12729, section 3.
    """

    clip: float | None = None

    def __call__(self, tokens: LossTokens[Any]) -> tuple[Tensor, DeferredMetrics]:
        """Return one micro-batch's share of the update's loss.

        Returns:
            A scalar, and metrics `critic/loss` (the shares add up), `critic/value`, `critic/return` and
            `critic/clip_fraction` (means over tokens).

        Raises:
            ShapeError: an extra is missing or has another shape.
        """
        if missing := [name for name in (VALUES, RETURNS) if name not in tokens.extras]:
            raise ShapeError(f"the critic's loss needs the extras {VALUES} and {RETURNS}: {missing} missing")
        value_N, old_N, return_N = tokens.logprobs_N, tokens.extras[VALUES], tokens.extras[RETURNS]
        require_tokens("the critic's loss", tokens.sequence_N, value_N, old_N, return_N)
        error_N = (value_N - return_N).square()
        clipped_N = torch.zeros_like(error_N, dtype=torch.bool)
        if self.clip is not None:
            held_N = value_N.clamp(old_N - self.clip, old_N + self.clip)
            held_error_N = (held_N - return_N).square()
            clipped_N = held_error_N > error_N
            error_N = torch.maximum(error_N, held_error_N)
        loss = 0.5 * error_N.sum() / max(tokens.total_tokens, 1)
        num_tokens = len(value_N)
        measures: dict[str, Measure] = {"critic/loss": (loss, 1.0, "sum")}
        if num_tokens:
            means = {"value": value_N, "return": return_N, "clip_fraction": clipped_N.to(value_N.dtype)}
            measures |= {f"critic/{name}": (each.mean(), num_tokens, "mean") for name, each in means.items()}
        return loss, defer_metrics(measures)
