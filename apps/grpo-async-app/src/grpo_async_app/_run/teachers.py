"""The teacher's replicas: asked in turn, watched, started again; an answer that is lost is asked for anew."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

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
from offbeat_types import (
    EngineHealth,
    Floats,
    Ids,
    Image,
    PeerFailedError,
    ScoreRequest,
    Trajectory,
)

Busy = Callable[[str], AbstractContextManager[None]]


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
        self._replicas: list[Supervised] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.busy: Busy = lambda _: nullcontext()

    async def start(self) -> None:
        """Start all of them."""
        names = [f"teacher-{number}" for number in range(self._config.teacher.num_replicas)]
        handles = await gather_or_cancel([self._start(name) for name in names])
        for name, handle in zip(names, handles, strict=True):
            replica = Supervised(name, handle)
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
            replica = least_loaded(self._replicas)
            where(replica.name)
            try:
                scores = await self._ask(replica, request)
            except PeerFailedError:
                if not retries_left or replica.failure is not None:
                    raise
            else:
                return [found[each.loss_mask] for found, each in zip(scores, trajectories, strict=True)]
        raise AssertionError  # the last attempt returns or raises

    async def _ask(self, replica: Supervised, request: ScoreRequest) -> list[Floats]:
        deadline_s = self._config.teacher.deadline_s
        replica.load += 1
        try:
            actor = await replica.ready("score", self._config.cluster.start_timeout_s)
            try:
                with self.busy(replica.name):
                    return await actor.call("score", request, returns=list[Floats], deadline_s=deadline_s)
            except PeerFailedError:
                replica.give_up(actor)
                raise
        finally:
            replica.load -= 1

    async def _look_after(self, replica: Supervised) -> None:
        """Start a replica again whenever it ends. Who waits for it hears why it never will serve again."""
        try:
            while True:
                ask = partial(replica.actor.call, "health", returns=EngineHealth)
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
        """Raise why a replica cannot be started again."""
        for replica in self._replicas:
            if replica.failure is not None:
                raise replica.failure
