"""A trainer's rank that dies is replaced: the others stay, and all continue from copies that ranks hold of each other.

    a rank dies ─> the others are interrupted ─> a spare, or a new process, takes its place ─> all meet anew,
                                                 rejoin: the state after the last update that all have had

A spare is a process that has imported everything, which is what takes a new one most of its time.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Final

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.trainers import Trainers, open_places
from offbeat_actors import ActorHandle, Launcher, RestartBudget, RoleSpec, gather_or_cancel
from offbeat_core import OffbeatError, RoleName
from offbeat_weightsync import new_socket_path

_INTERRUPT_S: Final = 10.0
"""Time in which the ranks that are left answer that they have broken off what they were waiting for."""


def keeps_copies(config: GrpoConfig) -> bool:
    """Return whether the trainer's ranks hold copies of each other's state."""
    return bool(config.engine.options.get("peer_copies"))


class TrainerHealer:
    """Replaces ranks of a trainer.

    Args:
        config: of the run.
        launcher: starts processes.
        budget: takes each replacement as a restart of the trainer.
        notify: takes a line about what has happened.
        keeps_spare: a process waits, and takes the place of the next rank that dies: where ranks have no devices.
    """

    def __init__(
        self,
        config: GrpoConfig,
        launcher: Launcher,
        budget: RestartBudget,
        notify: Callable[[str], None],
        *,
        keeps_spare: bool,
    ) -> None:
        self._config, self._launcher, self._budget, self._notify = config, launcher, budget, notify
        self._keeps_spare = keeps_spare
        self._numbers = count(config.engine.num_ranks)
        self._spare: asyncio.Task[ActorHandle] | None = None

    def prepare(self, spec: RoleSpec) -> None:
        """Have a spare ready, or on its way.

        Args:
            spec: of the trainer's first rank.
        """
        if self._keeps_spare and self._spare is None:
            self._spare = asyncio.create_task(self._start(spec, RoleName("trainer", next(self._numbers))))

    async def close(self) -> None:
        """Forget the spare; the launcher ends its process."""
        if self._spare is not None:
            self._spare.cancel()
            await asyncio.gather(self._spare, return_exceptions=True)

    async def heal(self, trainer: Trainers, spec: RoleSpec) -> bool:
        """Replace the ranks that have died; say what was done, and how long it took.

        Args:
            trainer: of which one has died.
            spec: of its first rank.

        Returns:
            Whether all ranks are there again, with the state after the last update that all have had. Otherwise it
            was said why not, and only a restart helps.

        Raises:
            PeerFailedError: the trainer was started again too often.
        """
        began_s, death = time.monotonic(), trainer.first_death()
        assert death is not None
        self._budget.spend("trainer", f"{death.peer} failed: {death.reason}", began_s)
        self._notify(f"trainer: {death.peer} failed: {death.reason}; it is replaced, the other ranks stay")
        try:
            async with asyncio.timeout(self._config.cluster.start_timeout_s):
                replaced = await self._replace(trainer, spec)
        except (OffbeatError, TimeoutError) as error:
            why = str(error) or f"it took more than {self._config.cluster.start_timeout_s:g} s"
            self._notify(f"trainer: no rank could be replaced, so all are started from the last checkpoint: {why}")
            return False
        self._notify(f"trainer: {' and '.join(replaced)} replaced after {time.monotonic() - began_s:.1f} s")
        self.prepare(spec)
        return True

    async def _replace(self, trainer: Trainers, spec: RoleSpec) -> list[str]:
        await _interrupt(trainer)
        dead, size = trainer.dead, len(trainer.actors)
        for place in dead:
            if (place + 1) % size in dead:
                holder = trainer.actors[(place + 1) % size].name
                raise OffbeatError(f"{trainer.actors[place].name} has died together with {holder}, which held its copy")
        fresh = await gather_or_cancel([self._newcomer(spec, trainer.actors[place].role) for place in dead])
        newcomers = dict(zip(dead, fresh, strict=True))
        ranks = [newcomers.get(place, actor) for place, actor in enumerate(trainer.actors)]
        paths = [new_socket_path() if path and i in dead else path for i, path in enumerate(trainer.socket_paths)]
        deadline_s = self._config.cluster.start_timeout_s
        try:
            store, places = open_places(self._launcher, self._config)
            await gather_or_cancel(
                rank.call("rejoin", place, paths, deadline_s=deadline_s)
                for rank, place in zip(ranks, places, strict=True)
            )
        except BaseException:
            for newcomer in fresh:  # the others are ended with the trainer
                newcomer.kill()
            raise
        named = [f"{trainer.actors[place].name} (by {newcomers[place].name})" for place in dead]
        trainer.replace(newcomers, paths, store)
        return named

    async def _newcomer(self, spec: RoleSpec, role: RoleName) -> ActorHandle:
        """Return the spare, or a process that is started for a rank now."""
        spare, self._spare = self._spare, None
        if spare is not None:
            with contextlib.suppress(OffbeatError):
                actor = await spare
                if actor.alive:
                    return actor
        return await self._start(spec, role)

    async def _start(self, spec: RoleSpec, role: RoleName) -> ActorHandle:
        log_path = spec.log_path and spec.log_path.with_name(f"{role}.log")
        return await self._launcher.start(
            replace(spec, role=role, log_path=log_path, kwargs={**spec.kwargs, "is_spare": True})
        )


async def _interrupt(trainer: Trainers) -> None:
    """Have the ranks that are left break off what they wait for; one that cannot has died too."""
    alive = [actor for actor in trainer.actors if actor.alive]
    calls = (actor.call("interrupt", deadline_s=_INTERRUPT_S) for actor in alive)
    await asyncio.gather(*calls, return_exceptions=True)
