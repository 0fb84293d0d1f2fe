"""The trainer's ranks, called and watched as one."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from grpo_async_app._gathering import all_or_first_error
from grpo_async_app._handover import DEATH_SEEN_AFTER_S
from grpo_async_app._roles.team import TeamPlace
from grpo_async_app._watching import wait_gone
from offbeat_actors import ActorHandle, Launcher, RoleSpec
from offbeat_types import PeerFailedError


class Trainers:
    """One trainer, or several ranks of it: every call goes to all of them, and rank 0 answers.

    Args:
        ranks: in order.
        silent_after_s: one that answers nothing for so long is killed.
        store: where they met, kept open for them.
    """

    def __init__(self, ranks: Sequence[ActorHandle], silent_after_s: float, store: object = None) -> None:
        self._ranks, self._store, self._listens_at = ranks, store, ""
        self._ends = {
            rank.name: asyncio.create_task(wait_gone(rank, partial(rank.call, "beat"), silent_after_s))
            for rank in ranks
        }

    @property
    def address(self) -> str:
        """IP address of the machine of rank 0."""
        return self._ranks[0].address

    async def listen(self, deadline_s: float) -> str:
        """Where rank 0 gives weights to other machines, with the secret that opens it; it listens once asked to."""
        if not self._listens_at:
            self._listens_at = await self.call("listen", self.address, returns=str, deadline_s=deadline_s)
        return self._listens_at

    async def call(self, method: str, *args: Any, returns: Any = None, deadline_s: float) -> Any:
        """Call a method of all ranks: see `ActorHandle.call`. The first error of any of them is raised."""
        try:
            answers = await all_or_first_error(
                [rank.call(method, *args, returns=returns, deadline_s=deadline_s) for rank in self._ranks]
            )
        except PeerFailedError as error:
            raise await self.death(error.log_tail) or error from error
        return answers[0]

    async def death(self, log_tail: str = "") -> PeerFailedError | None:
        """The first death of a rank, when there was one: the ranks may see it before the driver does.

        Args:
            log_tail: what is known of its last words.
        """
        await asyncio.wait(self._ends.values(), timeout=DEATH_SEEN_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
        for name, end in self._ends.items():
            if end.done():
                return PeerFailedError(name, end.result(), log_tail)
        return None

    def raise_if_dead(self) -> None:
        """Raise when a rank is gone.

        Raises:
            PeerFailedError: with the rank's name.
        """
        for name, end in self._ends.items():
            if end.done():
                raise PeerFailedError(name, end.result())

    async def destroy(self) -> None:
        """Kill every rank, and wait until none is left."""
        for rank in self._ranks:
            if rank.alive:
                rank.kill()
        await asyncio.gather(*self._ends.values())

    async def forget(self) -> None:
        """Watch over them no longer."""
        for end in self._ends.values():
            end.cancel()
        await asyncio.gather(*self._ends.values(), return_exceptions=True)


async def start_trainers(
    launcher: Launcher,
    spec: RoleSpec,
    num_ranks: int,
    *,
    start_deadline_s: float,
    call_deadline_s: float,
    silent_after_s: float,
) -> Trainers:
    """Start every rank of the trainer at once, and wait until all are ready. When one fails, none is left.

    Args:
        launcher: starts the roles; they have been placed.
        spec: of rank 0; the others differ by their number.
        num_ranks: how many.
        start_deadline_s: for the ranks to find each other.
        call_deadline_s: for each call among them.
        silent_after_s: a rank that answers nothing for so long is killed.
    """
    if num_ranks == 1:
        return Trainers([await launcher.start(spec)], silent_after_s)
    from offbeat_mesh import open_store  # imports torch: only several ranks need it

    # The driver keeps the place where the ranks meet, so it outlives any of them.
    host = launcher.address
    store = open_store(host, deadline_s=start_deadline_s)
    places = [
        TeamPlace(
            rank=rank,
            size=num_ranks,
            host=host,
            port=store.port,
            start_deadline_s=start_deadline_s,
            call_deadline_s=call_deadline_s,
        )
        for rank in range(num_ranks)
    ]
    return Trainers(await _start_all(launcher, [_rank_spec(spec, place) for place in places]), silent_after_s, store)


async def _start_all(launcher: Launcher, specs: Sequence[RoleSpec]) -> list[ActorHandle]:
    """Start all or none: their names must be free again for the next attempt."""
    started: list[ActorHandle] = []

    async def start(spec: RoleSpec) -> ActorHandle:
        handle = await launcher.start(spec)
        started.append(handle)
        return handle

    try:
        return await all_or_first_error([start(spec) for spec in specs])
    except BaseException:
        for handle in started:
            handle.kill()
        await asyncio.gather(*(handle.wait_dead() for handle in started))
        raise


def _rank_spec(spec: RoleSpec, place: TeamPlace) -> RoleSpec:
    name = f"trainer-{place.rank}"
    return replace(
        spec,
        name=name,
        kwargs={**spec.kwargs, "team": place},
        liveness_policy="abort",
        log_path=spec.log_path and spec.log_path.with_name(f"{name}.log"),
    )
