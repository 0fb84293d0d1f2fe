"""The simulator: exact where it can be counted by hand, sensible where it cannot."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_async_policy import AsyncConfig
from offbeat_core import ConfigError, DataError
from offbeat_simulation import Cluster, DecodeCurve, DecodeTime, Lengths, Workload, simulate
from offbeat_simulation._workload import read_lengths

FLAT = DecodeCurve(((1, 100.0),))  # 100 tokens/s whatever runs
LINEAR = DecodeCurve(((1, 100.0), (1000, 100_000.0)))  # every sample at 100 tokens/s whatever else runs
EQUAL = Lengths(median=1000, spread=0)
SYNCHRONOUS = AsyncConfig(staleness_threshold=0, mini_batch_size=4)


def test_synchronous_training_takes_generation_plus_update_plus_sync():
    cluster = Cluster(num_engines=2, max_running=64, decode_curve=LINEAR, update_s=7, sync_s=3)
    report = simulate(SYNCHRONOUS, workload=Workload(num_groups=12, lengths=EQUAL), cluster=cluster)
    assert report.elapsed_s == pytest.approx(3 * (10 + 7 + 3))
    assert report.trainer_idle_share == pytest.approx(1 - 7 / 20)
    assert report.engine_idle_share == pytest.approx(1 - 10 / 20)
    assert report.tokens_per_s == pytest.approx(12 * 8 * 1000 / 60)
    assert report.slot_use == pytest.approx(0.5 * 16 / 64)
    assert report.seconds_per_sync == pytest.approx(20)
    assert report.lags == {0: 12}
    two_updates = AsyncConfig(staleness_threshold=0, mini_batch_size=4, trigger_parameter_sync_step=2)
    report = simulate(two_updates, workload=Workload(num_groups=16, lengths=EQUAL), cluster=cluster)
    assert report.seconds_per_sync == pytest.approx(10 + 7 + 7 + 3)
    assert report.lags == {0: 8, 1: 8}
    assert report.mean_lag == 0.5


def test_tokens_of_groups_without_signal_are_wasted():
    cluster = Cluster(num_engines=2, max_running=64, decode_curve=LINEAR, update_s=7)
    report = simulate(SYNCHRONOUS, workload=Workload(num_groups=40, lengths=EQUAL, filtered_share=0.3), cluster=cluster)
    assert 0 < report.filtered < 40
    assert report.wasted_token_share == pytest.approx(report.filtered / 40)


def test_an_engine_shares_its_throughput_and_queues_what_does_not_fit():
    cluster = Cluster(num_engines=1, max_running=16, decode_curve=FLAT, update_s=0)
    report = simulate(SYNCHRONOUS, workload=Workload(num_groups=4, lengths=EQUAL), cluster=cluster)
    assert report.elapsed_s == pytest.approx(4 * 8 * 1000 / 100)


def test_partial_rollout_hides_generation_behind_training_up_to_the_slower_of_both():
    cluster = Cluster(num_engines=2, max_running=64, decode_curve=LINEAR, update_s=10, sync_s=0)
    workload = Workload(num_groups=400, lengths=EQUAL)
    asynchronous = AsyncConfig(staleness_threshold=1.0, mini_batch_size=4, partial_rollout=True)
    baseline = simulate(SYNCHRONOUS, workload=workload, cluster=cluster)
    report = simulate(asynchronous, workload=workload, cluster=cluster)
    assert baseline.elapsed_s == pytest.approx(100 * 20)
    assert report.elapsed_s == pytest.approx(100 * 10 + 10)
    assert report.speedup_over(baseline) == pytest.approx(2, rel=0.02)


def test_drop_keeps_the_lag_bound_against_a_long_tail():
    cluster = Cluster(num_engines=2, max_running=64, decode_curve=LINEAR, update_s=2)
    workload = Workload(num_groups=200, lengths=Lengths(median=300, spread=1.2), filtered_share=0.2)
    changes = {"staleness_threshold": 3.0, "mini_batch_size": 4, "partial_rollout": True}
    free = simulate(AsyncConfig(**changes), workload=workload, cluster=cluster)
    config = AsyncConfig(**changes, max_version_lag=2, on_exceed="drop")
    bounded = simulate(config, workload=workload, cluster=cluster)
    assert free.max_lag > 2 >= bounded.max_lag
    assert bounded.dropped > 0 == free.dropped
    assert bounded.trained + bounded.filtered + bounded.dropped == 200


@settings(max_examples=40)
@given(
    sigma=st.sampled_from([0, 0.5, 2.0]),
    num_engines=st.integers(1, 3),
    max_running=st.integers(1, 20),
    update_s=st.floats(0, 20),
    seed=st.integers(0, 99),
)
def test_no_run_beats_what_its_parts_can_do(sigma, num_engines, max_running, update_s, seed):
    config = AsyncConfig(staleness_threshold=sigma, mini_batch_size=4, partial_rollout=sigma > 0)
    curve = DecodeCurve(((1, 50.0), (8, 200.0)))
    cluster = Cluster(num_engines=num_engines, max_running=max_running, decode_curve=curve, update_s=update_s)
    workload = Workload(num_groups=20, group_size=3, lengths=Lengths(median=200), seed=seed)
    report = simulate(config, workload=workload, cluster=cluster)
    assert report == simulate(config, workload=workload, cluster=cluster), "the same again with the same seed"
    assert report.trained == 20
    assert report.elapsed_s >= report.updates * update_s * 0.999
    assert report.tokens_per_s <= 200 * num_engines * 1.001
    for share in (report.trainer_idle_share, report.engine_idle_share, report.slot_use):
        assert -1e-9 <= share <= 1 + 1e-9


@st.composite
def configs(draw):
    sigma = draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]))
    cadence = draw(st.integers(1, 3))
    lag = draw(st.none() | st.integers(cadence, cadence + 3))
    return AsyncConfig(
        staleness_threshold=sigma,
        trigger_parameter_sync_step=cadence,
        require_batches=draw(st.integers(1, 2)),
        mini_batch_size=4,
        partial_rollout=sigma > 0 and draw(st.booleans()),
        max_version_lag=lag,
        on_exceed=draw(st.sampled_from(["wait", "drop"])) if lag is not None else "wait",
        max_in_flight=draw(st.sampled_from([0, 3, 9])),
    )


@settings(max_examples=150)
@given(
    config=configs(),
    num_engines=st.integers(1, 3),
    max_running=st.integers(1, 16),
    update_s=st.floats(0, 30),
    sync_s=st.sampled_from([0.0, 2.0]),
    filtered_share=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 999),
)
def test_every_group_ends_once_and_all_time_is_accounted_for(
    config, num_engines, max_running, update_s, sync_s, filtered_share, seed
):
    """What the policy itself promises under any order of events: test_async_policy_schedules.py."""
    curve = DecodeTime(0.01, 0.002)
    cluster = Cluster(
        num_engines=num_engines, max_running=max_running, decode_curve=curve, update_s=update_s, sync_s=sync_s
    )
    lengths = Lengths(median=200, spread=1.0, longest=4000)
    workload = Workload(num_groups=60, group_size=3, lengths=lengths, filtered_share=filtered_share, seed=seed)
    report = simulate(config, workload=workload, cluster=cluster)
    assert report.trained + report.filtered + report.dropped == report.submitted == 60
    assert config.max_version_lag is None or report.max_lag <= config.max_version_lag
    for shares in (report.trainer_shares, report.engine_shares):
        assert abs(sum(shares.values()) - 1) < 1e-6
    assert abs(report.trainer_shares["training"] - (1 - report.trainer_idle_share)) < 1e-6
    busy = report.engine_shares["decoding"] + report.engine_shares["tail"]
    assert abs(busy - (1 - report.engine_idle_share)) < 1e-6
    assert report.engine_shares["open"] < 1e-6, "an engine is never empty while a group might start"


def test_lengths_follow_the_distribution_they_were_given():
    import random

    numbers = random.Random(0)
    drawn = sorted(Lengths(median=500, spread=1.0, longest=4000).draw(numbers) for _ in range(4001))
    assert drawn[2000] == pytest.approx(500, rel=0.1)
    assert drawn[-1] == 4000


@pytest.mark.parametrize(("content", "text"), [("", "is empty"), ("12 x", "whole numbers"), (None, "No such file")])
def test_a_bad_file_of_lengths_is_refused(tmp_path, content, text):
    file = tmp_path / "lengths.txt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=text):
        read_lengths(file)


@pytest.mark.parametrize("text", ["", "1", "1:x", "0:5", "2:5,1:6", "1:5,2:4", "1:0", "1:inf"])
def test_a_bad_decode_curve_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="such as 1:60,16:700"):
        DecodeCurve.parse(text)


def test_a_decode_curve_is_linear_between_points_and_flat_after():
    curve = DecodeCurve.parse("2:100,4:300")
    assert [curve.tokens_per_s(n) for n in range(6)] == [0, 50, 100, 200, 300, 300]
