"""The trainer's ranks, called as one."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from grpo_async_app._gathering import all_or_first_error
from grpo_async_app._roles.team import TeamPlace
from offbeat_cluster import ActorHandle, Launcher, RoleSpec
from offbeat_types import PeerFailedError

HOST = "127.0.0.1"

DEATH_SEEN_AFTER_S = 2.0
"""A call that fails and the death that made it fail are seen one after the other; how long to wait for the second."""


class Trainers:
    """One trainer, or several ranks of it: every call goes to all of them, and rank 0 answers.

    Args:
        ranks: in order.
        store: where they met, kept open for them.
    """

    def __init__(self, ranks: Sequence[ActorHandle], store: object = None) -> None:
        self._ranks, self._store = ranks, store

    async def call(self, method: str, *args: Any, returns: Any = None, deadline_s: float) -> Any:
        """Call a method of all ranks: see `ActorHandle.call`. The first error of any of them is raised."""
        try:
            answers = await all_or_first_error(
                [rank.call(method, *args, returns=returns, deadline_s=deadline_s) for rank in self._ranks]
            )
        except PeerFailedError as error:
            raise await self._cause_of(error) from error
        return answers[0]

    async def _cause_of(self, error: PeerFailedError) -> PeerFailedError:
        """The death of a rank, when that is why another one failed: the ranks may see it before the driver does."""
        deaths = {asyncio.ensure_future(rank.wait_dead()): rank for rank in self._ranks}
        ended, others = await asyncio.wait(deaths, timeout=DEATH_SEEN_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        for death in ended:
            return PeerFailedError(deaths[death].name, death.result(), error.log_tail)
        return error

    def raise_if_dead(self) -> None:
        """Raise when a rank is gone.

        Raises:
            PeerFailedError: with the rank's name.
        """
        for rank in self._ranks:
            if not rank.alive:
                raise PeerFailedError(rank.name, "its process is gone; resume the run from its last checkpoint")


async def start_trainers(
    launcher: Launcher, spec: RoleSpec, num_ranks: int, *, start_deadline_s: float, call_deadline_s: float
) -> Trainers:
    """Start every rank of the trainer at once, and wait until all are ready.

    Args:
        launcher: starts the roles.
        spec: of rank 0; the others differ by their number.
        num_ranks: how many.
        start_deadline_s: for the ranks to find each other.
        call_deadline_s: for each call among them.
    """
    if num_ranks == 1:
        return Trainers([await launcher.start(spec)])
    from torch._C._distributed_c10d import TCPStore  # imported late: only several ranks need it

    # The driver keeps the place where the ranks meet, so it outlives any of them.
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=start_deadline_s))
    places = [
        TeamPlace(
            rank=rank,
            size=num_ranks,
            host=HOST,
            port=store.port,
            start_deadline_s=start_deadline_s,
            call_deadline_s=call_deadline_s,
        )
        for rank in range(num_ranks)
    ]
    ranks = await all_or_first_error([launcher.start(_rank_spec(spec, place)) for place in places])
    return Trainers(ranks, store)


def _rank_spec(spec: RoleSpec, place: TeamPlace) -> RoleSpec:
    name = f"trainer-{place.rank}"
    return replace(
        spec,
        name=name,
        kwargs={**spec.kwargs, "team": place},
        log_path=spec.log_path and spec.log_path.with_name(f"{name}.log"),
    )
