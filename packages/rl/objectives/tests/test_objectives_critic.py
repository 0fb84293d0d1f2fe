"""The critic's returns and its loss, against loops over tokens in float64."""

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_core import LossTokens, ShapeError
from offbeat_objectives import AlgorithmConfig, ValueLoss, compute_advantages, compute_returns


@st.composite
def value_tokens(draw):
    """Values before and after a step, and what they should be: [N] float64, of sequences that lie packed."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    old_N, moved_N, returns_N = torch.randn(3, sum(lengths), generator=generator, dtype=torch.float64)
    return LossTokens(
        logprobs_N=(old_N + draw(st.sampled_from([0.05, 1.0])) * moved_N).requires_grad_(),
        entropy_N=torch.zeros_like(old_N),
        sequence_N=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_sequences=len(lengths),
        extras={"values": old_N, "returns": returns_N},
        total_tokens=sum(lengths) + draw(st.integers(0, 5)),
        total_sequences=len(lengths),
    )


def reference_loss(tokens: LossTokens, clip: float | None) -> tuple[float, float]:
    """The loss, and the share of tokens whose loss is that of the value held back."""
    total, num_clipped = 0.0, 0
    for value, old, wanted in zip(
        tokens.logprobs_N.tolist(), tokens.extras["values"].tolist(), tokens.extras["returns"].tolist(), strict=True
    ):
        error = (value - wanted) ** 2
        if clip is not None:
            held = min(max(value, old - clip), old + clip)
            num_clipped += (held - wanted) ** 2 > error
            error = max(error, (held - wanted) ** 2)
        total += 0.5 * error / tokens.total_tokens
    return total, num_clipped / len(tokens.logprobs_N)


@settings(max_examples=60)
@given(tokens=value_tokens(), clip=st.sampled_from([None, 0.2, 0.7]))
def test_the_loss_is_half_the_larger_squared_error(tokens, clip):
    loss, metrics = ValueLoss(clip)(tokens)
    expected, share_clipped = reference_loss(tokens, clip)
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    assert {name: metric.value for name, metric in metrics.items()} == pytest.approx(
        {
            "critic/loss": expected,
            "critic/value": tokens.logprobs_N.mean().item(),
            "critic/return": tokens.extras["returns"].mean().item(),
            "critic/clip_fraction": share_clipped,
        }
    )
    # What the clip holds back has no gradient; all else that of ½ (V - return)² / tokens.
    (gradient_N,) = torch.autograd.grad(loss, tokens.logprobs_N)
    plain_N = (tokens.logprobs_N.detach() - tokens.extras["returns"]) / tokens.total_tokens
    assert bool(((gradient_N - plain_N).abs().lt(1e-12) | gradient_N.eq(0)).all())


def test_what_moves_less_than_the_clip_is_not_counted_as_clipped():
    old_N, new_N, return_N = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    tokens = LossTokens(
        logprobs_N=new_N,  # float32: old + (new - old) is not always new
        entropy_N=torch.zeros(1000),
        sequence_N=torch.zeros(1000, dtype=torch.long),
        num_sequences=1,
        extras={"values": old_N, "returns": return_N},
        total_tokens=1000,
        total_sequences=1,
    )
    assert ValueLoss(9.0)(tokens)[1]["critic/clip_fraction"].value == 0


@settings(max_examples=20)
@given(tokens=value_tokens())
def test_the_shares_of_micro_batches_add_up(tokens):
    whole = ValueLoss(0.2)(tokens)[0]
    cut = 1 + len(tokens.logprobs_N) // 2

    def part(where: slice) -> LossTokens:
        extras = {name: values_N[where] for name, values_N in tokens.extras.items()}
        named = {name: getattr(tokens, name)[where] for name in ("logprobs_N", "entropy_N", "sequence_N")}
        return replace(tokens, extras=extras, **named)

    shares = [ValueLoss(0.2)(part(where))[0] for where in (slice(None, cut), slice(cut, None))]
    assert sum(shares).item() == pytest.approx(whole.item(), rel=1e-9)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    gamma=st.sampled_from([1.0, 0.97]),
    lam=st.sampled_from([0.0, 0.9, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_a_return_is_the_value_and_what_the_rewards_say_of_it(lengths, gamma, lam, seed):
    generator = torch.Generator().manual_seed(seed)
    values_N = torch.rand(sum(lengths), generator=generator, dtype=torch.float64)
    rewards_S = torch.rand(len(lengths), generator=generator, dtype=torch.float64)
    config = AlgorithmConfig(advantage="gae", gamma=gamma)
    found_N = compute_returns(config, rewards_S, torch.tensor(lengths), values_N, lam=lam)
    expected, start = [], 0
    for reward, length in zip(rewards_S.tolist(), lengths, strict=True):
        after = 0.0  # the λ-return after the last token
        returns = []
        for t in reversed(range(length)):
            value_next = values_N[start + t + 1].item() if t + 1 < length else 0.0
            now = reward if t == length - 1 else 0.0
            after = now + gamma * ((1 - lam) * value_next + lam * after)
            returns.append(after)
        expected += returns[::-1]
        start += length
    assert found_N.tolist() == pytest.approx(expected, abs=1e-6)


@settings(max_examples=60)
@given(
    branches=st.lists(st.lists(st.integers(1, 4), min_size=0, max_size=3), min_size=1, max_size=4),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([0.0, 0.8, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_each_trajectory_of_a_sample_is_scanned_by_itself_and_ends_with_the_reward(branches, gamma, lam, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = [length for sample in branches for length in sample]
    values_N, kl_N, after_N = torch.rand(3, sum(lengths), generator=generator, dtype=torch.float64)
    rewards_S = torch.rand(len(branches), generator=generator, dtype=torch.float64)
    config = AlgorithmConfig(
        advantage="gae", gamma=gamma, gae_lambda=lam, kl_coefficient=0.5, kl_in="reward", options={"normalise": False}
    )
    numbers = 10 * torch.arange(len(lengths))  # any numbers in order will do
    named = {
        "kl_N": kl_N,
        "bootstrap_N": after_N,
        "trajectory_N": torch.repeat_interleave(numbers, torch.tensor(lengths, dtype=torch.long)),
    }
    lengths_S = torch.tensor([sum(sample) for sample in branches])
    prompts_S = torch.zeros(len(branches), dtype=torch.long)
    advantages_N, _ = compute_advantages(config, rewards_S, prompts_S, lengths_S, values_N=values_N, **named)
    returns_N = compute_returns(config, rewards_S, lengths_S, values_N, lam=lam, **named)
    expected, start = [], 0
    for reward, sample in zip(rewards_S.tolist(), branches, strict=True):
        for length in sample:
            found, running = [], 0.0
            for t in reversed(range(start, start + length)):
                is_last = t == start + length - 1
                after = after_N[t].item() if is_last else values_N[t + 1].item()
                delta = (reward if is_last else 0.0) - 0.5 * kl_N[t].item() + gamma * after - values_N[t].item()
                running = delta + gamma * lam * running
                found.append(running)
            expected += found[::-1]
            start += length
    assert advantages_N.tolist() == pytest.approx(expected, abs=1e-5)
    wanted = [advantage + value for advantage, value in zip(expected, values_N.tolist(), strict=True)]
    assert returns_N.tolist() == pytest.approx(wanted, abs=1e-5)


def test_a_trajectory_within_two_samples_is_refused():
    rewards_S, lengths_S = torch.tensor([1.0, 0.0]), torch.tensor([2, 1])
    for wrong in ([0, 0, 0], [1, 0, 2]):
        with pytest.raises(ShapeError, match="each trajectory within one sample"):
            compute_advantages(
                AlgorithmConfig(), rewards_S, torch.zeros(2).long(), lengths_S, trajectory_N=torch.tensor(wrong)
            )


def test_a_penalty_in_the_reward_is_part_of_the_returns():
    config = AlgorithmConfig(advantage="gae", kl_coefficient=0.5, kl_in="reward")
    kl_N = torch.tensor([1.0, 2.0])
    got_N = compute_returns(config, torch.tensor([1.0]), torch.tensor([2]), torch.zeros(2), lam=1.0, kl_N=kl_N)
    assert got_N.tolist() == pytest.approx([1 - 0.5 * 3, 1 - 0.5 * 2])


def test_the_loss_can_be_pickled_and_names_what_is_missing():
    loss = pickle.loads(pickle.dumps(ValueLoss(0.3)))
    assert loss == ValueLoss(0.3)
    no_N = torch.zeros(0)
    tokens = LossTokens(
        logprobs_N=no_N,
        entropy_N=no_N,
        sequence_N=no_N.long(),
        num_sequences=0,
        extras={"values": no_N, "returns": no_N},
        total_tokens=3,
        total_sequences=1,
    )
    assert loss(tokens)[0].item() == 0.0
    with pytest.raises(ShapeError, match=r"\['returns'\] missing"):
        loss(replace(tokens, extras={"values": no_N}))
