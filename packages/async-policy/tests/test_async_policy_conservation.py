"""Laws that every simulated run keeps, watched from outside the policy while it runs."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

import offbeat_async_policy._simulation.simulate as simulation
from offbeat_async_policy import AsyncConfig, AsyncPolicy, Cluster, DecodeTime, Lengths, Workload
from offbeat_async_policy._state import Drop, Finish, Submit, Sync, Update

GROUPS = 60


class Witness(AsyncPolicy):
    """The real policy, whose every action is written down and checked."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        Witness.last = self
        self.trained, self.dropped, self.unsigned = Counter(), Counter(), Counter()
        self.versions_synced, self.admitted, self.carried = [0], 0, 0
        self.in_flight_or_finished, self.over = set(), False

    def actions(self):
        actions = super().actions()
        for action in actions:
            self.note(action)
        return actions

    def note(self, action):
        assert not self.over
        match action:
            case Submit(group_id):
                self.in_flight_or_finished.add(group_id)
                self.admitted += 1
                assert self.admitted + self.carried <= self.config.max_admitted
            case Update(group_ids, version, lags):
                self.trained.update(group_ids)
                self.in_flight_or_finished -= set(group_ids)
                assert version == self.statistics.updates
                bound = self.config.max_version_lag
                assert all(lag >= 0 and (bound is None or lag <= bound) for lag in lags)
            case Sync(version, _):
                assert version >= self.versions_synced[-1]
                assert version - self.versions_synced[-1] <= self.config.trigger_parameter_sync_step
                self.versions_synced.append(version)
            case Drop(group_id):
                self.dropped[group_id] += 1
                self.leave(group_id)
            case Finish():
                self.over = True

    def group_filtered(self, group_id):
        super().group_filtered(group_id)
        self.unsigned[group_id] += 1
        self.leave(group_id)

    def sync_finished(self):
        super().sync_finished()
        self.admitted, self.carried = 0, len(self.in_flight_or_finished)

    def leave(self, group_id):
        """Its place is free again: among those admitted since the sync, or among those carried over it."""
        self.in_flight_or_finished.discard(group_id)
        if self.admitted:
            self.admitted -= 1
        else:
            self.carried -= 1


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


@settings(max_examples=150, deadline=None)
@given(
    config=configs(),
    num_engines=st.integers(1, 3),
    max_running=st.integers(1, 16),
    update_s=st.floats(0, 30),
    sync_s=st.sampled_from([0.0, 2.0]),
    filtered_share=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 999),
)
def test_every_group_ends_once_and_no_bound_is_passed(
    config, num_engines, max_running, update_s, sync_s, filtered_share, seed
):
    cluster = Cluster(
        num_engines=num_engines,
        max_running=max_running,
        decode_curve=DecodeTime(0.01, 0.002),
        update_s=update_s,
        sync_s=sync_s,
    )
    workload = Workload(
        num_groups=GROUPS,
        group_size=3,
        lengths=Lengths(median=200, spread=1.0, longest=4000),
        filtered_share=filtered_share,
        seed=seed,
    )
    report = run_watched(config, workload, cluster)
    policy = Witness.last
    assert policy.over
    assert policy.trained + policy.unsigned + policy.dropped == Counter(range(GROUPS)), "every group ends exactly once"
    assert (report.trained, report.filtered, report.dropped) == (
        policy.trained.total(),
        policy.unsigned.total(),
        policy.dropped.total(),
    )
    assert policy.versions_synced[-1] == report.updates, "the engines end with the final weights"
    for shares in (report.trainer_shares, report.engine_shares):
        assert abs(sum(shares.values()) - 1) < 1e-6
    assert abs(report.trainer_shares["training"] - (1 - report.trainer_idle_share)) < 1e-6
    busy = report.engine_shares["decoding"] + report.engine_shares["tail"]
    assert abs(busy - (1 - report.engine_idle_share)) < 1e-6
    assert report.engine_shares["open"] < 1e-6, "an engine is never empty while a group might start"


def run_watched(config, workload, cluster):
    real, simulation.AsyncPolicy = simulation.AsyncPolicy, Witness
    try:
        return simulation.simulate(config, workload=workload, cluster=cluster)
    finally:
        simulation.AsyncPolicy = real
