"""The promises of the policy, under thousands of random schedules: any order of events, losses, restores."""

import json
import math
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from statistics import fmean

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from offbeat_async_policy import AsyncConfig, AsyncPolicy, Drop, Finish, Submit, Sync, Update
from offbeat_core import ConfigError


@st.composite
def configs(draw):
    choices = {
        "staleness_threshold": draw(st.sampled_from([0, 0.1, 0.25, 0.5, 1.0, 1.7, 4.0])),
        "trigger_parameter_sync_step": draw(st.integers(1, 4)),
        "require_batches": draw(st.integers(1, 2)),
        "mini_batch_size": draw(st.integers(1, 5)),
        "partial_rollout": draw(st.booleans()),
        "max_version_lag": draw(st.none() | st.integers(0, 7)),
        "on_exceed": draw(st.sampled_from(["wait", "drop"])),
        "max_in_flight": draw(st.sampled_from([0, 0, 1, 3, 12])),
        "max_filtered_batches": draw(st.sampled_from([1, 2, 20])),
    }
    while True:  # repair what is refused, one setting at a time, so that every draw is of use
        try:
            return AsyncConfig(**choices)
        except ConfigError as error:
            if "on_exceed" in str(error):
                choices["on_exceed"] = "wait"
            if "max_version_lag" in str(error) and choices["max_version_lag"] is not None:
                choices["max_version_lag"] += 1
            if "partial_rollout" in str(error):
                choices["partial_rollout"] = False
            elif "less than one more" in str(error):
                choices["staleness_threshold"] *= 2


class World:
    """Everything outside the policy, in no particular order, and an account of its own of what was promised."""

    def __init__(self, config, num_groups, seed, max_updates=None, filtered_share=0.15):
        self.config, self.random, self.filtered_share = config, random.Random(seed), filtered_share
        self.data_groups, self.max_updates = num_groups, max_updates
        self.policy = AsyncPolicy(config, num_groups, max_updates)
        self.trainer_version = self.engine_version = 0
        self.in_flight, self.finished = {}, {}  # group -> engine version at submission; -> oldest version
        self.update = self.sync = None
        self.ended = {}  # group -> trained | filtered | dropped
        self.lags = Counter()
        self.started = set()
        self.admitted, self.carried = set(), set()  # that hold a place between the last two syncs
        self.updates_since_sync = self.submits = 0
        self.mishaps_left = 12  # losses, restores, requested syncs: bounded, or progress would prove nothing
        self.must_sync = False
        self.ended_early_by_us = False
        self.filtered_in_a_row = 0

    @property
    def data_ended(self):
        limit = self.config.max_filtered_batches * self.config.groups_per_update
        return self.ended_early_by_us or self.filtered_in_a_row >= limit

    @property
    def num_groups(self):
        """Groups to be started, as far as is known by now."""
        if self.data_ended:
            return len(self.started)
        wanted = math.inf
        if self.max_updates is not None:  # an update was short where the data had ended, and a restore has data again
            in_update = len(self.update.group_ids) if self.update else 0
            updates_left = self.max_updates - self.trainer_version - bool(self.update)
            wanted = len(self.ended) + in_update + updates_left * self.config.groups_per_update
        return min(math.inf if self.data_groups is None else self.data_groups, wanted)

    def run(self):
        steps = 0
        while True:
            steps += 1
            assert steps < 100_000
            over = False
            for action in self.policy.actions():
                assert not over, "an action after Finish"
                over = getattr(self, "on_" + type(action).__name__.lower())(action) or False
            self.check_status()
            if over:
                assert self.policy.actions() == []
                return self
            self.something_happens()

    # what the policy asks for

    def on_submit(self, action: Submit):
        group = action.group_id
        assert group not in self.in_flight
        assert group not in self.finished
        assert group not in self.ended
        assert self.sync is None
        assert not self.must_sync, "started a group under weights that are to be replaced first"
        lost = self.started - set(self.in_flight) - set(self.finished) - set(self.ended)
        assert group == min(lost, default=len(self.started)), "lost groups first, then new ones, each in data order"
        if group not in self.started:
            assert group < self.num_groups
        self.started.add(group)
        self.submits += 1
        self.in_flight[group] = self.engine_version
        self.admitted.add(group)
        bound = math.floor(self.config.groups_per_sync * (1 + Fraction(str(self.config.staleness_threshold))))
        assert len(self.admitted) <= bound - len(self.carried), "the admission bound"
        if self.config.max_in_flight:
            assert len(self.in_flight) <= self.config.max_in_flight

    def on_update(self, action: Update):
        assert self.update is None
        assert self.sync is None
        assert action.version == self.trainer_version
        assert self.updates_since_sync < self.config.trigger_parameter_sync_step, "at most K updates between syncs"
        assert set(action.group_ids) <= set(self.finished), "nothing unfinished, nothing twice"
        assert len(set(action.group_ids)) == len(action.group_ids)
        assert action.lags == tuple(action.version - self.finished[group] for group in action.group_ids)
        if self.config.max_version_lag is not None:
            assert max(action.lags) <= self.config.max_version_lag, "the lag bound"
        if self.config.staleness_threshold == 0:
            assert max(action.lags) < self.config.trigger_parameter_sync_step, "older than the last regular sync"
        taken_ages = [(self.finished[group], group) for group in action.group_ids]
        left_ages = [(age, group) for group, age in self.finished.items() if group not in action.group_ids]
        assert taken_ages == sorted(taken_ages)
        assert not left_ages or taken_ages[-1] < min(left_ages), "oldest first"
        if len(action.group_ids) < self.config.groups_per_update:
            assert len(self.ended) + len(action.group_ids) == self.num_groups, "only the last is short"
        self.update = action

    def on_sync(self, action: Sync):
        assert self.sync is None
        assert self.update is None
        assert action.version == self.trainer_version
        assert action.interrupt == bool(self.in_flight)
        assert self.config.partial_rollout or not self.in_flight, "what is in flight finishes first"
        is_last = len(self.ended) == self.num_groups and self.updates_since_sync > 0
        is_regular = self.updates_since_sync == self.config.trigger_parameter_sync_step
        assert is_regular or is_last or self.must_sync, "the cadence of syncs"
        self.sync = action
        self.must_sync = False

    def on_drop(self, action: Drop):
        assert self.config.on_exceed == "drop"
        group = action.group_id
        oldest = {**self.in_flight, **self.finished}[group]
        next_version = self.trainer_version + (self.update is not None)
        assert next_version - oldest > self.config.max_version_lag, "dropped before it was too old"
        self.in_flight.pop(group, None)
        self.finished.pop(group, None)
        self.end(group, "dropped")

    def on_finish(self, _: Finish):
        assert set(self.ended) == set(range(self.num_groups)), "every group ends"
        assert self.engine_version == self.trainer_version, "the engines hold the final weights"
        running = (self.in_flight, self.finished, self.update, self.sync)
        assert not any(running)
        return True

    # what happens to it

    def something_happens(self):
        events = [self.finish_group] * min(4, len(self.in_flight))
        events += [self.finish_update] * 2 if self.update else []
        events += [self.finish_sync] * 2 if self.sync else []
        assert events, f"a state without a way on: {self.policy.describe_wait()}"
        if self.mishaps_left and self.random.random() < 0.1:
            mishaps = [self.kill_and_restore, self.ask_for_sync, self.lose_engine, self.end_early]
            events = [self.random.choice(mishaps)]
            self.mishaps_left -= 1
        self.random.choice(events)()

    def finish_group(self):
        group = self.random.choice(list(self.in_flight))
        submitted_at = self.in_flight.pop(group)
        if self.random.random() < self.filtered_share:
            self.policy.group_filtered(group)
            self.end(group, "filtered")
            self.filtered_in_a_row += 1
        elif self.random.random() < 0.05 and self.mishaps_left:
            self.mishaps_left -= 1
            self.policy.group_lost(group)
            self.give_place_back(group)
        else:
            oldest = self.random.randint(submitted_at, self.engine_version)
            self.policy.group_finished(group, oldest)
            self.finished[group] = oldest
            self.filtered_in_a_row = 0

    def finish_update(self):
        self.policy.update_finished()
        for group, lag in zip(self.update.group_ids, self.update.lags, strict=True):
            del self.finished[group]
            assert group not in self.ended, "trained twice"
            self.ended[group] = "trained"
            self.lags[lag] += 1
        self.trainer_version += 1
        self.updates_since_sync += 1
        self.update = None

    def finish_sync(self):
        self.policy.sync_finished()
        self.engine_version = self.sync.version
        self.carried = set(self.in_flight) | set(self.finished)
        self.admitted = set()
        self.updates_since_sync = 0
        self.sync = None

    def ask_for_sync(self):
        self.policy.request_sync()
        self.must_sync = True

    def lose_engine(self):
        for group in list(self.in_flight):
            if self.random.random() < 0.5:
                del self.in_flight[group]
                self.policy.group_lost(group)
                self.give_place_back(group)

    def end_early(self):
        if self.random.random() < 0.2:
            self.policy.end_early("accurate enough")
            self.ended_early_by_us = True

    def kill_and_restore(self):
        state = json.loads(json.dumps(self.policy.state()))
        assert {group for group, _ in state["finished"]} == set(self.finished)
        self.ended_early_by_us = False  # a resumed run tries again, whatever ended it early
        if self.data_ended:
            state["filtered_in_a_row"] = self.filtered_in_a_row = 0
        as_before = self.random.random() < 0.8
        if not as_before:
            self.config = replace(self.config, staleness_threshold=0, partial_rollout=False)
        self.policy = AsyncPolicy.restore(self.config, state, self.data_groups, self.max_updates)
        assert self.policy.state() == state or not as_before
        self.finished = dict(self.policy.state()["finished"])
        self.in_flight.clear()
        self.update = self.sync = None
        self.engine_version = self.trainer_version
        self.carried, self.admitted = set(self.finished), set()
        self.must_sync = True

    # accounts

    def end(self, group, how):
        assert group not in self.ended
        self.ended[group] = how
        self.give_place_back(group)

    def give_place_back(self, group):
        self.admitted.discard(group)
        self.carried.discard(group)

    def check_status(self):
        status = self.policy.status
        assert set(status.in_flight) == set(self.in_flight)
        assert status.num_training == len(self.update.group_ids if self.update else ())
        assert status.num_finished == len(self.finished) - status.num_training
        assert status.version == self.trainer_version
        assert self.policy.describe_wait()


@settings(max_examples=2000)
@example(
    config=AsyncConfig(staleness_threshold=1.0, mini_batch_size=2, max_filtered_batches=2),
    num_groups=None,
    max_updates=3,
    filtered_share=0.6,
    seed=881,
)
@given(
    config=configs(),
    num_groups=st.none() | st.integers(0, 60),
    max_updates=st.none() | st.integers(0, 12),
    filtered_share=st.sampled_from([0.15, 0.15, 0.6, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_every_promise_holds_under_any_order_of_events(config, num_groups, max_updates, filtered_share, seed):
    assume(num_groups is not None or max_updates is not None)
    world = World(config, num_groups, seed, max_updates, filtered_share).run()
    statistics = world.policy.statistics
    how = Counter(world.ended.values())
    assert (statistics.trained, statistics.filtered, statistics.dropped) == (
        how["trained"],
        how["filtered"],
        how["dropped"],
    )
    assert statistics.lags == world.lags
    assert statistics.mean_lag == pytest.approx(fmean(list(world.lags.elements()) or [0]))
    assert statistics.max_lag == max(world.lags.elements(), default=0)
    assert statistics.updates == world.trainer_version
    assert statistics.submitted == world.submits
    assert statistics.submitted - statistics.reissued == len(world.ended)


@pytest.mark.parametrize("filtered_share", [0.0, 0.5])
def test_max_updates_counts_whole_updates_however_many_groups_are_filtered(filtered_share):
    config = AsyncConfig(mini_batch_size=4)
    world = World(config, None, 0, max_updates=7, filtered_share=filtered_share)
    world.mishaps_left = 0
    statistics = world.run().policy.statistics
    assert (statistics.updates, statistics.trained) == (7, 28)
    assert bool(statistics.filtered) == bool(filtered_share)


def test_a_run_in_which_nothing_has_a_signal_ends_and_says_so():
    world = World(AsyncConfig(mini_batch_size=4, max_filtered_batches=3), None, 0, max_updates=7, filtered_share=1.0)
    assert "no learning signal" in world.run().policy.ended_early


@settings(max_examples=200)
@given(num_groups=st.integers(1, 40), batch=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_synchronous_training_has_no_lag_and_never_generates_while_it_updates(num_groups, batch, seed):
    class SynchronousWorld(World):
        def on_submit(self, action):
            assert self.update is None
            super().on_submit(action)

    config = AsyncConfig(staleness_threshold=0, mini_batch_size=batch)
    world = SynchronousWorld(config, num_groups, seed)
    world.mishaps_left = 0
    assert set(world.run().lags) <= {0}


@pytest.mark.parametrize("on_exceed", ["wait", "drop"])
def test_a_straggler_is_waited_for_or_dropped_when_it_reaches_the_lag_bound(on_exceed):
    config = AsyncConfig(
        staleness_threshold=3.0, mini_batch_size=2, partial_rollout=True, max_version_lag=2, on_exceed=on_exceed
    )
    policy, running, dropped, trained_lags = AsyncPolicy(config, 40), set(), [], []
    for _ in range(200):
        for action in policy.actions():
            match action:
                case Submit(group_id):
                    running.add(group_id)
                case Update(_, _, lags):
                    trained_lags.extend(lags)
                    policy.update_finished()
                case Sync():
                    policy.sync_finished()
                case Drop(group_id):
                    running.discard(group_id)
                    dropped.append(group_id)
        quick = sorted(running - {0})  # group 0 never finishes by itself
        if not quick:
            break
        running.remove(quick[0])
        policy.group_finished(quick[0], policy.engine_version)
    assert max(trained_lags) <= 2
    if on_exceed == "drop":
        assert dropped[0] == 0
    else:
        assert running == {0}
        assert policy.version == 2, "version 2 is the last that may train group 0"
        assert "makes it wait" in policy.describe_wait()
        policy.group_finished(0, 0)
        assert 0 in next(action for action in policy.actions() if isinstance(action, Update)).group_ids
