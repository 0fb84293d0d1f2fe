"""The loop on a real event loop. The backend is the seam, so a small one stands in for the processes behind it."""

import asyncio
import random
from collections import Counter

import pytest

from offbeat_async_policy import AsyncConfig, AsyncPolicy, GroupResult, TrainerTurn, run_loop
from offbeat_core import DeadlineError, PeerFailedError

QUICK = {"stall_after_s": 5.0, "mini_batch_size": 4}


class Backend:
    """Engines and a trainer that sleep for a moment; keeps its samples and account like a real one."""

    def __init__(self, seed=0, checkpoint_every=0):
        self.random = random.Random(seed)
        self.checkpoint_every = checkpoint_every
        self.engine_version = 0
        self.samples, self.trained, self.filtered, self.dropped = {}, Counter(), [], []
        self.running, self.trainer_is_busy = set(), False
        self.overlapped = False
        self.cancelled = []
        self.saved = []
        self.waits = []

    async def submit(self, group_id):
        self.running.add(group_id)
        oldest = self.engine_version
        try:
            await self.generate(group_id)
        except asyncio.CancelledError:
            self.cancelled.append(group_id)
            raise
        finally:
            self.running.discard(group_id)
        filtered = group_id % 7 == 3
        if filtered:
            self.filtered.append(group_id)
        else:
            self.samples[group_id] = oldest
        return GroupResult(oldest_version=oldest, filtered=filtered)

    async def generate(self, group_id):
        await asyncio.sleep(self.random.random() * 0.004)

    async def prepare(self, action):
        assert not self.trainer_is_busy

    async def work_of_trainer(self, seconds):
        assert not self.trainer_is_busy, "update, sync and checkpoint never overlap"
        self.trainer_is_busy = True
        await asyncio.sleep(seconds)
        self.overlapped |= bool(self.running)
        self.trainer_is_busy = False

    async def update(self, group_ids, version):
        self.trained.update(group_ids)
        for group in group_ids:
            del self.samples[group]
        await self.work_of_trainer(0.002)

    async def sync(self, version, interrupt):
        await self.work_of_trainer(0.001)
        self.engine_version = version

    async def drop(self, group_id):
        self.dropped.append(group_id)
        self.samples.pop(group_id, None)

    def wants_checkpoint(self, version):
        return bool(self.checkpoint_every) and version % self.checkpoint_every == 0

    def wants_end(self):
        return ""

    async def checkpoint(self, state):
        samples = {group: self.samples[group] for group, _ in state["finished"]}
        await self.work_of_trainer(0.003)
        self.saved.append((state, samples, Counter(self.trained)))

    async def idle(self, wait, idle_s):
        self.waits.append(wait)
        return 0.0

    def where(self, group_id):
        return f"rollout-{group_id % 2}"


def run(policy, backend, **options):
    return asyncio.run(run_loop(policy, backend, **options))


def no_tasks_left():
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"staleness_threshold": 0},
        {"staleness_threshold": 0, "trigger_parameter_sync_step": 3},
        {"staleness_threshold": 0.5},
        {"staleness_threshold": 2.0, "partial_rollout": True, "max_version_lag": 1, "on_exceed": "drop"},
        {"staleness_threshold": 2.0, "partial_rollout": True, "max_version_lag": 2, "max_in_flight": 5},
    ],
    ids=lambda changes: AsyncConfig(**changes).mode,
)
def test_every_group_is_trained_once_filtered_or_dropped(changes):
    policy, backend = AsyncPolicy(AsyncConfig(**QUICK, **changes), 61), Backend()
    summary = run(policy, backend)
    assert set(backend.trained.values()) == {1}
    assert sorted([*backend.trained, *backend.filtered, *backend.dropped]) == list(range(61))
    assert backend.samples == {}
    assert backend.engine_version == policy.version == policy.statistics.updates
    assert summary.updating_s + summary.syncing_s <= summary.elapsed_s
    assert summary.overlap_s <= min(summary.updating_s, summary.generating_s)
    assert backend.overlapped == (changes["staleness_threshold"] > 0 or "trigger_parameter_sync_step" in changes)


def test_a_group_whose_engine_died_is_issued_again():
    class DyingEngine(Backend):
        async def generate(self, group_id):
            await super().generate(group_id)
            if group_id % 5 == 0 and group_id not in self.dead:
                self.dead.add(group_id)
                raise PeerFailedError("rollout-0", "killed by signal 9")

    policy, backend = AsyncPolicy(AsyncConfig(**QUICK), 40), DyingEngine()
    backend.dead = set()
    run(policy, backend)
    assert set(backend.trained.values()) == {1}
    assert len(backend.trained) + len(backend.filtered) == 40
    assert policy.statistics.reissued == 8


def test_a_group_that_is_lost_too_often_ends_the_run_by_name():
    class PoisonedGroup(Backend):
        async def generate(self, group_id):
            await super().generate(group_id)
            if group_id == 6:
                raise PeerFailedError("rollout-1", "out of memory", log_tail="Killed")

    config = AsyncConfig(**QUICK, max_group_retries=2)
    with pytest.raises(PeerFailedError) as failed:
        run(AsyncPolicy(config, 40), PoisonedGroup())
    assert failed.value.peer == "rollout-1"
    assert "group 6 was lost 3 times, async.max_group_retries=2 allows no more" in str(failed.value)
    assert failed.value.log_tail == "Killed"


@pytest.mark.parametrize("where", ["generate", "update", "sync", "checkpoint", "idle"])
def test_an_error_anywhere_comes_out_and_nothing_is_left_running(where):
    class BackendFaultError(Exception):
        pass

    async def fail(*_):
        await asyncio.sleep(0.02)
        raise BackendFaultError(where)

    async def main():
        backend = Backend(checkpoint_every=1)
        setattr(backend, where, fail)
        with pytest.raises(BackendFaultError):
            await run_loop(AsyncPolicy(AsyncConfig(**QUICK), 400), backend, idle_every_s=0.01)
        assert no_tasks_left()
        assert not backend.running

    asyncio.run(main())


def test_cancelling_the_loop_cancels_and_awaits_all_work():
    class Slow(Backend):
        async def generate(self, group_id):
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.01)  # putting things away takes a moment
                self.put_away += 1

    async def main():
        backend = Slow()
        backend.put_away = 0
        loop = asyncio.create_task(run_loop(AsyncPolicy(AsyncConfig(**QUICK), 40), backend))
        while len(backend.running) < 6:
            await asyncio.sleep(0.001)
        loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loop
        assert backend.put_away == len(backend.cancelled) == 6
        assert no_tasks_left()

    asyncio.run(main())


class StuckEngine(Backend):
    """Group 2 and all later ones never come back."""

    async def generate(self, group_id):
        if group_id >= 2:
            await asyncio.Event().wait()


def test_a_stall_is_named_after_the_time_on_the_given_clock():
    seconds = iter(range(10_000))
    backend = StuckEngine()
    config = AsyncConfig(mini_batch_size=4, stall_after_s=300.0)
    with pytest.raises(DeadlineError) as stalled:
        run(AsyncPolicy(config, 40), backend, clock=lambda: float(next(seconds)), idle_every_s=0.001)
    assert str(stalled.value) == (
        "async loop: waited 300 s for anything to move, which did not come; trainer waits for 4 groups: 2 finished, "
        "4 in flight: 2 on rollout-0, 2 on rollout-1; rollouter at its bound of 6 groups between two syncs"
    )
    assert stalled.value.exit_code == 4
    assert backend.waits[-1].startswith("trainer waits for 4 groups: 2 finished")


def test_slow_is_not_stuck_while_the_backend_reports_movement():
    class Straggler(Backend):
        async def generate(self, group_id):
            while group_id == 2 and len(self.waits) < 50:
                await asyncio.sleep(0.001)

        async def idle(self, wait, idle_s):
            await super().idle(wait, idle_s)
            return float(len(self.waits))  # tokens sampled so far

    seconds = iter(range(100_000))
    backend, policy = Straggler(), AsyncPolicy(AsyncConfig(mini_batch_size=4, stall_after_s=30.0), 8)
    run(policy, backend, clock=lambda: float(next(seconds)), idle_every_s=0.001)
    assert len(backend.waits) >= 50
    assert policy.statistics.trained == 7


@pytest.mark.nightly
def test_what_the_trainer_has_to_wait_for_first_is_not_in_its_deadlines():
    class WithValidation(Backend):
        async def prepare(self, action):
            await super().prepare(action)
            if action not in self.prepared:
                self.prepared.append(action)
                await asyncio.sleep(1.6)

    limits = {"update_deadline_s": 1.5, "sync_deadline_s": 1.5}
    backend, policy = WithValidation(checkpoint_every=1), AsyncPolicy(AsyncConfig(**QUICK, **limits), 8)
    backend.prepared = []
    run(policy, backend)
    assert set(backend.prepared) == {"update", "sync", "checkpoint"}


@pytest.mark.parametrize("action", ["update", "sync", "checkpoint"])
def test_work_between_actions_has_the_trainer_alone_and_may_be_what_an_action_waits_for(action):
    """Such as the weights of an engine that came late, and that a validation needs."""

    class WithLateEngines(Backend):
        async def bring_weights(self):
            async with turn.between_actions():
                await self.work_of_trainer(0.001)

        async def prepare(self, prepared):
            if prepared == action:
                await self.bring_weights()

        async def work_of_trainer(self, seconds):
            if not self.late:
                self.late = asyncio.create_task(self.bring_weights())
            await super().work_of_trainer(seconds)

    async def main():
        await run_loop(AsyncPolicy(AsyncConfig(**QUICK), 8), backend, turn=turn)
        await backend.late

    turn, backend = TrainerTurn(), WithLateEngines(checkpoint_every=1)
    backend.late = None
    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("where", ["update", "sync", "checkpoint"])
def test_what_the_trainer_does_may_take_longer_than_a_stall(where):
    class SlowTrainer(Backend):
        async def slowly(self, *_):
            while len(self.waits) < 50:
                await asyncio.sleep(0.001)

    seconds = iter(range(100_000))
    backend, policy = (
        SlowTrainer(checkpoint_every=1),
        AsyncPolicy(AsyncConfig(mini_batch_size=4, stall_after_s=30.0), 8),
    )
    quick = getattr(backend, where)

    async def slow(*arguments):
        await backend.slowly()
        await quick(*arguments)

    setattr(backend, where, slow)
    run(policy, backend, clock=lambda: float(next(seconds)), idle_every_s=0.001)
    assert policy.statistics.trained == 7


@pytest.mark.parametrize(
    ("deadline", "where", "text"),
    [
        ("group_deadline_s", "generate", "waited 0.02 s for an engine"),
        ("update_deadline_s", "update", "update 0: waited 0.02 s for the trainer"),
        ("sync_deadline_s", "sync", "sync 1: waited 0.02 s for the trainer and the engines"),
        ("update_deadline_s", "checkpoint", "checkpoint 1: waited 0.02 s for the trainer and the disk"),
    ],
)
def test_every_kind_of_work_has_a_deadline_with_its_name(deadline, where, text):
    async def hang(*_):
        await asyncio.Event().wait()

    backend = Backend(checkpoint_every=1)
    setattr(backend, where, hang)
    with pytest.raises(DeadlineError) as late:
        run(AsyncPolicy(AsyncConfig(**QUICK, **{deadline: 0.02}), 40), backend)
    assert text in str(late.value)
    assert "rollouter" in str(late.value), "and says which role waits for which"


def test_what_a_dropped_group_raises_when_it_is_cancelled_does_not_end_the_run():
    class Fragile(Backend):
        async def generate(self, group_id):
            try:
                await asyncio.sleep(60 if group_id == 2 else 0.002)
            except asyncio.CancelledError:
                raise RuntimeError("the engine has lost it") from None

    limits = {"staleness_threshold": 2.0, "partial_rollout": True, "max_version_lag": 1, "on_exceed": "drop"}
    policy, backend = AsyncPolicy(AsyncConfig(**QUICK, **limits), 40), Fragile()
    run(policy, backend)
    assert 2 in backend.dropped
    assert set(range(40)) == {*backend.trained, *backend.filtered, *backend.dropped}


def test_a_drop_has_a_deadline_too():
    """A group that is too old at once is dropped: the run resumes from a checkpoint under a tighter bound."""
    loose, tight = (
        {"staleness_threshold": 4.0},
        {"staleness_threshold": 4.0, "max_version_lag": 1, "on_exceed": "drop", "group_deadline_s": 0.3},
    )
    first = Backend(checkpoint_every=1)
    run(AsyncPolicy(AsyncConfig(**QUICK, **loose), 80), first)
    lags = [[state["version"] - oldest for _, oldest in state["finished"]] for state, _, _ in first.saved]
    state, samples, _ = first.saved[next(at for at, found in enumerate(lags) if max(found, default=0) > 1)]

    async def hang(_):
        await asyncio.Event().wait()

    second = Backend()
    second.samples, second.drop = dict(samples), hang
    with pytest.raises(DeadlineError, match=r"^drop of group \d+: waited 0.3 s for an engine"):
        run(AsyncPolicy.restore(AsyncConfig(**QUICK, **tight), state, 80), second)


def test_a_time_out_of_the_backends_own_is_not_reported_as_a_deadline_of_the_loop():
    async def time_out(*_):
        raise TimeoutError("the file system has given up")

    backend = Backend()
    backend.update = time_out
    with pytest.raises(TimeoutError, match="the file system has given up"):
        run(AsyncPolicy(AsyncConfig(**QUICK), 40), backend)


def test_work_that_does_not_let_itself_be_cancelled_does_not_keep_the_loop(monkeypatch):
    """The loop ends with the error that ended it, and leaves such work behind."""
    monkeypatch.setattr("offbeat_async_policy._loop.CANCEL_GRACE_S", 0.05)

    class Stubborn(Backend):
        async def submit(self, group_id):
            while not self.may_end.is_set():
                try:
                    await self.may_end.wait()
                except asyncio.CancelledError:
                    self.asked.append(group_id)
            return GroupResult(oldest_version=0)

        def wants_end(self):
            raise PeerFailedError("trainer-0", "killed by signal 9")

    async def main():
        backend = Stubborn()
        backend.may_end, backend.asked = asyncio.Event(), []
        try:
            async with asyncio.timeout(10):
                with pytest.raises(PeerFailedError, match="killed by signal 9"):
                    await run_loop(AsyncPolicy(AsyncConfig(**QUICK), 40), backend, idle_every_s=0.01)
        finally:
            backend.may_end.set()
        assert sorted(backend.asked) == list(range(6))

    asyncio.run(main())


def test_a_backend_that_cancels_its_own_work_is_an_error_and_not_a_quiet_end():
    async def cancel_self(*_):
        raise asyncio.CancelledError

    backend = Backend()
    backend.update = cancel_self
    with pytest.raises(PeerFailedError, match="its work was cancelled, but not by the loop: trainer is in update 0"):
        run(AsyncPolicy(AsyncConfig(**QUICK), 40), backend)


def test_a_group_that_is_dropped_in_flight_is_cancelled_at_once():
    class OneNeverEnds(Backend):
        async def generate(self, group_id):
            await (asyncio.Event().wait() if group_id == 1 else asyncio.sleep(0.001))

    config = AsyncConfig(**QUICK, staleness_threshold=2.0, partial_rollout=True, max_version_lag=1, on_exceed="drop")
    policy, backend = AsyncPolicy(config, 60), OneNeverEnds()
    run(policy, backend)
    assert 1 in backend.dropped
    assert 1 in backend.cancelled
    assert sorted([*backend.trained, *backend.filtered, *backend.dropped]) == list(range(60))


def test_a_summary_says_where_the_time_went_however_many_groups_were_in_flight():
    """Groups 0 and 1 begin together; group 1 is in flight until the first update has ended."""

    class Timed(Backend):
        async def generate(self, group_id):
            if group_id:
                await self.has_updated.wait()
            else:
                await asyncio.sleep(0.01)  # until both have begun
                self.now_s += 1

        async def update(self, group_ids, version):
            self.now_s += 3
            await super().update(group_ids, version)
            self.has_updated.set()

        async def sync(self, version, interrupt):
            self.now_s += 2
            await super().sync(version, interrupt)

    async def main():
        backend = Timed()
        backend.now_s, backend.has_updated = 0.0, asyncio.Event()
        config = AsyncConfig(staleness_threshold=1.0, mini_batch_size=1)
        return await run_loop(AsyncPolicy(config, 2), backend, clock=lambda: backend.now_s)

    summary = asyncio.run(main())
    assert (summary.elapsed_s, summary.updating_s, summary.syncing_s) == (11.0, 6.0, 4.0)
    assert (summary.generating_s, summary.overlap_s) == (4.0, 3.0)
    assert summary.trainer_idle_share == pytest.approx(5 / 11)
    assert summary.rollouter_idle_share == pytest.approx(7 / 11)


def test_checkpoints_are_of_the_versions_that_the_backend_wants():
    backend = Backend(checkpoint_every=3)
    run(AsyncPolicy(AsyncConfig(**QUICK, staleness_threshold=1.0), 40), backend)
    assert [state["version"] for state, _, _ in backend.saved] == [3, 6, 9]


@pytest.mark.parametrize("which", [0, 3, -1])
def test_a_run_that_goes_on_from_any_checkpoint_trains_each_group_once(which):
    config = AsyncConfig(**QUICK, staleness_threshold=1.0, partial_rollout=True)
    first = Backend(checkpoint_every=2)
    run(AsyncPolicy(config, 80), first)
    state, samples, trained = first.saved[which]
    second = Backend(seed=1)
    second.samples, second.trained = dict(samples), Counter(trained)
    policy = AsyncPolicy.restore(config, state, 80)
    run(policy, second)
    assert set(second.trained.values()) == {1}
    assert len(second.trained) == policy.statistics.trained
    assert sorted(second.trained) == [group for group in range(80) if group % 7 != 3]
    assert second.engine_version == policy.version


@pytest.mark.parametrize("when", range(12))
def test_a_loop_that_is_stopped_ends_what_the_trainer_is_at_and_goes_on_from_there(when):
    config = AsyncConfig(**QUICK, staleness_threshold=1.0, partial_rollout=True)
    policy, backend = AsyncPolicy(config, 61), Backend(seed=when)

    async def stopped():
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(when * 0.003, stop.set)
        await run_loop(policy, backend, stop=stop)
        assert no_tasks_left()

    asyncio.run(stopped())
    assert not backend.trainer_is_busy, "the trainer was cut off"
    assert not backend.running
    assert len(backend.trained) == policy.statistics.trained, "an update that ended counts"
    restored = AsyncPolicy.restore(config, policy.state(), 61)
    backend.samples = {group: backend.samples[group] for group, _ in policy.state()["finished"]}
    run(restored, backend)
    assert set(backend.trained.values()) == {1}
    assert {*backend.trained, *backend.filtered} == set(range(61))


@pytest.mark.parametrize("is_sampled_anew", [False, True])
def test_what_cannot_be_trained_after_all_is_replaced_by_others_or_sampled_anew(is_sampled_anew):
    config = AsyncConfig(**QUICK, staleness_threshold=1.0, partial_rollout=True)
    first = Backend(checkpoint_every=2)
    run(AsyncPolicy(config, 80), first)
    state, samples, trained = next(saved for saved in first.saved if saved[0]["finished"])
    policy = AsyncPolicy.restore(config, state, 80)
    flawed = int(state["finished"][0][0])
    give_up = policy.reissue if is_sampled_anew else policy.discard
    give_up([flawed])
    with pytest.raises(ValueError, match="not finished"):
        give_up([flawed])
    assert policy.state()["waiting"] == sorted([*state["waiting"], *([flawed] if is_sampled_anew else [])])
    second = Backend(seed=1)
    second.samples, second.trained = {**samples, flawed: None}, Counter(trained)
    run(policy, second)
    replaced = set() if is_sampled_anew else {flawed}
    assert sorted(second.trained) == [group for group in range(80) if group % 7 != 3 and group not in replaced]
    assert set(second.trained.values()) == {1}


def test_an_engine_that_comes_back_with_old_weights_is_synced_on_request():
    class ComesBack(Backend):
        async def update(self, group_ids, version):
            await super().update(group_ids, version)
            if version == 1:
                self.engine_version = -1
                self.policy.request_sync()

        async def submit(self, group_id):
            assert self.engine_version >= 0, "no group starts before the sync"
            return await super().submit(group_id)

    config = AsyncConfig(**QUICK, staleness_threshold=0, trigger_parameter_sync_step=4)
    policy, backend = AsyncPolicy(config, 40), ComesBack()
    backend.policy = policy

    async def generate(group_id):
        """All groups of a window come back before the second update ends, so that none spans it."""

    backend.generate = generate
    run(policy, backend)
    assert set(backend.trained.values()) == {1}
    assert backend.engine_version == policy.version


def test_a_group_that_came_back_is_never_dropped_as_if_it_had_not():
    """The end of a submit may fall on any turn of the event loop around the decision to drop the group."""

    class EndsAroundTheSync(Backend):
        async def generate(self, group_id):
            began_at = self.engine_version
            if group_id % 2:
                while self.engine_version == began_at and self.running - self.odd:
                    await asyncio.sleep(0)
                for _ in range(group_id % 11):
                    await asyncio.sleep(0)

        async def submit(self, group_id):
            self.odd |= {group_id} if group_id % 2 else set()
            result = await super().submit(group_id)
            self.came_back.add(group_id)
            return result

    class TellingPolicy(AsyncPolicy):
        def actions(self):
            self.before_actions.append(set(self.status.in_flight) & backend.came_back)
            return super().actions()

    config = AsyncConfig(**QUICK, staleness_threshold=2.0, partial_rollout=True, max_version_lag=1, on_exceed="drop")
    backend, policy = EndsAroundTheSync(), TellingPolicy(config, 80)
    backend.odd, backend.came_back, policy.before_actions = set(), set(), []
    run(policy, backend)
    assert not any(policy.before_actions), "the policy decided without knowing that a group had come back"


def test_a_backend_that_wants_the_end_gets_it_with_everything_trained_that_was_started():
    class Satisfied(Backend):
        def wants_end(self):
            return "accurate enough" if len(self.trained) >= 8 else ""

    policy, backend = AsyncPolicy(AsyncConfig(**QUICK), 1000), Satisfied()
    run(policy, backend)
    assert policy.ended_early == "accurate enough"
    assert 8 <= len(backend.trained) < 40
    assert set(backend.trained.values()) == {1}
    assert backend.samples == {}
    assert backend.engine_version == policy.version
