"""Replicas of a model beside the run: asked in turn, watched, started again; a lost answer is asked for anew."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.events import RunEvents
from offbeat_actors import ActorHandle, KeepAlive, Member, Pool
from offbeat_async_policy import BusyClock
from offbeat_core import PeerFailedError, RoleName
from offbeat_run import clock_s

T = TypeVar("T")


class Replicas(Pool[Member]):
    """Processes of one kind, which may die or stop answering during the run.

    Args:
        kind: such as "teacher": replicas are teacher-0 and so on.
        num_replicas: how many.
        start: starts the process of a replica.
        keep: how they are kept alive.
        events: takes each stretch in which one was busy.
    """

    def __init__(
        self,
        config: GrpoConfig,
        kind: str,
        num_replicas: int,
        start: Callable[[RoleName], Awaitable[ActorHandle]],
        keep: KeepAlive,
        events: RunEvents,
    ) -> None:
        super().__init__(start, keep, Member)
        self._config, self.kind, self._num_replicas = config, kind, num_replicas

        def worked(role: str, start_s: float, end_s: float) -> None:
            events.worked(role, "score", start_s, end_s)

        # A clock of its own: shares of idle time are those of trainer and engines.
        self._clock = BusyClock("", lambda: num_replicas, clock_s, worked)

    async def start_all(self) -> None:
        """Start every replica, and wait until all are up."""
        await self.start(RoleName(self.kind, index) for index in range(self._num_replicas))

    async def score(
        self, request: object, returns: type[T], deadline_s: float, where: Callable[[str], object] = lambda _: None
    ) -> T:
        """Ask a replica, and another where it is lost meanwhile.

        Args:
            request: what its method `score` takes.
            returns: type of the answer.
            deadline_s: for the answer.
            where: called with the name of each replica that is asked.

        Raises:
            PeerFailedError: the last attempt that `async.max_group_retries` allows was lost too.
            OffbeatError: the replica raised it.
        """
        for retries_left in reversed(range(self._config.async_.max_group_retries + 1)):
            replica = self.least_loaded()
            where(replica.name)
            try:
                return await self._ask(replica, request, returns, deadline_s)
            except PeerFailedError:
                if not retries_left or replica.failure is not None:
                    raise
        raise AssertionError  # the last attempt returns or raises

    async def _ask(self, replica: Member, request: object, returns: type[T], deadline_s: float) -> T:
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
