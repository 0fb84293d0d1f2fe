"""Merging metrics in any grouping gives what one pass over all the numbers gives."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_core import Metric, merge_metrics
from offbeat_core._contracts.metrics import Aggregation

values = st.floats(-1e6, 1e6)
weights = st.floats(0, 1e4)
pairs = st.lists(st.tuples(values, weights), min_size=1, max_size=12)
every_aggregation = pytest.mark.parametrize("how", get_args(Aggregation))


def merged(pairs, how):
    return merge_metrics([{"m": Metric(value=value, weight=weight, how=how)} for value, weight in pairs])["m"]


def reference(pairs, how):
    """Straight from the definition of each aggregation."""
    numbers = [value for value, _ in pairs]
    total = math.fsum(weight for _, weight in pairs)
    mean = math.fsum(value * weight for value, weight in pairs) / total if total else 0.0
    return {"mean": mean, "sum": math.fsum(numbers), "max": max(numbers), "min": min(numbers), "last": numbers[-1]}[how]


@every_aggregation
@given(pairs=pairs)
def test_merging_is_the_aggregation_of_all_numbers(how, pairs):
    if how == "mean" and len(pairs) == 1:
        assert merged(pairs, how).value == pairs[0][0]
        return
    assert merged(pairs, how).value == pytest.approx(reference(pairs, how), rel=1e-9, abs=1e-6)


@every_aggregation
@given(pairs=pairs, data=st.data())
def test_the_grouping_does_not_matter(how, pairs, data):
    """Micro-batches first and ranks later, or all at once: the same number."""
    cut = data.draw(st.integers(0, len(pairs)))
    parts = [part for part in (pairs[:cut], pairs[cut:]) if part]
    by_parts = merge_metrics([{"m": merged(part, how)} for part in parts])["m"]
    assert by_parts.value == pytest.approx(merged(pairs, how).value, rel=1e-9, abs=1e-6)


def test_a_mean_without_weight_is_zero_and_not_nan():
    assert merged([(3.0, 0.0), (5.0, 0.0)], "mean").value == 0.0


def test_metrics_merge_by_name_and_a_missing_one_is_left_alone():
    batches = [{"a": Metric(value=1, how="sum")}, {"a": Metric(value=2, how="sum"), "b": Metric(value=7)}]
    assert {name: metric.value for name, metric in merge_metrics(batches).items()} == {"a": 3, "b": 7}
    assert merge_metrics([]) == {}


def test_two_aggregations_of_one_name_are_refused():
    with pytest.raises(ValueError, match="cannot merge a mean with a sum"):
        Metric(value=1).merge(Metric(value=1, how="sum"))
