"""pass@k and maj@k are what enumerating every subset gives, and intervals cover as often as they say."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_core import ConfigError
from offbeat_run import pass_at_k
from offbeat_run._validation.estimates import bootstrap_interval, majority_at_k


def enumerated_pass(right, k):
    subsets = list(combinations(right, k))
    return float(Fraction(sum(any(subset) for subset in subsets), len(subsets)))


def enumerated_majority(votes, right, k):
    """Compute it by the definition, subset by subset: the answer with most votes, ties by lot, scores its mean."""
    score = {
        vote: np.mean([value for other, value in zip(votes, right, strict=True) if other == vote]) for vote in votes
    }
    values = []
    for subset in combinations(votes, k):
        cast = [vote for vote in subset if vote is not None]
        most = max((cast.count(vote) for vote in cast), default=0)
        winners = {vote for vote in cast if cast.count(vote) == most}
        values.append(np.mean([score[vote] for vote in winners]) if winners else 0.0)
    return float(np.mean(values))


@given(st.lists(st.booleans(), min_size=1, max_size=10), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(right, data):
    k = data.draw(st.integers(1, len(right)))
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(enumerated_pass(right, k), abs=1e-12)


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.booleans()), min_size=1, max_size=9), st.data()
)
def test_majority_at_k_is_the_mean_over_subsets_with_ties_by_lot(samples, data):
    votes, right = [vote for vote, _ in samples], [float(value) for _, value in samples]
    k = data.draw(st.integers(1, len(votes)))
    assert majority_at_k(votes, right, k) == pytest.approx(enumerated_majority(votes, right, k), abs=1e-12)


def test_with_one_sample_all_three_are_the_share_that_is_right():
    votes, right = ["7", "7", "8", "9"], [1.0, 1.0, 0.0, 0.0]
    assert pass_at_k(4, 2, 1) == majority_at_k(votes, right, 1) == 0.5


def test_many_samples_are_as_exact_and_quick():
    votes = [str(number % 7) for number in range(256)]
    right = [float(vote == "3") for vote in votes]
    assert majority_at_k(votes, right, 256) == pytest.approx(1 / 4, abs=1e-12)  # 0 to 3 are given 37 times, others 36
    assert 1 / 7 < majority_at_k(votes, right, 64) < 1 / 4
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01, abs=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_a_k_beyond_the_samples_is_refused(k):
    with pytest.raises(ConfigError, match="from 1 to the 4 samples"):
        pass_at_k(4, 1, k)
    with pytest.raises(ConfigError, match="from 1 to the 4 samples"):
        majority_at_k(["a"] * 4, [1.0] * 4, k)


def test_an_interval_covers_the_true_mean_about_as_often_as_it_says():
    draws = np.random.default_rng(3)
    truth, covered = 0.3, 0
    for number in range(200):
        low, high = bootstrap_interval(draws.beta(0.6, 1.4, size=60).tolist(), seed=number)
        covered += low <= truth <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_an_interval_is_the_same_each_time_and_of_equal_values_empty():
    values = [0.0, 1.0, 0.5, 1.0]
    assert bootstrap_interval(values) == bootstrap_interval(values)
    assert bootstrap_interval([1.0] * 9) == (1.0, 1.0)


def test_an_interval_is_as_wide_as_that_of_the_mean_of_many_items_and_drawn_with_the_seed():
    """An interval over many items is 1.96 standard errors on each side, by the central limit theorem."""
    values = np.random.default_rng(5).normal(size=400)
    low, high = bootstrap_interval(values.tolist())
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 400**0.5, rel=0.07)
    assert bootstrap_interval(values.tolist(), seed=1) != (low, high)
