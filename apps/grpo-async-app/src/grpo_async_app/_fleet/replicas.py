"""Replicas of a model beside the run: asked in turn, watched, started again; a lost answer is asked for anew."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from grpo_async_app._config.sections import GrpoConfig
from offbeat_actors import (
    ActorHandle,
    RestartBudget,
    Supervised,
    Tell,
    gather_or_cancel,
    least_loaded,
    start_again,
    wait_gone,
)
from offbeat_async_policy import BusyClock, OnSpan
from offbeat_core import PeerFailedError
from offbeat_run import clock_s

T = TypeVar("T")


class Replicas:
    """Processes of one kind, which may die or stop answering while the run goes on.

    Args:
        kind: such as "teacher": replicas are teacher-0 and so on.
        num_replicas: how many.
        start: starts the process of the replica of this name.
        tell: takes a line when something has happened to a replica.
        worked: told of each stretch in which one was busy.
    """

    def __init__(
        self,
        config: GrpoConfig,
        kind: str,
        num_replicas: int,
        start: Callable[[str], Awaitable[ActorHandle]],
        budget: RestartBudget,
        tell: Tell,
        worked: OnSpan,
    ) -> None:
        self._config, self.kind, self._num_replicas = config, kind, num_replicas
        self._start, self._budget, self._tell = start, budget, tell
        self._replicas: list[Supervised] = []
        self._tasks: list[asyncio.Task[None]] = []
        # A clock of its own: shares of idle time are those of trainer and engines.
        self._clock = BusyClock("", lambda: num_replicas, clock_s, worked)

    async def start(self) -> None:
        names = [f"{self.kind}-{number}" for number in range(self._num_replicas)]
        handles = await gather_or_cancel([self._start(name) for name in names])
        for name, handle in zip(names, handles, strict=True):
            replica = Supervised(name, handle)
            replica.serves.set()
            self._replicas.append(replica)
            self._tasks.append(asyncio.create_task(self._look_after(replica)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def num_restarts(self) -> int:
        return sum(self._budget.spent[replica.name] for replica in self._replicas)

    async def ask(
        self, request: object, returns: type[T], deadline_s: float, where: Callable[[str], object] = lambda _: None
    ) -> T:
        """The answer of `score` to a request; `where` is told which replica is asked."""
        for retries_left in reversed(range(self._config.async_.max_group_retries + 1)):
            replica = least_loaded(self._replicas)
            where(replica.name)
            try:
                return await self._ask(replica, request, returns, deadline_s)
            except PeerFailedError:
                if not retries_left or replica.failure is not None:
                    raise
        raise AssertionError  # the last attempt returns or raises

    async def _ask(self, replica: Supervised, request: object, returns: type[T], deadline_s: float) -> T:
        replica.load += 1
        try:
            actor = await replica.ready("score", self._config.cluster.start_timeout_s)
            try:
                with self._clock.busy(replica.name):
                    return await actor.call("score", request, returns=returns, deadline_s=deadline_s)
            except PeerFailedError:
                replica.give_up(actor)
                raise
        finally:
            replica.load -= 1

    async def _look_after(self, replica: Supervised) -> None:
        """Start a replica again whenever it ends. Who waits for it hears why it never will serve again."""
        try:
            while True:
                ask = partial(replica.actor.call, "health")
                cause = await wait_gone(replica.actor, ask, self._config.cluster.silent_after_s)
                replica.serves.clear()
                replica.actor = await start_again(
                    self._budget, replica.name, cause, lambda: self._start(replica.name), self._tell
                )
                replica.serves.set()
        except Exception as error:
            replica.failure = error
            replica.serves.set()
            raise

    def raise_if_failed(self) -> None:
        for replica in self._replicas:
            if replica.failure is not None:
                raise replica.failure
