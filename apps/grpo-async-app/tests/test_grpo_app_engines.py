"""Engines that fail at an awkward moment: in process, with handles that behave as the test says."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest

from grpo_async_app._config.resolved import resolve
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.colocation import ColocationSchedule
from grpo_async_app._fleet.engines import Engine, Engines
from grpo_async_app._fleet.events import LoggedEvents
from grpo_async_app._fleet.fleet import Fleet
from grpo_async_app._fleet.weights import WeightOffer, bring_weights, transfer_weights
from grpo_async_app._roles import rollout as rollout_role
from offbeat_actors import ActorHandle, KeepAlive, RestartBudget
from offbeat_actors._spec import Wait
from offbeat_core import (
    ConfigError,
    DeadlineError,
    EngineHealth,
    GenerateRequest,
    OffbeatError,
    PeerFailedError,
    PlacementError,
    RoleName,
    RolloutCapabilities,
    RolloutEngineConfig,
    SamplingParams,
    WeightPart,
    WeightSyncError,
    load_config,
)

REQUEST = GenerateRequest(request_id="1", prompt_ids=(1,), params=SamplingParams(max_tokens=1))


class Handle:
    """As much of an `ActorHandle` as engines are looked after with."""

    address = "127.0.0.1"

    def __init__(self, name: str, fails_in: str = "", error: OffbeatError | None = None) -> None:
        self.name, self.role, self._fails_in = name, RoleName.parse(name), fails_in
        self._error = error or PeerFailedError(name, "CUDA out of memory")
        self.calls: list[str] = []
        self._gone = asyncio.Event()

    @property
    def alive(self) -> bool:
        return not self._gone.is_set()

    def kill(self) -> None:
        self._gone.set()

    async def wait_dead(self) -> str:
        await self._gone.wait()
        return "it was killed"

    async def stop(self) -> None:
        self.kill()
        if self._fails_in == "stop":
            raise OffbeatError("its close() failed")

    async def call(self, method: str, *_: Any, **__: Any) -> Any:
        self.calls.append(method)
        if method == self._fails_in:
            raise self._error
        if method == "health":
            return EngineHealth(version=0, num_running=1, num_waiting=0, num_tokens=7, busy_s=0.0, uptime_s=1.0)
        return 0 if method in ("sleep", "wake") else None


class KeptMessages(LoggedEvents):
    """Keeps the messages."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def message(self, text: str) -> None:
        """Keep it."""
        self.notes.append(text)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(within())


def settings(config: Path, *changes: str) -> GrpoConfig:
    words = ["--rollout.num_engines=2", "--cluster.silent_after_s=2", "--cluster.sleep_level=2"]
    return load_config(config, GrpoConfig, [*words, *changes])


def open_engines(config: GrpoConfig, start: Any, notes: list[str], turns: ColocationSchedule | None = None) -> Engines:
    budget = RestartBudget(config.cluster.max_restarts, config.cluster.restart_window_s)
    keep = KeepAlive(budget=budget, silent_after_s=config.cluster.silent_after_s, notify=notes.append)
    engines = Engines(config, start, keep, turns)
    engines._all_started = True
    return engines


def add(engines: Engines, handle: Any) -> Engine:
    """Add an engine as one of the first, which get their weights by the first sync."""
    all_started, engines._all_started = engines._all_started, False
    engine = engines.add(handle)
    engines._all_started = all_started
    return engine


async def until(is_so: Callable[[], Any]) -> None:
    while not is_so():
        await asyncio.sleep(0.01)


def test_an_engine_that_ends_while_it_fetches_weights_keeps_no_trainer_waiting() -> None:
    async def scenario() -> None:
        withdrawn = asyncio.Event()

        async def take() -> None:
            raise PeerFailedError("rollout-0", "killed")

        async def withdraw() -> None:
            withdrawn.set()

        send = asyncio.ensure_future(withdrawn.wait())
        (error,) = await transfer_weights([take()], send, withdraw)
        assert isinstance(error, PeerFailedError)
        assert send.done()
        assert not send.cancelled(), "the trainer itself has ended it"

    run(scenario)


def test_a_trainer_that_fails_before_engines_have_come_is_heard() -> None:
    async def scenario() -> None:
        async def take() -> None:
            await asyncio.sleep(3600)

        async def send() -> None:
            raise WeightSyncError("the trainer has no such tensor")

        async def withdraw() -> None:
            pass

        with pytest.raises(WeightSyncError, match="no such tensor"):
            await transfer_weights([take(), take()], send(), withdraw)

    run(scenario)


class Offer(WeightOffer):
    """A `WeightOffer` without a trainer; notes how many each transfer was for, and those of parts by name too."""

    def __init__(self, parts: Sequence[WeightPart] = ("merged",), have_base: WeakSet[Any] | None = None) -> None:
        trainer: Any = SimpleNamespace(have_base=WeakSet() if have_base is None else have_base)
        super().__init__(trainer, 1, 30.0, LoggedEvents(), parts)
        self.sent: list[int] = []
        self.parts_sent: list[tuple[str, int]] = []

    async def sources_for(self, actors: Collection[ActorHandle]) -> list[list[str]]:
        return [["@here"] for _ in actors]

    async def push(self, sources: Sequence[list[str]], part: WeightPart) -> None:
        self.sent.append(len(sources))
        self.parts_sent.append((part, len(sources)))

    async def withdraw(self) -> None:
        pass


async def bring(*handles: Handle, offer: Offer, given_up: list[str]) -> list[str]:
    engines = [Engine(handle) for handle in handles]  # type: ignore[arg-type]
    for engine in engines:
        engine.serves.set()

    def give_up(engine: Engine, actor: Any, why: str) -> None:
        engine.give_up(actor)
        given_up.append(f"{engine.name}: {why}")

    return [engine.name for engine in await bring_weights(engines, offer, True, 30.0, None, give_up)]  # type: ignore[arg-type]


@pytest.mark.parametrize("step", ["pause", "pull_weights", "resume"])
def test_an_engine_that_is_lost_in_a_sync_is_given_up_and_the_others_get_the_weights(step: str) -> None:
    async def scenario() -> None:
        good, bad = Handle("rollout-0"), Handle("rollout-1", step)
        offer, given_up = Offer(), list[str]()
        assert await bring(good, bad, offer=offer, given_up=given_up) == ["rollout-0"]
        assert given_up == ["rollout-1: rollout-1 failed: CUDA out of memory"]
        assert offer.sent == {"pause": [1], "pull_weights": [2, 1], "resume": [2]}[step]
        assert good.calls.count("pull_weights") == len(offer.sent)
        assert good.calls[-1] == "resume"

    run(scenario)


@pytest.mark.parametrize("step", ["pause", "resume"])
def test_an_engine_that_lives_and_fails_a_step_ends_the_sync_also_where_another_is_lost(step: str) -> None:
    """It would take weights while it samples, or never sample again."""

    async def scenario() -> None:
        lost, living = (
            Handle("rollout-0", step),
            Handle("rollout-1", step, DeadlineError("pause", "the engine", 30.0, "")),
        )
        with pytest.raises(DeadlineError):
            await bring(lost, living, offer=Offer(), given_up=[])

    run(scenario)


def test_the_base_is_brought_once_to_each_process_and_the_adapter_with_every_sync() -> None:
    async def scenario() -> None:
        have_base: WeakSet[Any] = WeakSet()

        async def sync(*handles: Handle) -> list[tuple[str, int]]:
            offer = Offer(("base", "adapter"), have_base)
            await bring(*handles, offer=offer, given_up=[])
            return offer.parts_sent

        first, second, third = (Handle(f"rollout-{number}") for number in range(3))
        assert await sync(first, second) == [("base", 2), ("adapter", 2)]
        assert await sync(first, second) == [("adapter", 2)]
        assert await sync(first, second, third) == [("base", 1), ("adapter", 3)]
        again = Handle("rollout-1")  # another process of the same engine
        assert await sync(first, again) == [("base", 1), ("adapter", 2)]

    run(scenario)


def test_an_engine_that_is_lost_with_the_base_does_not_keep_the_others_from_it() -> None:
    async def scenario() -> None:
        good, bad = Handle("rollout-0"), Handle("rollout-1", "pull_weights")
        offer, given_up = Offer(("base", "adapter")), list[str]()
        assert await bring(good, bad, offer=offer, given_up=given_up) == ["rollout-0"]
        assert offer.parts_sent == [("base", 2), ("base", 1), ("adapter", 1)]
        assert len(given_up) == 1

    run(scenario)


def test_a_sync_ends_with_the_error_of_the_engine_that_failed_and_not_of_one_that_heard_of_it() -> None:
    async def scenario() -> None:
        echoed = WeightSyncError("trainer-0 gave up: rollout-1 gave up: it holds other bytes", is_peers=True)
        first = Handle("rollout-0", "pull_weights", echoed)
        second = Handle("rollout-1", "pull_weights", WeightSyncError("it holds other bytes"))
        given_up: list[str] = []
        with pytest.raises(WeightSyncError, match=r"^it holds other bytes"):
            await bring(first, second, offer=Offer(), given_up=given_up)
        assert not given_up

    run(scenario)


def test_a_trainer_that_fails_before_any_engine_does_ends_the_sync_with_its_own_error() -> None:
    async def scenario() -> None:
        async def send() -> None:
            raise WeightSyncError("the gradients were not finite")

        async def withdraw() -> None:
            raise AssertionError("it sends no more")

        with pytest.raises(WeightSyncError, match="gradients"):
            await transfer_weights([asyncio.sleep(30), asyncio.sleep(30)], send(), withdraw)

    run(scenario)


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_a_trainer_process_is_free_again_when_an_engine_has_not_come(config: Path, model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async def take() -> None:
            raise PeerFailedError("rollout-0", "killed before it connected")

        fleet = Fleet(resolve(settings(config)), str(model), tmp_path)
        async with fleet:
            fleet._trainer = await fleet._start_trainers(1, None)
            for version in (1, 1, 2):
                offer = fleet.offer_weights(version)
                sources = await offer.sources_for([SimpleNamespace(name="rollout-0", address="127.0.0.1")])  # type: ignore[list-item]
                (error,) = await transfer_weights([take()], offer.push(sources, "merged"), offer.withdraw)
                assert "before it connected" in str(error)
            await fleet.trainer.call("listen", "127.0.0.1", returns=str, deadline_s=60)  # in the same thread

    asyncio.run(asyncio.wait_for(scenario(), 200))


@pytest.mark.parametrize("step", ["wake", "resume"])
def test_a_colocated_engine_that_fails_in_its_turn_is_ended_and_does_not_serve(config: Path, step: str) -> None:
    async def scenario() -> None:
        good, bad = Engine(Handle("rollout-0")), Engine(Handle("rollout-1", step))
        turns = ColocationSchedule(settings(config), lambda: Handle("trainer-0"), LoggedEvents())  # type: ignore[arg-type, return-value]
        for engine in (good, bad):
            await turns._put_to_sleep(engine.actor)
        await turns.to_generation([good, bad])
        assert [engine.serves.is_set() for engine in (good, bad)] == [True, False]
        assert [engine.actor.alive for engine in (good, bad)] == [True, False]

    run(scenario)


def test_a_colocated_engine_that_fails_to_sleep_is_ended_before_the_trainer_wakes(config: Path) -> None:
    async def scenario() -> None:
        bad, trainer = Engine(Handle("rollout-0", "sleep")), Handle("trainer-0")
        turns = ColocationSchedule(settings(config), lambda: trainer, LoggedEvents())  # type: ignore[arg-type, return-value]
        turns._is_training = False
        await turns.to_training([bad])
        assert not bad.actor.alive
        assert trainer.calls == ["wake"]

    run(scenario)


def test_a_colocated_engine_whose_sync_was_cut_short_sleeps_again(config: Path) -> None:
    async def scenario() -> None:
        engine = Engine(Handle("rollout-0"))  # type: ignore[arg-type]
        turns = ColocationSchedule(settings(config), lambda: Handle("trainer-0"), LoggedEvents())  # type: ignore[arg-type, return-value]
        await turns._put_to_sleep(engine.actor)
        await turns.make_room(engine.actor)  # and the trainer is lost before it has sent its weights
        await turns.trainer_is_gone([engine])
        assert engine.actor.calls == ["sleep", "wake", "wake", "sleep"]  # type: ignore[attr-defined]

    run(scenario)


def test_a_colocated_engine_that_comes_up_while_the_trainer_trains_waits_for_the_next_sync(config: Path) -> None:
    async def scenario() -> None:
        trainer, late, offer = Handle("trainer-0"), Handle("rollout-0"), Offer()
        turns = ColocationSchedule(settings(config), lambda: trainer, LoggedEvents())  # type: ignore[arg-type, return-value]
        engines = open_engines(settings(config), None, [], turns)
        add(engines, late)  # type: ignore[arg-type]
        await engines.sync_late("rollout-0", offer)
        assert (offer.sent, trainer.calls) == ([], []), "the trainer keeps its memory"
        await engines.sync(offer, interrupt=False)
        assert offer.sent == [1]
        add(engines, Handle("rollout-1"))  # type: ignore[arg-type]
        await engines.sync_late("rollout-1", offer)
        assert (offer.sent, engines.versions) == ([1, 1], {"rollout-0": 1, "rollout-1": 1}), "in the engines' turn"
        await engines.close()

    run(scenario)


def test_who_waits_for_an_engine_that_cannot_start_again_hears_why(config: Path) -> None:
    async def scenario() -> None:
        async def start(role: RoleName) -> Any:
            raise PeerFailedError(str(role), "no memory left")

        engines = open_engines(settings(config, "--cluster.max_restarts=2"), start, [])
        first = Handle("rollout-0")
        add(engines, first)  # type: ignore[arg-type]
        asks = asyncio.create_task(engines.generate("rollout-0", REQUEST, 7200.0))
        first.kill()
        with pytest.raises(PeerFailedError, match=r"no memory left.*started again 2 times"):
            await asks
        for _ in range(2):  # the first may be taken for the trainer's fault
            with pytest.raises(PeerFailedError, match="no memory left"):
                engines.raise_if_failed()
        await engines.close()

    run(scenario)


def test_an_engine_that_leaves_while_it_is_started_again_is_stopped(config: Path) -> None:
    async def scenario() -> None:
        may_start, started = asyncio.Event(), list[Handle]()

        async def start(role: RoleName) -> Any:
            await may_start.wait()
            started.append(Handle(str(role)))
            return started[-1]

        engines = open_engines(settings(config), start, [])
        first, second = Handle("rollout-0"), Handle("rollout-1")
        for each in (first, second):
            add(engines, each)  # type: ignore[arg-type]
        second.kill()
        await until(lambda: engines.num_restarts)
        engines.scale(1)
        await asyncio.sleep(0)
        may_start.set()
        await until(lambda: "rollout-1" not in engines.members)
        assert not started[0].alive
        assert engines.names == ["rollout-0"]
        engines.raise_if_failed()
        await engines.close()

    run(scenario)


def test_an_engine_that_does_not_close_well_when_it_leaves_ends_no_run(config: Path) -> None:
    async def scenario() -> None:
        notes: list[str] = []
        engines = open_engines(settings(config), None, notes)
        for each in (Handle("rollout-0"), Handle("rollout-1", "stop")):
            add(engines, each)  # type: ignore[arg-type]
        engines.scale(1)
        await until(lambda: len(notes) == 2)
        assert sorted(notes) == [
            "rollout-1 did not close well: its close() failed",
            "rollout-1 has left: 1 rollout engine",
        ]
        engines.raise_if_failed()
        await engines.close()

    run(scenario)


class SlowHandle(Handle):
    """Takes its time to stop and to take weights, and refuses what it is called with once it is being stopped."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.may_end = asyncio.Event()
        self._is_closed = False

    async def stop(self) -> None:
        self._is_closed = True
        await self.may_end.wait()
        self.kill()

    async def call(self, method: str, *args: Any, **words: Any) -> Any:
        if method == "pull_weights":
            self.calls.append("begins")
            await asyncio.sleep(0.05)
        if self._is_closed:
            raise OffbeatError("the rollout engine is closed; make a new one")
        return await super().call(method, *args, **words)


@pytest.mark.parametrize("when", ["before", "within"])
def test_an_engine_that_leaves_around_a_sync_does_not_end_the_run(config: Path, when: str) -> None:
    async def scenario() -> None:
        engines = open_engines(settings(config), None, [])
        stays, leaves = Handle("rollout-0"), SlowHandle("rollout-1")
        for each in (stays, leaves):
            add(engines, each)  # type: ignore[arg-type]
        if when == "before":
            engines.scale(1)
            await until(lambda: leaves._is_closed)
        sync = asyncio.create_task(engines.sync(Offer(), interrupt=True))
        if when == "within":
            await until(lambda: "begins" in leaves.calls)
            engines.scale(1)
        await sync
        assert stays.calls.count("pull_weights") == 1
        assert leaves.calls.count("pull_weights") == (when == "within")
        await engines.abort("1")
        leaves.may_end.set()
        await until(lambda: "rollout-1" not in engines.members)
        engines.raise_if_failed()
        await engines.close()

    run(scenario)


def test_a_new_process_of_an_engine_holds_no_weights_until_it_alone_has_got_them(config: Path) -> None:
    async def scenario() -> None:
        async def start(role: RoleName) -> Any:
            return Handle(str(role))

        engines = open_engines(settings(config), start, [])
        for name in ("rollout-0", "rollout-1"):
            add(engines, Handle(name))  # type: ignore[arg-type]
        await engines.sync(Offer(), interrupt=True)
        assert engines.versions == {"rollout-0": 1, "rollout-1": 1}
        again = engines.members["rollout-1"]
        again.actor.kill()
        assert await anext(engines.late_engines()) == "rollout-1"
        assert engines.versions == {"rollout-0": 1}
        assert not again.serves.is_set()
        late, serving = Offer(), Offer()
        await engines.sync_late("rollout-1", late)
        assert engines.versions == {"rollout-0": 1, "rollout-1": 1}
        await engines.sync_late("rollout-1", serving)
        await engines.sync_late("rollout-7", serving)  # it has left
        assert (late.sent, serving.sent) == ([1], []), "a sync has brought it weights meanwhile"
        await engines.close()

    run(scenario)


def test_tokens_that_engines_sample_show_that_the_run_moves(config: Path) -> None:
    async def scenario() -> None:
        engines = open_engines(settings(config), None, [])
        for name in ("rollout-0", "rollout-1"):
            add(engines, Handle(name))  # type: ignore[arg-type]
        assert engines.num_tokens == 0
        await until(lambda: engines.num_tokens == 14)
        await engines.close()

    run(scenario)


class NamingLauncher:
    """Knows which calls wait for which role, and reserves what a plan says: the seam of `offbeat_actors.Launcher`."""

    reserves = True

    def waits(self) -> list[Wait]:
        calls = (("rollout-0", "generate"), ("rollout-1", "pull_weights"))
        return [Wait(on=role, method=method, lasted_s=9.0, deadline_s=10.0) for role, method in calls]

    async def close(self, deadline_s: float | None = None) -> None:
        pass


def test_a_sync_that_is_late_names_who_has_not_answered_and_joining_without_a_place_is_refused(
    config: Path, model: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        notes: list[str] = []
        fleet = Fleet(resolve(settings(config)), str(model), tmp_path, events=KeptMessages(notes))
        fleet._launcher = NamingLauncher()  # type: ignore[assignment]
        async with fleet:
            late = fleet.name_who_is_late(asyncio.Event().wait(), "sync 3", 0.2)  # type: ignore[arg-type]
            with pytest.raises(DeadlineError, match=r"sync 3: waited 0.1 s for rollout-1.pull_weights \(9 s\)"):
                await late
            for name in ("rollout-0", "rollout-1"):
                add(fleet.engines, Handle(name))  # type: ignore[arg-type]
            fleet.engines.scale(3)
            assert notes == [], "nothing is started before all roles are there"
            fleet.engines.let_others_join()
            await until(lambda: notes)
            await asyncio.sleep(0.05)
            [line] = notes  # and it is not tried again
            assert line.startswith("rollout-2 cannot be started, so 2 rollout engines continue: devices were reserved")

    run(scenario)


@pytest.mark.parametrize("others", [0, 1])
def test_an_engine_whose_node_is_gone_leaves_while_there_are_others(
    config: Path, model: Path, tmp_path: Path, others: int
) -> None:
    class FullLauncher(NamingLauncher):
        reserves = False

        async def start(self, spec: Any) -> Any:
            raise PlacementError("no node has room for it")

    async def scenario() -> None:
        notes: list[str] = []
        fleet = Fleet(resolve(load_config(config, GrpoConfig, [])), str(model), tmp_path, events=KeptMessages(notes))
        fleet._launcher = FullLauncher()  # type: ignore[assignment]
        async with fleet:
            fleet.engines._wanted = 1 + others
            for _ in range(others):
                add(fleet.engines, Handle("rollout-1"))  # type: ignore[arg-type]
            gone = add(fleet.engines, Handle("rollout-0"))  # type: ignore[arg-type]
            gone.actor.kill()
            await asyncio.wait(set(fleet.engines._tasks), timeout=10, return_when="FIRST_COMPLETED")
            if not others:
                with pytest.raises(PlacementError, match="no node has room"):
                    fleet.engines.raise_if_failed()
                return
            fleet.engines.raise_if_failed()
            assert fleet.engines.names == ["rollout-1"]
            assert gone.has_left
            assert notes[-2:] == [
                "rollout-0 has no place any more, and the others continue: no node has room for it",
                "rollout-0 has left: 1 rollout engine",
            ]

    run(scenario)


def test_an_engine_that_cannot_hold_a_sample_across_a_sync_is_refused_at_its_start(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    class NeverHolds:
        capabilities = RolloutCapabilities(pause_modes=("abort", "wait"))

        @classmethod
        async def create(cls, _: RolloutEngineConfig) -> "NeverHolds":
            return cls()

        async def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(rollout_role, "load_backend", lambda *_: NeverHolds)
    role = rollout_role.RolloutRole(config=settings(config), role=RoleName("rollout"), model_path="m", num_threads=1)
    with pytest.raises(ConfigError, match=r"set async\.partial_rollout = false"):
        asyncio.run(role.start())
    assert closed == [True]
