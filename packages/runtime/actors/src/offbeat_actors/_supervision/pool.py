"""Roles of one kind, kept alive: asked whether they live, started again when they end, called through all of that."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from offbeat_actors._actor import ActorHandle
from offbeat_actors._supervision.group import gather_or_cancel
from offbeat_actors._supervision.supervision import Ask, Notify, RestartBudget, start_again, wait_gone
from offbeat_core import DeadlineError, OffbeatError, RoleName

M = TypeVar("M", bound="Member")


@dataclass(frozen=True, kw_only=True)
class KeepAlive:
    """Settings by which the roles of a pool are kept alive; one for all pools of a run.

    Args:
        budget: of restarts.
        silent_after_s: a role that answers nothing for so long is killed, and started again.
        notify: takes a line when something has happened to a role.
    """

    budget: RestartBudget
    silent_after_s: float
    notify: Notify


class Member:
    """One role of a pool, through all its processes.

    Args:
        actor: its first process.

    Attributes:
        actor: its process; a dead one while the next is started.
        load: work in progress, in any unit.
        serves: it can be asked. Set as well when it never will again, for the callers that wait.
        leaving: it gets no more work, and is not started again.
        has_left: it will never serve again.
        failure: why it never will, where that is an error.
    """

    def __init__(self, actor: ActorHandle) -> None:
        self.actor, self.load = actor, 0
        self.serves = asyncio.Event()
        self.leaving = self.has_left = False
        self.failure: BaseException | None = None

    @property
    def role(self) -> RoleName:
        """Its kind and number."""
        return self.actor.role

    @property
    def name(self) -> str:
        """Its name in errors and logs, such as "rollout-0"."""
        return self.actor.name

    async def ready(self, waiting: str, deadline_s: float) -> ActorHandle:
        """Wait until it serves, and return its process.

        Args:
            waiting: what for, in the error.
            deadline_s: for it to serve.

        Raises:
            DeadlineError: it did not in time.
            OffbeatError: it never will.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self.serves.wait()
        except TimeoutError:
            raise DeadlineError(waiting, f"{self.name} to be ready", deadline_s, "see its log") from None
        if self.failure is not None:
            raise self.failure
        return self.actor

    def give_up(self, actor: ActorHandle) -> bool:
        """End a process that has failed so that only a new one mends it; return whether it still lived."""
        # A caller may report an earlier process late: the one that serves now is left alone.
        if self.actor is actor:
            self.serves.clear()  # at once: one that is dead has the least to do, and would get everything
        is_alive = actor.alive
        if is_alive:
            actor.kill()
        return is_alive


class Pool(Generic[M]):
    """Roles of one kind that are watched, and started again whenever they end, while the budget lasts.

    Must be made inside a running event loop. A subclass says what is special about its roles in `ask`, `on_up`,
    `on_end` and `continues_without`.

    Args:
        start: starts the process of a role.
        keep: how they are kept alive.
        make: makes the member of a process.

    Attributes:
        members: by name; one that is being started again is among them.
    """

    def __init__(
        self, start: Callable[[RoleName], Awaitable[ActorHandle]], keep: KeepAlive, make: Callable[[ActorHandle], M]
    ) -> None:
        self._start_process, self._make = start, make
        self.keep, self.members = keep, dict[str, M]()
        self._num_starting = 0
        self._ever: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    # ── for a subclass ────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, member: M) -> Ask:
        """Return the question that a process must answer at once, whatever it computes; called for each process."""
        return partial(member.actor.call, "health")

    def on_up(self, member: M) -> None:
        """Take a member whose process is up, for the first time or again."""
        member.serves.set()

    def on_end(self, member: M) -> None:
        """Take a member whose process has ended, before the next one is started."""

    def continues_without(self, member: M, error: OffbeatError) -> bool:
        """Return whether the others continue without a member that cannot be restarted; else the error is raised."""
        return False

    # ── starting ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, roles: Iterable[RoleName]) -> None:
        """Start all at once, and wait until they are up."""
        for actor in await gather_or_cancel([self.start_process(role) for role in roles]):
            self.add(actor)

    async def start_process(self, role: RoleName) -> ActorHandle:
        """Start the process of a role that is, or becomes, a member."""
        self._num_starting += 1
        try:
            return await self._start_process(role)
        finally:
            self._num_starting -= 1

    @property
    def are_starting(self) -> bool:
        """True while a process is started, which has a deadline of its own."""
        return self._num_starting > 0

    def add(self, actor: ActorHandle) -> M:
        """Watch over a process, and those that follow it."""
        member = self.members[actor.name] = self._make(actor)
        self._ever.add(actor.name)
        self.on_up(member)
        self.in_background(self._look_after(member))
        return member

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something for as long as the pool is open; `raise_if_failed` raises its error."""
        self._tasks.add(asyncio.create_task(work))  # held here, as the event loop holds tasks by weak references alone

    # ── working ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def living(self) -> list[M]:
        """Members whose process runs and is not being stopped."""
        return [member for member in self.members.values() if member.actor.alive and not member.has_left]

    def least_loaded(self) -> M:
        """Return the member that serves and has the least to do; any one when none serves. None that leaves.

        There must be a member that stays.
        """
        staying = [member for member in self.members.values() if not member.leaving]
        serving = [member for member in staying if member.serves.is_set()]
        return min(serving or staying, key=lambda member: (member.load, member.role))

    def give_up(self, member: M, actor: ActorHandle, why: str) -> None:
        """End what is left of a process that has failed; the member is started again."""
        if member.give_up(actor):
            self.keep.notify(f"{member.name} is ended, because only a new process mends this: {why}")

    # ── life and death ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_restarts(self) -> int:
        """Restarts of all members since the start of the run, also of those that have left."""
        # One budget serves all pools of a run: those of other pools do not count here.
        return sum(self.keep.budget.spent[name] for name in self._ever)

    def raise_if_failed(self) -> None:
        """Raise why a member never serves again, or what went wrong in the background.

        It does so each time: a run that blames another member and continues would have one without supervision.
        """
        for task in [task for task in self._tasks if task.done()]:
            if not task.cancelled() and (error := task.exception()):
                raise error
            self._tasks.discard(task)

    async def leave(self, member: M) -> None:
        """Stop the process of a member that leaves; an error is reported and raised no further."""
        # First, so that `living` has it no more while it is being stopped.
        member.has_left = True
        try:
            await member.actor.stop()
        except OffbeatError as error:
            self.keep.notify(f"{member.name} did not close well: {error}")

    async def close(self) -> None:
        """Watch over them no longer; the launcher that has started the processes ends them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _look_after(self, member: M) -> None:
        """Watch a member through all its processes. Callers that wait for it get the reason if it never serves."""
        try:
            await self._keep_alive(member)
        except Exception as error:
            member.failure = error
            raise
        finally:
            member.has_left = True
            member.serves.set()  # wakes all that wait in `ready`: they get the failure, or a process that is gone
        # Not reached after a failure: that member stays, and all that ask it get the failure.
        del self.members[member.name]
        self.keep.notify(f"{member.name} has left: {self.describe()}")

    async def _keep_alive(self, member: M) -> None:
        while True:
            cause = await wait_gone(member.actor, self.ask(member), self.keep.silent_after_s)
            # What is asked of it from now on waits for the next process.
            member.serves.clear()
            self.on_end(member)
            if member.leaving or not await self._is_started_again(member, cause):
                return
            self.on_up(member)

    async def _is_started_again(self, member: M, cause: str) -> bool:
        """Start the next process; return False where the member leaves instead."""
        start = partial(self.start_process, member.role)
        try:
            member.actor = await start_again(self.keep.budget, member.name, cause, start, self.keep.notify)
        except OffbeatError as error:
            if not self.continues_without(member, error):
                raise
            return False
        if member.leaving:  # it was asked to while it was started: it has nothing to finish
            await self.leave(member)
        return not member.leaving

    def describe(self) -> str:
        """Return the number of members that stay, as text."""
        number = sum(not member.leaving for member in self.members.values())
        return f"{number} role{'s' if number != 1 else ''}"
