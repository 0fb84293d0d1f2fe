"""A group has signal exactly where its advantage is not 0, and where DAPO's paper says that it has."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_core import DataError
from offbeat_objectives import AlgorithmConfig, compute_advantages, has_signal, overlong_penalty
from offbeat_objectives._config.algorithm import GROUP_ADVANTAGES

REWARD = st.sampled_from([0.0, 0.5, 1.0])


def advantages(config, rewards, **named):
    count = len(rewards)
    found_N, _ = compute_advantages(
        config,
        torch.tensor(rewards, dtype=torch.float64),
        torch.zeros(count, dtype=torch.long),
        torch.ones(count, dtype=torch.long),
        **named,
    )
    return found_N


@pytest.mark.parametrize("name", [name for name in GROUP_ADVANTAGES if name != "gdpo"])
@settings(max_examples=60)
@given(rewards=st.lists(REWARD, min_size=1, max_size=6), k=st.integers(1, 4))
def test_a_group_has_signal_exactly_where_its_advantages_are_not_all_0(name, rewards, k):
    config = AlgorithmConfig(advantage=name, options={"k": k} if name == "pass_at_k" else {})
    learns = bool((advantages(config, rewards).abs() > 1e-5).any())
    assert has_signal(rewards, config) == learns


@settings(max_examples=60)
@given(
    parts=st.lists(st.tuples(REWARD, REWARD), min_size=1, max_size=5),
    weights=st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, -2.0, 1.0])),
)
def test_gdpo_has_signal_where_any_reward_with_a_weight_differs(parts, weights):
    named = dict(zip(("right", "short"), weights, strict=True))
    config, rewards = AlgorithmConfig(advantage="gdpo"), [named["right"] * a + named["short"] * b for a, b in parts]
    columns = {name: torch.tensor([each[i] for each in parts]).double() for i, name in enumerate(named)}
    # A prompt beside it whose sums differ: the last step of gdpo is over the batch.
    before = {name: torch.cat([values, torch.tensor([0.0, 3.0]).double()]) for name, values in columns.items()}
    count = len(parts)
    found_N, _ = compute_advantages(
        config,
        torch.zeros(count + 2),
        torch.tensor([0] * count + [1, 1]),
        torch.ones(count + 2, dtype=torch.long),
        parts_S=before,
        weights=named,
    )
    differ = {name: bool(values.max() > values.min()) for name, values in columns.items()}
    said = has_signal(rewards, config, parts=[dict(zip(named, each, strict=True)) for each in parts], weights=named)
    assert said == any(differ[name] and weight for name, weight in named.items())
    if bool((found_N[:count].abs() > 1e-5).any()):
        assert said, "a group is dropped that gdpo would learn from"


def test_wrong_answers_of_different_lengths_have_no_signal_under_the_overlong_penalty():
    """DAPO drops a prompt whose answers are all wrong; the penalty for length makes rewards differ, not answers."""
    lengths = (100, 4000, 3600, 200)
    shaped = [overlong_penalty(length, max_tokens=4096, buffer_tokens=1024) for length in lengths]
    config = AlgorithmConfig(filter_groups=True, overlong_buffer_tokens=1024)
    assert bool(advantages(config, shaped).abs().max() > 0.5), "trained, short wrong answers would be reinforced"
    assert not has_signal([0.0] * 4, config)


def test_remax_has_signal_where_a_sample_differs_from_the_greedy_one():
    config = AlgorithmConfig(advantage="remax")
    assert has_signal([1.0, 1.0], config, greedy_reward=0.0)
    assert not has_signal([1.0, 1.0], config, greedy_reward=1.0)
    with pytest.raises(DataError, match="finite"):
        has_signal([1.0, 1.0], config, greedy_reward=math.nan)


@pytest.mark.parametrize("name", [*GROUP_ADVANTAGES, "remax", "reinforce_plus_plus"])
def test_samples_that_are_left_out_of_the_loss_give_no_signal(name):
    config = AlgorithmConfig(advantage=name, mask_truncated=True, options={"k": 2} if name == "pass_at_k" else {})
    given_ = {"parts": [{"one": 1.0}, {"one": 0.0}], "weights": {"one": 1.0}, "greedy_reward": 0.0}
    assert has_signal([1.0, 0.0], config, **given_) == (name != "pass_at_k")  # k of all samples: all are 0
    assert not has_signal([1.0, 0.0], config, masked=[True, True], **given_)


def test_a_sample_that_alone_has_an_advantage_must_be_in_the_loss():
    passk = AlgorithmConfig(advantage="grpo_passk", mask_truncated=True)
    assert not has_signal([1.0, 0.0, 0.0], passk, masked=[True, False, False])
    assert has_signal([1.0, 0.0, 0.0], passk, masked=[False, True, True])
    remax = AlgorithmConfig(advantage="remax", mask_truncated=True)
    assert not has_signal([1.0, 0.0], remax, greedy_reward=0.0, masked=[True, False])
    assert has_signal([1.0, 0.0], remax, greedy_reward=0.0, masked=[False, True])


def test_an_advantage_of_ones_own_may_read_the_rewards_or_their_parts():
    config = AlgorithmConfig(advantage="mine:advantage")
    parts, weights = [{"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 0.0}], {"a": 1.0, "b": 1.0}
    assert has_signal([1.0, 1.0], config, parts=parts, weights=weights)
    assert has_signal([0.0, 1.0], config)
    assert not has_signal([1.0, 1.0], config, parts=[parts[0], parts[0]], weights=weights)
