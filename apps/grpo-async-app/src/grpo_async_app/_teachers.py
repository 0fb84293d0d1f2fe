"""The teacher's replicas: asked in turn, watched, started again; an answer that is lost is asked for anew."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from grpo_async_app._config import GrpoConfig
from grpo_async_app._gathering import all_or_first_error
from grpo_async_app._restarts import RestartBudget, Tell, start_again
from grpo_async_app._watching import wait_gone
from offbeat_actors import ActorHandle
from offbeat_types import (
    DeadlineError,
    EngineHealth,
    Floats,
    Ids,
    Image,
    PeerFailedError,
    ScoreRequest,
    Trajectory,
)

Busy = Callable[[str], AbstractContextManager[None]]


@dataclass(eq=False)
class _Replica:
    """One replica, through all its processes.

    Args:
        name: such as "teacher-0".
        handle: its process; a dead one while the next is started.
        num_requests: that wait for it.
        serves: it can be asked. Set as well when it has failed for good, for those who wait.
        failure: why it has.
    """

    name: str
    handle: ActorHandle
    num_requests: int = 0
    serves: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None

    async def ask_health(self, *, deadline_s: float) -> None:
        """It answers at once whatever it computes."""
        await self.handle.call("health", returns=EngineHealth, deadline_s=deadline_s)


class Teachers:
    """Replicas of one teacher, which may die or stop answering while the run goes on.

    Args:
        config: of the run.
        start: starts the process of the replica of this name.
        budget: of restarts.
        tell: takes a line when something has happened to a replica.

    Attributes:
        busy: wraps each request to the replica it is called with.
    """

    def __init__(
        self, config: GrpoConfig, start: Callable[[str], Awaitable[ActorHandle]], budget: RestartBudget, tell: Tell
    ) -> None:
        self._config, self._start, self._budget, self._tell = config, start, budget, tell
        self._replicas: list[_Replica] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.busy: Busy = lambda _: nullcontext()

    async def start(self) -> None:
        """Start all of them."""
        names = [f"teacher-{number}" for number in range(self._config.teacher.num_replicas)]
        handles = await all_or_first_error([self._start(name) for name in names])
        for name, handle in zip(names, handles, strict=True):
            replica = _Replica(name, handle)
            replica.serves.set()
            self._replicas.append(replica)
            self._tasks.append(asyncio.create_task(self._look_after(replica)))

    async def close(self) -> None:
        """Look after them no longer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def num_restarts(self) -> int:
        """Times one of them was started again."""
        return sum(self._budget.spent[replica.name] for replica in self._replicas)

    async def score(
        self,
        group_id: int,
        prompt_ids: Ids,
        trajectories: list[Trajectory],
        where: Callable[[str], object],
        images: tuple[Image, ...] = (),
    ) -> list[Floats]:
        """The teacher's log-probabilities of what the policy has sampled.

        Args:
            group_id: of the group.
            prompt_ids: [P] int32.
            trajectories: of that prompt; what they have read is context to the teacher too.
            where: told which replica is asked.
            images: of the prompt, as the policy saw them.

        Returns:
            [N] float32 for each trajectory: nats, of its sampled tokens, at the sampler's temperature.

        Raises:
            PeerFailedError: replicas died over this group more than `async.max_group_retries` times, or one for good.
            DeadlineError: no answer within `teacher.deadline_s`.
        """
        request = ScoreRequest(
            request_id=f"group-{group_id}",
            prompt_ids=prompt_ids,
            continuations=tuple(trajectory.ids for trajectory in trajectories),
            temperature=self._config.rollout.temperature,
            images=images,
        )
        for retries_left in reversed(range(self._config.async_.max_group_retries + 1)):
            replica = self._least_loaded()
            where(replica.name)
            try:
                scores = await self._ask(replica, request)
            except PeerFailedError:
                if not retries_left or replica.failure is not None:
                    raise
            else:
                return [found[each.loss_mask] for found, each in zip(scores, trajectories, strict=True)]
        raise AssertionError  # the last attempt returns or raises

    def _least_loaded(self) -> _Replica:
        """The serving replica with the fewest requests; any one when none serves."""
        there = [each for each in self._replicas if each.serves.is_set()] or self._replicas
        return min(there, key=lambda each: each.num_requests)

    async def _ask(self, replica: _Replica, request: ScoreRequest) -> list[Floats]:
        deadline_s = self._config.teacher.deadline_s
        replica.num_requests += 1
        try:
            await self._wait_until_it_serves(replica)
            handle = replica.handle
            try:
                with self.busy(replica.name):
                    return await handle.call("score", request, returns=list[Floats], deadline_s=deadline_s)
            except PeerFailedError:
                if replica.handle is handle:
                    replica.serves.clear()  # at once: a dead replica has the fewest requests, and would get them all
                if handle.alive:
                    handle.kill()  # what has failed so that only a new process mends it is started again
                raise
        finally:
            replica.num_requests -= 1

    async def _wait_until_it_serves(self, replica: _Replica) -> None:
        deadline_s = self._config.cluster.start_timeout_s
        try:
            async with asyncio.timeout(deadline_s):
                await replica.serves.wait()
        except TimeoutError:
            raise DeadlineError("score", f"{replica.name} to be ready", deadline_s, "see its log") from None
        if replica.failure is not None:
            raise replica.failure

    async def _look_after(self, replica: _Replica) -> None:
        """Start a replica again whenever it ends. Who waits for it hears why it never will serve again."""
        try:
            while True:
                cause = await wait_gone(replica.handle, replica.ask_health, self._config.cluster.silent_after_s)
                replica.serves.clear()
                replica.handle = await start_again(
                    self._budget, replica.name, cause, lambda: self._start(replica.name), self._tell
                )
                replica.serves.set()
        except Exception as error:
            replica.failure = error
            replica.serves.set()
            raise

    def raise_if_failed(self) -> None:
        """Raise why a replica cannot be started again."""
        for replica in self._replicas:
            if replica.failure is not None:
                raise replica.failure
