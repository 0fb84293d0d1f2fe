"""Settings: the bound on admissions is exact, and what is impossible or without effect is refused with advice."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_async_policy import AsyncConfig
from offbeat_core import METADATA_KEY, ConfigError


@given(hundredths=st.integers(0, 500), batch=st.integers(1, 400), steps=st.integers(1, 6))
def test_max_admitted_is_exact_for_the_decimal_as_written(hundredths, batch, steps):
    sigma = hundredths / 100
    exact = Fraction(batch * steps) * (1 + Fraction(hundredths, 100))
    extra = exact - batch * steps
    if 0 < extra < 1:
        with pytest.raises(ConfigError, match="less than one more"):
            AsyncConfig(staleness_threshold=sigma, mini_batch_size=batch, trigger_parameter_sync_step=steps)
    else:
        config = AsyncConfig(staleness_threshold=sigma, mini_batch_size=batch, trigger_parameter_sync_step=steps)
        assert config.max_admitted == exact.numerator // exact.denominator


def test_max_admitted_does_not_lose_a_group_to_binary_fractions():
    assert AsyncConfig(staleness_threshold=0.29, mini_batch_size=100).max_admitted == 129
    assert int(100 * 0.29) == 28, "what plain floats would give"


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({"staleness_threshold": 0}, "on-policy pipeline"),
        ({"staleness_threshold": 0, "trigger_parameter_sync_step": 4}, "stream off-policy"),
        ({"staleness_threshold": 0.5}, "stale"),
        ({"staleness_threshold": 0.5, "partial_rollout": True}, "partial"),
    ],
)
def test_the_four_modes_have_their_names(changes, mode):
    assert AsyncConfig(**changes).mode == mode


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"staleness_threshold": -0.1}, "async.staleness_threshold: required a number >= 0, got -0.1"),
        ({"staleness_threshold": float("nan")}, "async.staleness_threshold: required a finite number"),
        ({"staleness_threshold": float("inf")}, "async.staleness_threshold: required a finite number"),
        ({"trigger_parameter_sync_step": 0}, "async.trigger_parameter_sync_step: required a number >= 1"),
        ({"mini_batch_size": 0}, "async.mini_batch_size"),
        ({"on_exceed": "ignore"}, "required one of wait, drop, got 'ignore'"),
        ({"stall_after_s": 0.0}, "async.stall_after_s: required a number > 0"),
        ({"staleness_threshold": 0.1, "mini_batch_size": 8}, "set it to at least 0.125, or to 0"),
        ({"staleness_threshold": 0, "partial_rollout": True}, "nothing is in flight at a sync"),
        ({"on_exceed": "drop"}, "set max_version_lag"),
        ({"max_version_lag": 2, "trigger_parameter_sync_step": 4}, "set max_version_lag to at least 3"),
        ({"max_version_lag": 0}, "no group may outlive a sync; set max_version_lag to at least 1"),
    ],
)
def test_what_is_impossible_or_without_effect_is_refused_with_advice(changes, text):
    with pytest.raises(ConfigError) as refused:
        AsyncConfig(**changes)
    assert text in str(refused.value)


def test_the_advice_on_a_staleness_without_effect_is_good():
    for batch in range(1, 200):
        with pytest.raises(ConfigError) as refused:
            AsyncConfig(staleness_threshold=0.001, mini_batch_size=batch)
        advised = float(str(refused.value).split("at least ")[1].split(",")[0])
        assert AsyncConfig(staleness_threshold=advised, mini_batch_size=batch).max_admitted > batch


def test_a_lag_bound_that_always_holds_may_be_stated():
    AsyncConfig(staleness_threshold=0, trigger_parameter_sync_step=3, max_version_lag=2)


def test_every_setting_is_documented_and_times_have_a_unit():
    for name, field in AsyncConfig.__dataclass_fields__.items():
        assert field.metadata[METADATA_KEY].doc.endswith(".")
        assert field.metadata[METADATA_KEY].unit == "s" or not name.endswith("_s")
