"""Advantages against loops over samples and tokens in float64."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_core import ConfigError, DataError, ShapeError
from offbeat_objectives import AlgorithmConfig, compute_advantages, gae_advantages


def advantages(*arguments, **named):
    return compute_advantages(*arguments, **named)[0]


@st.composite
def samples(draw, min_length=0):
    """Prompts with 1 to 4 samples each, in mixed order, under arbitrary prompt numbers."""
    size = draw(st.integers(1, 8))
    return {
        "rewards": draw(st.lists(st.floats(-2, 2).map(lambda x: round(x, 3)), min_size=size, max_size=size)),
        "prompts": draw(st.lists(st.sampled_from([7, -3, 10**9]), min_size=size, max_size=size)),
        "lengths": draw(st.lists(st.integers(min_length, 5), min_size=size, max_size=size)),
        "seed": draw(st.integers(0, 2**31)),
    }


def tensors(batch):
    return (
        torch.tensor(batch["rewards"], dtype=torch.float64),
        torch.tensor(batch["prompts"]),
        torch.tensor(batch["lengths"]),
    )


def token_noise(batch):
    generator = torch.Generator().manual_seed(batch["seed"])
    return torch.rand(sum(batch["lengths"]), generator=generator, dtype=torch.float64)


def reference_group(name, batch, rewards):
    result = []
    for i, reward in enumerate(rewards):
        group = [k for k, prompt in enumerate(batch["prompts"]) if prompt == batch["prompts"][i]]
        mates, lengths = [rewards[k] for k in group], [batch["lengths"][k] for k in group]
        mean = sum(mates) / len(mates)
        if name == "grpo":
            deviation = statistics.stdev(mates) if len(mates) > 1 else 0.0
            result.append((reward - mean) / (deviation + 1e-6))
        elif name == "dr_grpo":
            result.append(reward - mean)
        elif name == "rloo":
            others = [rewards[k] for k in group if k != i]
            result.append(reward - sum(others) / len(others) if others else 0.0)
        else:
            weighted = sum(length * mate for length, mate in zip(lengths, mates, strict=True))
            result.append(reward - (weighted / sum(lengths) if sum(lengths) else 0.0))
    return result


def spread(per_sample, batch):
    return [value for value, length in zip(per_sample, batch["lengths"], strict=True) for _ in range(length)]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo"])
@settings(max_examples=60)
@given(batch=samples())
def test_a_group_advantage_is_its_formula(name, batch):
    advantages_N = advantages(AlgorithmConfig(advantage=name), *tensors(batch))
    assert advantages_N.dtype == torch.float32
    expected = spread(reference_group(name, batch, batch["rewards"]), batch)
    assert advantages_N.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@settings(max_examples=30)
@given(batch=samples())
def test_a_kl_penalty_in_the_reward_is_taken_off_before_the_baseline(batch):
    kl_N = token_noise(batch)
    config = AlgorithmConfig(advantage="rloo", kl_coefficient=0.5, kl_in="reward")
    penalties = [part.sum().item() for part in kl_N.split(batch["lengths"])]
    shaped = [reward - 0.5 * penalty for reward, penalty in zip(batch["rewards"], penalties, strict=True)]
    expected = spread(reference_group("rloo", batch, shaped), batch)
    assert advantages(config, *tensors(batch), kl_N=kl_N).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@settings(max_examples=60)
@given(batch=samples(), gamma=st.sampled_from([1.0, 0.9]), beta=st.sampled_from([0.0, 0.3]))
def test_reinforce_plus_plus_normalises_discounted_returns_over_the_batch(batch, gamma, beta):
    kl_N = token_noise(batch)
    config = AlgorithmConfig(
        advantage="reinforce_plus_plus", gamma=gamma, kl_coefficient=beta, kl_in="reward" if beta else "loss"
    )
    returns, start = [], 0
    for reward, length in zip(batch["rewards"], batch["lengths"], strict=True):
        for t in range(length):
            total = gamma ** (length - 1 - t) * reward
            total -= sum(beta * gamma ** (k - t) * kl_N[start + k].item() for k in range(t, length))
            returns.append(total)
        start += length
    expected = []
    if returns:
        mean, deviation = statistics.fmean(returns), statistics.pstdev(returns)
        expected = [(value - mean) / (deviation + 1e-6) for value in returns]
    got = advantages(config, *tensors(batch), kl_N=kl_N).tolist()
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-4)


@settings(max_examples=60)
@given(batch=samples(), gamma=st.sampled_from([1.0, 0.97]), lam=st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_is_the_sum_of_discounted_residuals(batch, gamma, lam):
    values_N = token_noise(batch)
    rewards_N = torch.zeros(sum(batch["lengths"]), dtype=torch.float64)
    expected, start = [], 0
    for reward, length in zip(batch["rewards"], batch["lengths"], strict=True):
        values = [*values_N[start : start + length].tolist(), 0.0]
        rewards = [0.0] * (length - 1) + [reward] if length else []
        residuals = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(length)]
        expected += [sum((gamma * lam) ** k * residuals[t + k] for k in range(length - t)) for t in range(length)]
        if length:
            rewards_N[start + length - 1] = reward
        start += length
    plain = AlgorithmConfig(advantage="gae", gamma=gamma, gae_lambda=lam, options={"normalise": False})
    assert advantages(plain, *tensors(batch), values_N=values_N).tolist() == pytest.approx(expected, abs=1e-5)
    normalised = advantages(replace(plain, options={}), *tensors(batch), values_N=values_N).tolist()
    if expected:
        mean, deviation = statistics.fmean(expected), statistics.pstdev(expected)
        wanted = [(value - mean) / (deviation + 1e-6) for value in expected]
        assert normalised == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    sequence_N = torch.repeat_interleave(torch.arange(len(batch["lengths"])), torch.tensor(batch["lengths"]))
    direct_N = gae_advantages(rewards_N, values_N, sequence_N, len(batch["lengths"]), gamma, lam)
    assert direct_N.tolist() == pytest.approx(expected, abs=1e-12)


def test_remax_subtracts_the_greedy_reward():
    got = advantages(
        AlgorithmConfig(advantage="remax"),
        torch.tensor([1.0, 0.25]),
        torch.tensor([0, 1]),
        torch.tensor([2, 1]),
        greedy_rewards_S=torch.tensor([0.5, 1.0]),
    )
    assert got.tolist() == [0.5, 0.5, -0.75]


def test_equal_rewards_give_no_advantage_however_they_round():
    rewards_S = torch.full((7,), 0.1)
    for name in ("grpo", "dr_grpo", "rloo", "opo"):
        got = advantages(
            AlgorithmConfig(advantage=name), rewards_S, torch.zeros(7, dtype=torch.long), torch.arange(1, 8)
        )
        assert got.abs().max() < 1e-9


@settings(max_examples=12)
@given(batch=samples(min_length=1), data=st.data())
def test_the_order_of_samples_does_not_matter(batch, data):
    order = data.draw(st.permutations(range(len(batch["rewards"]))))
    shuffled = {key: [batch[key][i] for i in order] for key in ("rewards", "prompts", "lengths")}
    for name in ("grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus"):
        config = AlgorithmConfig(advantage=name)
        straight = advantages(config, *tensors(batch)).split(batch["lengths"])
        mixed = advantages(config, *tensors(shuffled)).split(shuffled["lengths"])
        for place, i in enumerate(order):
            torch.testing.assert_close(mixed[place], straight[i], rtol=1e-4, atol=1e-5)


def test_inputs_that_do_not_fit_are_named():
    ones_S, lengths_S = torch.ones(2), torch.tensor([1, 1])
    with pytest.raises(ShapeError, match="prompts_S"):
        advantages(AlgorithmConfig(), ones_S, torch.zeros(3), lengths_S)
    with pytest.raises(ShapeError, match="kl_N"):
        advantages(AlgorithmConfig(), ones_S, lengths_S, lengths_S, kl_N=torch.ones(3))
    with pytest.raises(DataError, match=r"samples \[1\]"):
        advantages(AlgorithmConfig(), torch.tensor([0.0, math.nan]), lengths_S, lengths_S)
    with pytest.raises(ConfigError, match="greedy_rewards_S"):
        advantages(AlgorithmConfig(advantage="remax"), ones_S, lengths_S, lengths_S)
    with pytest.raises(ConfigError, match="values_N"):
        advantages(AlgorithmConfig(advantage="gae"), ones_S, lengths_S, lengths_S)
    with pytest.raises(ConfigError, match="kl_N"):
        advantages(AlgorithmConfig(kl_coefficient=1.0, kl_in="reward"), ones_S, lengths_S, lengths_S)
