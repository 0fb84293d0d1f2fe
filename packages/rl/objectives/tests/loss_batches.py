"""Random packed batches, and what tests of losses ask of them."""

import torch
from hypothesis import strategies as st

from offbeat_core import LossTokens
from offbeat_objectives import AlgorithmConfig
from offbeat_objectives._config.algorithm import LOSS_KINDS

BY_MICRO_BATCH = ("clip_cov", "kl_cov")
"""Losses whose statistics are of one micro-batch."""
LOSSES = tuple(LOSS_KINDS)
BY_TOKEN_OR_SEQUENCE = tuple(loss for loss in LOSSES if loss not in BY_MICRO_BATCH)
AGGREGATIONS = ("token_mean", "sequence_mean", "fixed_length")
FIXED_LENGTH = 7


@st.composite
def batches(draw, *, token_advantages=False, max_length=5):
    """A packed float64 batch; some tokens far off-policy, some rejected, some without weight."""
    lengths = draw(st.lists(st.integers(1, max_length), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([1e-4, 0.05, 1.0]))
    num_tokens = sum(lengths)
    sequence_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def noise(scale, size=num_tokens):
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    logprobs_N = -3 * torch.rand(num_tokens, generator=generator, dtype=torch.float64) - 0.01
    advantages_N = noise(1.0) if token_advantages else noise(1.0, len(lengths))[sequence_N]
    return LossTokens(
        logprobs_N=logprobs_N.requires_grad_(),
        entropy_N=noise(1.0).abs().requires_grad_(),
        sequence_N=sequence_N,
        num_sequences=len(lengths),
        extras={
            "advantages": advantages_N,
            "old_logprobs": (logprobs_N.detach() + noise(spread)).clamp(max=-1e-3),
            "rollout_logprobs": (logprobs_N.detach() + noise(spread)).clamp(max=-1e-3),
            "ref_logprobs": logprobs_N.detach() + noise(0.3),
            "correction_weights": noise(1.0).abs(),
            "keep": (torch.rand(num_tokens, generator=generator) > draw(st.sampled_from([0.0, 0.3]))).double(),
        },
        total_tokens=num_tokens + draw(st.integers(0, 5)),
        total_sequences=len(lengths) + draw(st.integers(0, 2)),
    )


def sequences_of(tokens):
    """The places of each sequence's tokens."""
    return [[n for n, s in enumerate(tokens.sequence_N.tolist()) if s == i] for i in range(tokens.num_sequences)]


def reference_divisors(tokens, config):
    """By what each token's loss is divided."""
    divisors = {}
    for members in sequences_of(tokens):
        for n in members:
            divisors[n] = {
                "token_mean": tokens.total_tokens,
                "sequence_mean": tokens.total_sequences * len(members),
                "fixed_length": tokens.total_sequences * FIXED_LENGTH,
            }[config.aggregation]
    return divisors


def gradients(loss, tokens):
    """Of a loss, in the log-probabilities and in the entropy."""
    inputs = (tokens.logprobs_N, tokens.entropy_N)
    return torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)


def config_of(loss, aggregation="token_mean", **changes):
    """A configuration with that loss, and options that are no defaults."""
    taus = {"options": {"tau_positive": 1.3, "tau_negative": 2.1}} if loss == "sapo" else {}
    length = FIXED_LENGTH if aggregation == "fixed_length" else None
    return AlgorithmConfig(loss=loss, aggregation=aggregation, fixed_length=length, **(taus | changes))
