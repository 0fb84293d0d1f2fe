"""Supervision ends, restarts and picks actors as its rules say: with handles that do as the test says."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat_actors import (
    ActorGroup,
    RestartBudget,
    RoleSpec,
    StuckError,
    start_again,
    start_all,
    start_ranks,
    wait_gone,
)
from offbeat_core import ConfigError, DeadlineError, OffbeatError, PeerFailedError, RoleName, WeightSyncError

SILENT_AFTER_S = 0.4


class Handle:
    """The part of an `ActorHandle` that a supervisor needs; every call gives what `answer` returns."""

    address = "127.0.0.1"

    def __init__(self, name: str = "rollout-0", answer: Callable[[str], object] = lambda method: None) -> None:
        self.name, self.role, self._answer = name, RoleName.parse(name), answer
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return not self._ended.done()

    def kill(self) -> None:
        self.end("it was killed")

    def end(self, cause: str) -> None:
        assert self.alive, "the process id of one that is gone may be another's"
        self._ended.set_result(cause)

    async def wait_dead(self) -> str:
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        self.kill()

    async def call(self, method: str, *_: Any, **__: Any) -> object:
        return self._answer(method)


class Launcher:
    """Starts handles; roles named in `fails` do not start, once all others have."""

    def __init__(self, num_roles: int = 1, fails: Sequence[str] = ()) -> None:
        self.specs: list[RoleSpec] = []
        self.started: list[Handle] = []
        self._num_good, self._fails = num_roles - len(fails), fails
        self._all_good = asyncio.Event()

    async def start(self, spec: RoleSpec) -> Handle:
        self.specs.append(spec)
        await asyncio.sleep(0)  # a process takes its time
        if spec.name in self._fails:
            await self._all_good.wait()
            raise ConfigError(f"{spec.name} has no model")
        self.started.append(Handle(spec.name))
        if len(self.started) == self._num_good:
            self._all_good.set()
        return self.started[-1]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(within())


def raises(error: OffbeatError) -> Callable[[str], object]:
    def fail(_: str) -> object:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "at_once", "cause"),
    [
        (DeadlineError("health", "rollout-0", 0.4), True, "it answered nothing"),
        (StuckError("no token was sampled"), True, "no token was sampled"),
        (PeerFailedError("rollout-0", "out of memory"), False, "it answered with errors alone (out of memory)"),
    ],
    ids=["silent", "stuck", "errors"],
)
def test_an_actor_that_is_as_good_as_dead_is_killed_and_its_end_says_why(
    error: OffbeatError, at_once: bool, cause: str
) -> None:
    async def scenario() -> None:
        handle, asked_s = Handle(answer=raises(error)), list[float]()

        async def ask(*, deadline_s: float) -> None:
            asked_s.append(deadline_s)
            await handle.call("health")

        found = await wait_gone(handle, ask, SILENT_AFTER_S)  # type: ignore[arg-type]
        assert found == f"{cause} for 0.4 s (cluster.silent_after_s) and was killed"
        assert not handle.alive
        assert set(asked_s) == {SILENT_AFTER_S}
        assert (len(asked_s) == 1) == at_once

    run(scenario)


def test_an_actor_that_answers_again_is_not_held_to_its_errors_of_before() -> None:
    async def scenario() -> None:
        handle, num_asked = Handle(), 0

        async def ask(*, deadline_s: float) -> None:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 3 * 4:
                handle.end("its process exited with code 0")
            if num_asked % 2:
                raise PeerFailedError("rollout-0", "busy")

        found = await wait_gone(handle, ask, SILENT_AFTER_S)  # type: ignore[arg-type]
        assert found == "its process exited with code 0"

    run(scenario)


def test_an_actor_is_asked_several_times_within_the_silence_that_it_is_allowed() -> None:
    """Otherwise one that stalls right after an answer is found a whole deadline late."""

    async def scenario() -> None:
        handle, asked_s = Handle(), list[float]()

        async def ask(*, deadline_s: float) -> None:
            asked_s.append(time.monotonic())
            if len(asked_s) == 2:
                raise StuckError("no token was sampled")

        await wait_gone(handle, ask, 4.0)  # type: ignore[arg-type]
        assert asked_s[1] - asked_s[0] < 3.0

    run(scenario)


def test_restarts_long_ago_are_forgotten_and_each_role_has_its_own() -> None:
    budget = RestartBudget(max_restarts=2, window_s=100.0)
    for role, now_s in (("rollout-0", 0.0), ("rollout-0", 50.0), ("trainer", 60.0), ("rollout-0", 100.0)):
        budget.spend(role, "killed", now_s)
    with pytest.raises(PeerFailedError, match=r"rollout-0.*killed; it was started again 2 times within 100 s"):
        budget.spend("rollout-0", "killed", 149.0)
    budget.spend("rollout-0", "killed", 150.0)
    assert budget.spent == {"rollout-0": 4, "trainer": 1}


def test_what_ends_before_it_is_ready_is_started_again_until_the_budget_is_spent() -> None:
    async def scenario() -> None:
        ends: list[OffbeatError] = [PeerFailedError("trainer", "killed"), DeadlineError("starting", "trainer", 3.0)]
        notices: list[str] = []

        async def start() -> str:
            if ends:
                raise ends.pop(0)
            return "ready"

        budget = RestartBudget(max_restarts=4, window_s=3600.0)
        assert await start_again(budget, "trainer", "out of memory", start, notices.append) == "ready"
        assert [line.split(";")[0] for line in notices] == [
            "trainer: out of memory",
            "trainer: killed",
            "trainer: starting: waited 3 s for trainer, which did not come",
        ]
        ends[:] = [PeerFailedError("trainer", "killed again"), PeerFailedError("trainer", "never started")]
        with pytest.raises(PeerFailedError, match=r"killed again; it was started again 4 times"):
            await start_again(budget, "trainer", "out of memory", start, notices.append)
        ends[:] = [ConfigError("no such model")]
        with pytest.raises(ConfigError, match="no such model"):
            await start_again(RestartBudget(4, 3600.0), "trainer", "killed", start, notices.append)
        assert not ends, "another attempt would not help"

    run(scenario)


def test_all_ranks_start_or_none_is_left() -> None:
    async def scenario() -> None:
        specs = [RoleSpec(RoleName("trainer", rank), "m:Trainer") for rank in range(3)]
        launcher = Launcher(3)
        actors = await start_all(launcher, specs)  # type: ignore[arg-type]
        assert [actor.name for actor in actors] == ["trainer-0", "trainer-1", "trainer-2"]
        launcher = Launcher(3, fails=["trainer-1"])
        with pytest.raises(ConfigError, match="trainer-1 has no model"):
            await start_all(launcher, specs)  # type: ignore[arg-type]
        assert [actor.name for actor in launcher.started] == ["trainer-0", "trainer-2"]
        assert not any(actor.alive for actor in launcher.started)

    run(scenario)


def test_ranks_are_named_by_their_numbers_and_end_themselves_where_they_are_stuck() -> None:
    async def scenario() -> None:
        spec = RoleSpec(RoleName("trainer"), "m:Trainer", {"lr": 1.0}, log_path=Path("logs", "trainer-0.log"))
        launcher = Launcher(2)
        await start_ranks(launcher, spec, [SimpleNamespace(rank=rank) for rank in range(2)])  # type: ignore[arg-type]
        assert [each.name for each in launcher.specs] == ["trainer-0", "trainer-1"]
        assert [each.log_path for each in launcher.specs] == [Path("logs", f"trainer-{rank}.log") for rank in range(2)]
        assert [(each.kwargs["lr"], each.kwargs["rendezvous"].rank) for each in launcher.specs] == [(1.0, 0), (1.0, 1)]
        assert {each.liveness_policy for each in launcher.specs} == {"abort"}
        alone = Launcher()
        await start_ranks(alone, spec, [])  # type: ignore[arg-type]
        assert alone.specs == [spec], "one rank waits for no other"

    run(scenario)


def test_of_ranks_that_fail_the_one_that_died_first_is_named() -> None:
    async def scenario() -> None:
        failure = PeerFailedError("trainer-1", "connection closed by peer", "its last line")
        first = Handle("trainer-0")

        def answer(method: str) -> object:
            if method == "update":
                first.end("its process was killed by SIGKILL")
                raise failure
            return None

        actors = [first, Handle("trainer-1", answer)]
        group = ActorGroup(actors, silent_after_s=30.0)  # type: ignore[arg-type]
        group.raise_if_dead()
        with pytest.raises(PeerFailedError) as failed:
            await group.call("update", deadline_s=30.0)
        assert (failed.value.peer, failed.value.reason) == ("trainer-0", "its process was killed by SIGKILL")
        assert failed.value.log_tail == "its last line"
        with pytest.raises(PeerFailedError, match="trainer-0"):
            group.raise_if_dead()
        await group.destroy()
        assert not any(actor.alive for actor in actors)

    run(scenario)


def test_a_rank_that_fails_does_not_cut_the_others_short_where_each_has_work_of_its_own() -> None:
    async def scenario() -> None:
        ended: list[str] = []

        class Slow(Handle):
            async def call(self, method: str, *args: Any, **words: Any) -> Any:
                if method == "push":
                    await asyncio.sleep(0.05)
                    ended.append(self.name)
                return "done"

        def fail(method: str) -> object:
            if method == "push":
                raise WeightSyncError("no room")
            return None

        actors = [Handle("trainer-0", fail), Slow("trainer-1")]
        group = ActorGroup(actors, silent_after_s=30.0)  # type: ignore[arg-type]
        error, answer = await group.call_each("push", deadline_s=30.0)
        assert (str(error), answer, ended) == ("no room", "done", ["trainer-1"])
        with pytest.raises(WeightSyncError, match="no room"):
            await group.call("push", deadline_s=30.0)
        assert ended == ["trainer-1"], "such a call is cut short"
        await group.forget()

    run(scenario)


def test_of_two_ranks_that_are_gone_the_first_to_die_is_named_whatever_its_number() -> None:
    async def scenario() -> None:
        actors = [Handle(f"trainer-{rank}") for rank in range(3)]
        group = ActorGroup(actors, silent_after_s=30.0)  # type: ignore[arg-type]
        for rank, cause in ((2, "its process was killed by SIGKILL"), (0, "its process exited with code 1")):
            actors[rank].end(cause)
            await asyncio.sleep(0.1)
        first = await group.death()
        assert first is not None
        assert (first.peer, first.reason) == ("trainer-2", "its process was killed by SIGKILL")
        with pytest.raises(PeerFailedError, match="trainer-2"):
            group.raise_if_dead()
        await group.destroy()

    run(scenario)
