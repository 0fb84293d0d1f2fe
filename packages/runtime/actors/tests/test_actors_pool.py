"""A pool keeps its roles alive, and a role on call comes back when it is called: with handles that do as the test says.

Real processes that are killed, stuck or too few are tests of the launchers and of the applications.
"""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from test_actors_supervision import Handle, Launcher, raises, run

from offbeat_actors import ActorHandle, KeepAlive, Member, Pool, RestartBudget, RoleOnCall, RoleSpec
from offbeat_core import ConfigError, DeadlineError, OffbeatError, PeerFailedError, PlacementError, RoleName

SILENT_AFTER_S = 0.4


def make_member(number: int = 0) -> Member:
    return Member(Handle(f"rollout-{number}"))  # type: ignore[arg-type]


class Starter:
    """Starts handles; what is put into `fails` is raised by the next starts instead."""

    def __init__(self) -> None:
        self.fails: list[OffbeatError] = []
        self.started: list[Handle] = []
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def __call__(self, role: RoleName) -> ActorHandle:
        await self.may_start.wait()
        if self.fails:
            raise self.fails.pop(0)
        self.started.append(Handle(str(role)))
        return self.started[-1]  # type: ignore[return-value]


def open_pool(
    starter: Starter, notices: list[str], max_restarts: int = 5, kind: Callable[..., Pool[Member]] = Pool
) -> Pool[Member]:
    keep = KeepAlive(budget=RestartBudget(max_restarts, 3600.0), silent_after_s=SILENT_AFTER_S, notify=notices.append)
    return kind(starter, keep, Member)


def replicas(number: int) -> Sequence[RoleName]:
    return [RoleName("teacher", index) for index in range(number)]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def test_work_goes_to_the_one_that_serves_and_has_the_least() -> None:
    async def scenario() -> None:
        pool = open_pool(Starter(), [])
        await pool.start([RoleName("teacher", index) for index in (2, 10, 1)])
        one, two, ten = (pool.members[f"teacher-{index}"] for index in (1, 2, 10))
        assert pool.least_loaded() is one, "of equals the first by number"
        one.load, ten.load = 7, 3
        two.serves.clear()
        assert pool.least_loaded() is ten
        two.serves.set()
        assert pool.least_loaded() is two
        two.leaving = True
        assert pool.least_loaded() is ten
        for each in (one, ten):
            each.serves.clear()
        assert pool.least_loaded() is ten, "there is always one to wait for"
        await pool.close()

    run(scenario)


def test_who_waits_for_a_member_gets_its_process_or_hears_why_not() -> None:
    async def scenario() -> None:
        role = make_member()
        with pytest.raises(DeadlineError, match=r"generate: waited 0.01 s for rollout-0 to be ready"):
            await role.ready("generate", 0.01)
        role.serves.set()
        assert await role.ready("generate", 10.0) is role.actor
        role.failure = PeerFailedError("rollout-0", "no memory left")
        with pytest.raises(PeerFailedError, match="no memory left"):
            await role.ready("generate", 10.0)

    run(scenario)


def test_only_the_process_that_failed_is_given_up() -> None:
    async def scenario() -> None:
        former, role = Handle(), make_member()
        present = role.actor
        role.serves.set()
        assert role.give_up(former)  # type: ignore[arg-type]
        assert (role.serves.is_set(), present.alive) == (True, True)
        assert role.give_up(present)
        assert (role.serves.is_set(), present.alive) == (False, False)
        assert not role.give_up(present), "it was dead already"

    run(scenario)


def test_a_member_that_ends_is_started_again_and_serves_only_then() -> None:
    async def scenario() -> None:
        starter, notices = Starter(), list[str]()
        pool = open_pool(starter, notices)
        await pool.start(replicas(2))
        member = pool.members["teacher-1"]
        first = member.actor
        starter.may_start.clear()
        starter.started[1].end("its process exited with code 1")
        await until(lambda: not member.serves.is_set())
        assert [each.name for each in pool.living] == ["teacher-0"]
        await until(lambda: pool.are_starting)
        starter.may_start.set()
        assert await member.ready("score", 10.0) is not first
        assert not pool.are_starting
        assert notices == ["teacher-1: its process exited with code 1; it is started again"]
        assert pool.num_restarts == 1
        pool.raise_if_failed()
        await pool.close()

    run(scenario)


def test_the_restarts_of_another_pool_with_the_same_budget_do_not_count() -> None:
    async def scenario() -> None:
        pool = open_pool(Starter(), [])
        await pool.start(replicas(1))
        pool.keep.budget.spend("rollout-0", "killed", 1.0)
        assert pool.num_restarts == 0
        await pool.close()

    run(scenario)


def test_a_member_that_can_never_serve_again_fails_all_that_wait_and_all_that_ask() -> None:
    async def scenario() -> None:
        starter = Starter()
        pool = open_pool(starter, [], max_restarts=1)
        await pool.start(replicas(1))
        member = pool.members["teacher-0"]
        starter.fails.append(PeerFailedError("teacher-0", "its process was killed by SIGKILL"))
        starter.started[0].kill()
        await until(lambda: member.has_left)
        with pytest.raises(PeerFailedError, match=r"max_restarts = 1 allows no more"):
            await member.ready("score", 10.0)
        for _ in range(2):
            with pytest.raises(PeerFailedError, match=r"max_restarts = 1 allows no more"):
                pool.raise_if_failed()
        await pool.close()

    run(scenario)


def test_others_continue_without_a_member_only_where_the_pool_says_so() -> None:
    class Flexible(Pool[Member]):
        def continues_without(self, member: Member, error: OffbeatError) -> bool:
            return isinstance(error, PlacementError)

    async def scenario() -> None:
        starter, notices = Starter(), list[str]()
        pool = open_pool(starter, notices, kind=Flexible)
        await pool.start(replicas(2))
        starter.fails.append(PlacementError("no node has room"))
        starter.started[0].end("its node is gone")
        await until(lambda: len(pool.members) == 1)
        assert notices[-1] == "teacher-0 has left: 1 role"
        pool.raise_if_failed()
        starter.fails.append(ConfigError("no such model"))
        starter.started[1].end("its node is gone")
        await until(lambda: pool.members["teacher-1"].has_left)
        with pytest.raises(ConfigError, match="no such model"):
            pool.raise_if_failed()
        await pool.close()

    run(scenario)


def test_a_member_that_was_asked_to_leave_while_it_was_started_is_stopped_and_does_not_serve() -> None:
    class Noting(Pool[Member]):
        def on_up(self, member: Member) -> None:
            up.append(member.name)

    up: list[str] = []

    async def scenario() -> None:
        starter, notices = Starter(), list[str]()
        pool = open_pool(starter, notices, kind=Noting)
        await pool.start(replicas(2))
        member = pool.members["teacher-1"]
        starter.may_start.clear()
        starter.started[1].kill()
        await until(lambda: pool.are_starting)
        member.leaving = True
        starter.may_start.set()
        await until(lambda: "teacher-1" not in pool.members)
        assert not starter.started[-1].alive
        assert up == ["teacher-0", "teacher-1"]
        assert notices[-1] == "teacher-1 has left: 1 role"
        await pool.close()

    run(scenario)


def test_an_error_of_background_work_is_raised_whenever_it_is_looked_for() -> None:
    async def scenario() -> None:
        async def fail() -> None:
            raise ConfigError("no room")

        pool = open_pool(Starter(), [])
        pool.in_background(fail())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for _ in range(2):
            with pytest.raises(ConfigError, match="no room"):
                pool.raise_if_failed()
        await pool.close()

    run(scenario)


def test_a_role_on_call_is_started_once_for_all_who_need_it_and_again_after_its_end() -> None:
    async def scenario() -> None:
        launcher = Launcher()
        role = RoleOnCall(launcher, RoleSpec(RoleName("scorer"), "m:Scorer"))  # type: ignore[arg-type]
        assert (role.name, role.handle) == ("scorer-0", None)
        first, same = await asyncio.gather(role.start(), role.start())
        assert first is same is role.handle
        first.kill()
        assert role.handle is None
        await role.call("score", deadline_s=1.0)
        assert role.handle is not first
        assert len(launcher.started) == 2

    run(scenario)


def test_a_role_on_call_that_does_not_answer_in_time_is_gone_when_the_caller_hears_of_it() -> None:
    async def scenario() -> None:
        def role_that(answer: Callable[[str], object]) -> tuple[RoleOnCall, Handle]:
            handle = Handle(answer=answer)

            class One:
                async def start(self, spec: RoleSpec) -> Handle:
                    return handle

            return RoleOnCall(One(), RoleSpec(RoleName("scorer"), "m:Scorer")), handle  # type: ignore[arg-type]

        role, late = role_that(raises(DeadlineError("scorer.score", "scorer", 1.0)))
        with pytest.raises(DeadlineError):
            await role.call("score", deadline_s=1.0)
        assert not late.alive
        role, wrong = role_that(raises(ConfigError("no such reward")))
        with pytest.raises(ConfigError):
            await role.call("score", deadline_s=1.0)
        assert wrong.alive

    run(scenario)
