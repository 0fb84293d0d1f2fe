"""Checkpoints of the policy, which events it refuses, and what it says of itself."""

import json

import pytest

from offbeat_async_policy import AsyncConfig, AsyncPolicy, Drop, Finish, Submit, Sync, Update
from offbeat_core import ConfigError, RunFolderError

CONFIG = AsyncConfig(staleness_threshold=1.0, mini_batch_size=2, partial_rollout=True)


def policy_in_the_middle():
    """Version 1: groups 0 and 1 trained, 2 finished, 3 filtered, 4 lost, 5 in flight."""
    policy = AsyncPolicy(CONFIG, 20)
    assert policy.actions() == [Submit(0), Submit(1), Submit(2), Submit(3)]
    policy.group_finished(1, 0)
    assert policy.actions() == []
    policy.group_finished(0, 0)
    assert policy.actions() == [Update(group_ids=(0, 1), version=0, lags=(0, 0))]
    policy.update_finished()
    assert policy.actions() == [Sync(version=1, interrupt=True)]
    policy.group_filtered(3)
    policy.sync_finished()
    assert policy.actions() == [Submit(4), Submit(5), Submit(6)]
    policy.group_finished(2, 0)
    policy.group_lost(6)
    policy.group_lost(4)
    return policy


def test_a_restored_policy_syncs_then_issues_again_what_was_in_flight_then_continues_in_order():
    state = json.loads(json.dumps(policy_in_the_middle().state()))
    assert state["finished"] == [[2, 0]]
    assert state["waiting"] == [4, 5, 6]
    policy = AsyncPolicy.restore(CONFIG, state, 20)
    assert policy.actions() == [Sync(version=1, interrupt=False)]
    policy.sync_finished()
    assert policy.actions() == [Submit(4), Submit(5), Submit(6)]
    policy.group_finished(5, 1)
    assert policy.actions() == [Update(group_ids=(2, 5), version=1, lags=(1, 0))]
    assert policy.statistics.reissued == 3
    assert policy.statistics.submitted == 10


def policy_in_an_update(config=CONFIG, num_finished=4):
    """All that was started has finished, and an update runs."""
    policy = AsyncPolicy(config, 20)
    policy.actions()
    for group in range(num_finished):
        policy.group_finished(group, 0)
    assert isinstance(policy.actions()[0], Update)
    return policy


def test_an_update_that_runs_at_the_checkpoint_has_not_begun_in_the_state():
    state = policy_in_an_update().state()
    assert state["version"] == 0
    assert state["finished"] == [[0, 0], [1, 0], [2, 0], [3, 0]]
    assert state["statistics"]["trained"] == 0


def break_state(**changes):
    return {**policy_in_the_middle().state(), **changes}


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({}, "format 2 required, got None"),
        (break_state(format=9), "format 2 required, got 9"),
        (break_state(waiting=["x"]), "ValueError"),
        ({"format": 2}, "KeyError: 'version'"),
        (break_state(waiting=[2, 4, 5]), "listed twice"),
        (break_state(waiting=[4, 5, 9]), "never started"),
        (break_state(waiting=[4, 5]), "groups are missing"),
        (break_state(version=2), "not the number of updates"),
        (break_state(finished=[[2, 7]]), "newer than the policy"),
    ],
)
def test_a_damaged_state_is_refused(state, text):
    with pytest.raises(RunFolderError, match=text):
        AsyncPolicy.restore(CONFIG, state, 20)


def test_restoring_under_a_lag_bound_that_can_no_longer_be_kept_is_refused_or_drops():
    policy = AsyncPolicy(AsyncConfig(staleness_threshold=4.0, mini_batch_size=2), 40)
    drive(policy, until=3)
    state = policy.state()
    tight = {"staleness_threshold": 4.0, "mini_batch_size": 2, "max_version_lag": 1}
    with pytest.raises(ConfigError, match="use the value of the run before, or on_exceed='drop'"):
        AsyncPolicy.restore(AsyncConfig(**tight), state, 40)
    restored = AsyncPolicy.restore(AsyncConfig(**tight, on_exceed="drop"), state, 40)
    dropped = [action.group_id for action in restored.actions() if isinstance(action, Drop)]
    assert dropped
    assert dropped == [group for group, oldest in state["finished"] if 3 - oldest > 1]


@pytest.mark.parametrize(
    ("sync_every", "batch", "kept"), [(1, 2, []), (1, 4, []), (2, 2, [6, 7]), (3, 2, [4, 5, 6, 7])]
)
def test_groups_older_than_a_threshold_of_0_admits_are_sampled_anew(sync_every, batch, kept):
    """At version 2, groups 4 and 5 are of version 0, and 6 and 7 of version 1."""
    policy = drive(AsyncPolicy(AsyncConfig(staleness_threshold=2.0, mini_batch_size=2), 40), until=2)
    state = policy.state()
    assert state["finished"] == [[4, 0], [5, 0], [6, 1], [7, 1]]
    config = AsyncConfig(staleness_threshold=0, mini_batch_size=batch, trigger_parameter_sync_step=sync_every)
    restored = AsyncPolicy.restore(config, json.loads(json.dumps(state)), 40)
    after = restored.state()
    assert [group for group, _ in after["finished"]] == kept
    assert after["waiting"] == sorted({4, 5, 6, 7} - set(kept)), "none is lost"
    before = restored.statistics.max_lag
    drive(restored)
    assert restored.statistics.trained == 40
    assert restored.statistics.max_lag == max(before, sync_every - 1)
    assert restored.statistics.reissued == 4 - len(kept)


def test_more_groups_than_fit_one_update_are_not_all_kept_where_nothing_may_be_stale():
    """All four are of the version that trains next, but two of them would be trained after an update."""
    state = policy_in_an_update().state()
    restored = AsyncPolicy.restore(AsyncConfig(staleness_threshold=0, mini_batch_size=2), state, 20)
    assert restored.state()["finished"] == [[0, 0], [1, 0]]
    assert drive(restored).statistics.max_lag == 0


@pytest.mark.parametrize(("batch", "max_updates", "ends_at"), [(4, 10, 10), (16, 10, 10), (8, 14, 14), (8, 5, 9)])
def test_a_restored_run_ends_at_the_updates_it_is_given_now_whatever_their_size(batch, max_updates, ends_at):
    policy = drive(AsyncPolicy(AsyncConfig(mini_batch_size=8), None, max_updates=10), until=8)
    restored = AsyncPolicy.restore(AsyncConfig(mini_batch_size=batch), policy.state(), None, max_updates)
    assert drive(restored).version == ends_at


def test_a_run_that_ended_for_lack_of_signal_tries_again_when_it_is_resumed():
    config = AsyncConfig(mini_batch_size=2, max_filtered_batches=2)
    policy = AsyncPolicy(config, None, max_updates=10)
    num_filtered = filter_all(policy)
    mended = AsyncPolicy.restore(config, policy.state(), None, 10)
    assert drive(mended).version == 10
    as_before = AsyncPolicy.restore(config, policy.state(), None, 10)
    assert filter_all(as_before) == num_filtered
    assert as_before.version == 0


def filter_all(policy):
    """Let no group have a signal until the run ends for lack of it; the number of groups."""
    before = policy.statistics.filtered
    while not policy.ended_early:
        for action in policy.actions():
            if isinstance(action, Sync):
                policy.sync_finished()
            elif isinstance(action, Submit):
                policy.group_filtered(action.group_id)
    return policy.statistics.filtered - before


def drive(policy, until=10_000):
    """Let everything succeed at once, up to a version or the end."""
    while policy.version < until:
        for action in policy.actions():
            match action:
                case Submit(group_id):
                    policy.group_finished(group_id, policy.engine_version)
                case Update():
                    policy.update_finished()
                case Sync():
                    policy.sync_finished()
                case Finish():
                    return policy
    return policy


def test_ending_early_trains_what_was_started_and_finishes():
    policy = AsyncPolicy(CONFIG, 1000)
    assert len(policy.actions()) == 4
    policy.end_early("accurate enough")
    policy.group_lost(1)
    assert policy.actions() == [Submit(1)], "a group that was started is not given up"
    for group in (0, 1, 2):
        policy.group_finished(group, 0)
    assert policy.actions() == [Update((0, 1), 0, (0, 0))]
    policy.group_filtered(3)
    policy.update_finished()
    assert policy.actions() == [Sync(version=1, interrupt=False)]
    policy.sync_finished()
    assert policy.actions() == [Update((2,), 1, (1,))]
    policy.update_finished()
    assert policy.actions() == [Sync(version=2, interrupt=False)]
    policy.sync_finished()
    assert policy.actions() == [Finish()]
    assert policy.actions() == []
    assert policy.describe_wait() == "no role waits: the run is over"


def test_a_sync_on_request_waits_for_the_trainer_and_comes_before_the_next_update():
    policy = policy_in_an_update()
    policy.request_sync()
    assert policy.actions() == []
    policy.update_finished()
    assert policy.actions() == [Sync(version=1, interrupt=False)]


def test_an_engine_that_came_up_between_two_syncs_may_sample_under_the_trainers_newest_version():
    config = AsyncConfig(staleness_threshold=0.0, mini_batch_size=2, trigger_parameter_sync_step=2)
    policy = policy_in_an_update(config, num_finished=2)
    policy.update_finished()
    assert (policy.version, policy.engine_version) == (1, 0)
    policy.group_lost(2)  # its engine died; the new one got what the trainer held: version 1
    policy.actions()
    policy.group_finished(2, 1)
    assert dict(policy.state()["finished"]) == {2: 1}


def test_a_finished_group_that_is_discarded_counts_as_filtered_and_the_next_checkpoint_adds_up():
    policy = policy_in_the_middle()
    before = policy.statistics.filtered
    policy.discard([2])
    assert policy.statistics.filtered == before + 1
    restored = AsyncPolicy.restore(CONFIG, json.loads(json.dumps(policy.state())), 20)
    assert restored.state() == policy.state()
    assert restored.state()["finished"] == []


def test_news_that_cannot_be_is_refused():
    policy = AsyncPolicy(CONFIG, 20)
    policy.actions()
    with pytest.raises(ValueError, match="group 7 is not in flight"):
        policy.group_finished(7, 0)
    with pytest.raises(ValueError, match=r"group 1: oldest_version must be in \[0, 0\].*got 1"):
        policy.group_finished(1, 1)
    with pytest.raises(ValueError, match="no update was running"):
        policy.update_finished()
    with pytest.raises(ValueError, match="no sync was running"):
        policy.sync_finished()
    with pytest.raises(ValueError, match="must be at least 0"):
        AsyncPolicy(CONFIG, -1)


def test_a_wait_is_described_by_who_waits_for_whom():
    policy = AsyncPolicy(AsyncConfig(staleness_threshold=0.5, mini_batch_size=4), 20)
    assert policy.describe_wait() == "trainer waits for 4 groups: 0 finished, 0 in flight; rollouter open"
    policy.actions()
    policy.group_finished(0, 0)
    assert policy.describe_wait(lambda group: f"rollout-{group % 2}") == (
        "trainer waits for 4 groups: 1 finished, 5 in flight: 2 on rollout-0, 3 on rollout-1; "
        "rollouter at its bound of 6 groups between two syncs"
    )
    for group in (1, 2, 3):
        policy.group_finished(group, 0)
    policy.actions()
    assert policy.describe_wait(lambda _: "rollout-0").startswith(
        "trainer is in update 0 of 4 groups, 2 in flight on rollout-0; rollouter at its bound"
    )
    policy.update_finished()
    assert policy.actions() == []
    assert policy.describe_wait() == "sync 1 waits for 2 in flight; rollouter paused for sync 1"
    policy.group_finished(4, 0)
    policy.group_finished(5, 0)
    policy.actions()
    assert policy.describe_wait() == "trainer and engines are in sync 1, 0 in flight; rollouter paused for sync 1"
