"""On-policy distillation: the student's own samples, judged token by token by a teacher.

The objective is the reverse divergence KL(π ‖ q) of student π and teacher q on what the student samples. Of the
sampled token alone log π - log q is known, which is enough: E[∇ log π · (log π - log q)] is the gradient. So it
enters as an advantage, log q - log π, and importance ratios, clipping and rollout correction act on it as on any other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat_objectives._config import AlgorithmConfig
from offbeat_objectives._kl import kl_per_token
from offbeat_objectives._metrics import read_metrics
from offbeat_objectives._packing import require_tokens, reverse_scan, sequence_of_tokens
from offbeat_objectives._preset import LOG_RATIO_BOUND
from offbeat_types import Metrics


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """What a teacher has to say to the samples of an update.

    Args:
        advantages_N: [N] float32, to be added to those of the rewards; the coefficient is in it.
        metrics: under `distillation/`.
    """

    advantages_N: Tensor
    metrics: Metrics


@torch.no_grad()
def distill(config: AlgorithmConfig, student_N: Tensor, teacher_N: Tensor, lengths_S: Tensor) -> Distillation:
    """A_t = c Σ_{u >= t} γ^(u - t) (log q_u - log π_u) within each sample, each term cut at ±20.

    With γ = 0 each token answers for itself: the gradient of the divergences at the states visited, as in GKD. With
    γ = 1 it answers for all that follows: the gradient of the divergence of whole sequences, as in MiniLLM.

    Args:
        config: `distillation_coefficient` is c, `distillation_discount` γ.
        student_N: [N] nats, of the policy that the loss's ratio is against, all samples end to end.
        teacher_N: [N] nats, at the same temperature.
        lengths_S: [S] int64, tokens of each sample.

    Raises:
        ShapeError: the tensors differ in shape.

    Source: GKD, 2306.13649, section 3 (λ = 1, reverse KL; here estimated from the sampled token); MiniLLM, 2306.08543,
    section 2.2 (the policy gradient, without its single-step decomposition and length normalisation).
    """
    sequence_N = sequence_of_tokens(lengths_S)
    require_tokens("distill", sequence_N, student_N, teacher_N)
    gain_N = (teacher_N.double() - student_N.double()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    returns_N = reverse_scan(gain_N, config.distillation_discount or 0.0, sequence_N, len(lengths_S))
    num_tokens = len(gain_N)
    measures = {
        "distillation/kl": kl_per_token(student_N, teacher_N, "k1"),
        "distillation/kl_k3": kl_per_token(student_N, teacher_N, "k3"),
        "distillation/teacher_logprob": teacher_N,
    }
    return Distillation(
        advantages_N=(config.distillation_coefficient * returns_N).float(),
        metrics=read_metrics({name: (values.mean(), num_tokens, "mean") for name, values in measures.items()})
        if num_tokens
        else {},
    )
