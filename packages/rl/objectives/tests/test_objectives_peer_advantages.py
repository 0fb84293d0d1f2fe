"""gpg, GDPO, the two of pass@k and REINFORCE++ with a baseline, against loops over samples and over subsets."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_core import ConfigError, ShapeError
from offbeat_objectives import AlgorithmConfig, compute_advantages

PEERS = ("gpg", "grpo_passk", "pass_at_k", "reinforce_plus_plus_baseline")


@st.composite
def samples(draw):
    """Prompts with 1 to 5 samples each, in mixed order; rewards of 0 and 1, or any, with ties."""
    size = draw(st.integers(1, 10))
    reward = draw(st.sampled_from([st.sampled_from([0.0, 1.0]), st.floats(-2, 2).map(lambda x: round(x, 1))]))
    return {
        "rewards": draw(st.lists(reward, min_size=size, max_size=size)),
        "prompts": draw(st.lists(st.sampled_from([7, -3, 10**9]), min_size=size, max_size=size)),
        "lengths": draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)),
    }


def computed(batch, config, **named):
    advantages_N, _ = compute_advantages(
        config,
        torch.tensor(batch["rewards"], dtype=torch.float64),
        torch.tensor(batch["prompts"]),
        torch.tensor(batch["lengths"]),
        **named,
    )
    return advantages_N.tolist()


def groups_of(batch):
    return [[i for i, p in enumerate(batch["prompts"]) if p == prompt] for prompt in sorted(set(batch["prompts"]))]


def at_tokens(per_sample, batch):
    return [value for value, length in zip(per_sample, batch["lengths"], strict=True) for _ in range(length)]


def best_of_subsets(rewards, k):
    """By counting: every k-subset, its best reward."""
    k = min(k, len(rewards))
    subsets = list(itertools.combinations(range(len(rewards)), k))
    best = {subset: max(rewards[i] for i in subset) for subset in subsets}
    mean, deviation = statistics.fmean(best.values()), statistics.pstdev(best.values())
    with_i = [statistics.fmean(value for subset, value in best.items() if i in subset) for i in range(len(rewards))]
    return [(value - mean) / (deviation + 1e-6) for value in with_i]


def reference(name, batch, k):
    rewards, result = batch["rewards"], [0.0] * len(batch["rewards"])
    groups = groups_of(batch)
    has_signal = sum(len(group) for group in groups if max(r := [rewards[i] for i in group]) - min(r) > 1e-6)
    for group in groups:
        own = [rewards[i] for i in group]
        mean, deviation = statistics.fmean(own), statistics.stdev(own) if len(own) > 1 else 0.0
        if name == "pass_at_k":
            values = best_of_subsets(own, k)
        elif name == "grpo_passk":
            first, second = sorted(own, reverse=True)[:2] if len(own) > 1 else (0.0, 0.0)
            values = [
                (first - second) / (deviation + 1e-6) if place == own.index(max(own)) else 0.0
                for place in range(len(own))
            ]
        elif name == "gpg":
            values = [(reward - mean) * len(rewards) / max(has_signal, 1) for reward in own]
        else:
            values = [reward - mean for reward in own]
        for i, value in zip(group, values, strict=True):
            result[i] = value
    per_token = at_tokens(result, batch)
    if name == "reinforce_plus_plus_baseline" and per_token:
        mean, deviation = statistics.fmean(per_token), statistics.pstdev(per_token)
        per_token = [(value - mean) / (deviation + 1e-6) for value in per_token]
    return per_token


@pytest.mark.parametrize("name", PEERS)
@settings(max_examples=80)
@given(batch=samples(), k=st.integers(1, 4))
def test_an_advantage_of_the_peers_is_its_formula(name, batch, k):
    config = AlgorithmConfig(advantage=name, options={"k": k} if name == "pass_at_k" else {})
    assert computed(batch, config) == pytest.approx(reference(name, batch, k), rel=1e-4, abs=1e-5)


@settings(max_examples=60)
@given(rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=4, max_size=9), k=st.integers(1, 4))
def test_pass_at_k_of_right_and_wrong_is_the_papers_analytical_form(rewards, k):
    n, wrong = len(rewards), rewards.count(0.0)
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    deviation = math.sqrt(mean * (1 - mean)) + 1e-6
    of_wrong = 1 - mean - (math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1) if wrong else 0.0)
    expected = [(1 - mean) / deviation if reward else of_wrong / deviation for reward in rewards]
    batch = {"rewards": rewards, "prompts": [0] * n, "lengths": [1] * n}
    found = computed(batch, AlgorithmConfig(advantage="pass_at_k", options={"k": k}))
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert sum(found) == pytest.approx(0.0, abs=1e-4)


def test_samples_that_are_left_out_of_the_loss_are_in_no_mean_over_the_batch():
    """With `mask_truncated` a loss divides by what is trained: so must what makes up for a division by more."""
    batch = {"rewards": [1.0, 0.0, 1.0, 0.0, 0.0, 0.0], "prompts": [1] * 4 + [2] * 2, "lengths": [2] * 6}
    trained = [True, True, True, False, False, False]
    in_loss_N = torch.tensor(at_tokens(trained, batch))
    found = computed(batch, AlgorithmConfig(advantage="gpg"), in_loss_N=in_loss_N)
    assert found == pytest.approx(at_tokens([0.5, -0.5, 0.5, -0.5, 0.0, 0.0], batch))
    parts = {"parts_S": {"a": torch.tensor(batch["rewards"])}, "weights": {"a": 1.0}}
    found = computed(batch, AlgorithmConfig(advantage="gdpo"), in_loss_N=in_loss_N, **parts)
    kept = [value for value, is_trained in zip(found[::2], trained, strict=True) if is_trained]
    assert statistics.fmean(kept) == pytest.approx(0.0, abs=1e-5)
    assert statistics.stdev(kept) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("name", ["gpg", "gdpo"])
@settings(max_examples=30)
@given(batch=samples())
def test_where_all_is_in_the_loss_nothing_changes_by_saying_so(name, batch):
    parts = {"parts_S": {"a": torch.tensor(batch["rewards"])}, "weights": {"a": 1.0}} if name == "gdpo" else {}
    config, in_loss_N = AlgorithmConfig(advantage=name), torch.ones(sum(batch["lengths"]), dtype=torch.bool)
    assert computed(batch, config, in_loss_N=in_loss_N, **parts) == computed(batch, config, **parts)


def test_grpo_passk_without_the_deviation_is_what_the_best_sample_adds():
    batch = {"rewards": [0.2, 0.9, 0.5, 0.1], "prompts": [1] * 4, "lengths": [1] * 4}
    config = AlgorithmConfig(advantage="grpo_passk", options={"divide_by_std": False})
    assert computed(batch, config) == pytest.approx([0.0, 0.4, 0.0, 0.0])


@settings(max_examples=60)
@given(batch=samples(), data=st.data())
def test_gdpo_normalises_each_reward_in_its_group_and_their_sum_over_the_batch(batch, data):
    size = len(batch["rewards"])
    other = data.draw(st.lists(st.floats(-9, 9).map(lambda x: round(x, 2)), min_size=size, max_size=size))
    parts, weights = {"right": batch["rewards"], "short": other}, {"right": 1.0, "short": 0.5}
    sums = [0.0] * size
    for group in groups_of(batch):
        for name, values in parts.items():
            own = [values[i] for i in group]
            mean, deviation = statistics.fmean(own), statistics.stdev(own) if len(own) > 1 else 0.0
            for i in group:
                sums[i] += weights[name] * (values[i] - mean) / (deviation + 1e-6)
    mean, deviation = statistics.fmean(sums), statistics.stdev(sums) if size > 1 else 0.0
    expected = at_tokens([(value - mean) / (deviation + 1e-6) for value in sums], batch)
    named = {name: torch.tensor(values, dtype=torch.float64) for name, values in parts.items()}
    config = AlgorithmConfig(advantage="gdpo")
    assert computed(batch, config, parts_S=named, weights=weights) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_gdpo_hears_a_narrow_reward_beside_a_wide_one():
    """What it is for: GRPO of the sum gives all but the same advantage to what differs in the narrow reward."""
    parts = {"wide": torch.tensor([100.0, 0.0, 100.0, 0.0]), "narrow": torch.tensor([1.0, 1.0, 0.0, 0.0])}
    weights, shape = {"wide": 1.0, "narrow": 1.0}, (torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.long))
    rewards_S = parts["wide"] + parts["narrow"]
    of_sum, _ = compute_advantages(AlgorithmConfig(), rewards_S, *shape)
    alone, _ = compute_advantages(AlgorithmConfig(advantage="gdpo"), rewards_S, *shape, parts_S=parts, weights=weights)
    assert (of_sum[0] - of_sum[2]).item() < 0.02
    assert (alone[0] - alone[2]).item() == pytest.approx((alone[0] - alone[1]).item(), rel=1e-4)


def test_equal_rewards_give_the_peers_advantages_of_0_too():
    batch = {"rewards": [0.1] * 7, "prompts": [0] * 7, "lengths": list(range(1, 8))}
    for name in PEERS:
        assert max(map(abs, computed(batch, AlgorithmConfig(advantage=name)))) < 1e-8


def test_gdpo_without_its_rewards_is_refused_by_name():
    batch = {"rewards": [0.1, 0.2], "prompts": [0, 0], "lengths": [1, 1]}
    with pytest.raises(ConfigError, match="needs parts_S and weights for gdpo"):
        computed(batch, AlgorithmConfig(advantage="gdpo"))
    with pytest.raises(ShapeError, match="right"):
        computed(batch, AlgorithmConfig(advantage="gdpo"), parts_S={"right": torch.zeros(3)}, weights={"right": 1.0})
