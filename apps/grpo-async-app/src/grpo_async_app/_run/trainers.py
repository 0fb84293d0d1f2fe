"""The trainer's ranks, called and watched as one."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from grpo_async_app._roles.rendezvous import Rendezvous
from offbeat_actors import ActorGroup, ActorHandle, Launcher, RoleSpec, start_all
from offbeat_types import OffbeatError, PeerFailedError, WeightSyncError


class Trainers(ActorGroup):
    """One trainer, or several ranks of it: every call goes to all of them, and rank 0 answers.

    Args:
        ranks: in order.
        silent_after_s: see `ActorGroup`.
        store: where they met, kept open for them.
    """

    def __init__(self, ranks: Sequence[ActorHandle], silent_after_s: float, store: object = None) -> None:
        super().__init__(ranks, silent_after_s)
        self._store, self._listens_at = store, ""

    async def listen(self, deadline_s: float) -> str:
        """Where rank 0 gives weights to other machines, with the secret that opens it; it listens once asked to."""
        if not self._listens_at:
            self._listens_at = await self.call("listen", self.address, returns=str, deadline_s=deadline_s)
        return self._listens_at


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
        Rendezvous(
            rank=rank,
            size=num_ranks,
            host=host,
            port=store.port,
            start_deadline_s=start_deadline_s,
            call_deadline_s=call_deadline_s,
        )
        for rank in range(num_ranks)
    ]
    return Trainers(await start_all(launcher, [_rank_spec(spec, place) for place in places]), silent_after_s, store)


def _rank_spec(spec: RoleSpec, place: Rendezvous) -> RoleSpec:
    name = f"trainer-{place.rank}"
    return replace(
        spec,
        name=name,
        kwargs={**spec.kwargs, "rendezvous": place},
        liveness_policy="abort",
        log_path=spec.log_path and spec.log_path.with_name(f"{name}.log"),
    )


DEATH_SEEN_AFTER_S: Final = 2.0
"""A call that fails and the death that made it fail are seen one after the other; how long to wait for the second."""


@dataclass(frozen=True, kw_only=True)
class WeightOffer:
    """The trainer's weights, to be fetched by one engine after the other.

    Args:
        version: policy version.
        source_for: where an engine on the machine of this IP address fetches them.
        send: makes the trainer give them to the one engine that asks at this source.
        withdraw: tells the trainer that the engine of the last `send` does not come any more.
    """

    version: int
    source_for: Callable[[str], Awaitable[str]]
    send: Callable[[str], Awaitable[object]]
    withdraw: Callable[[], Awaitable[object]]


async def transfer_weights(
    take: Coroutine[Any, Any, object], send: Awaitable[object], withdraw: Callable[[], Awaitable[object]]
) -> None:
    """Await both sides of a transfer. When it fails, the engine's own error says more than what the trainer saw.

    Args:
        take: the engine's side.
        send: the trainer's. It sends in its only thread, which no cancellation reaches: one that waits for an engine
            that is gone would stand in the way of the next.
        withdraw: ends `send` while it waits for the engine.
    """
    sides = [asyncio.ensure_future(take), asyncio.ensure_future(send)]
    try:
        _, others = await asyncio.wait(sides, return_when=asyncio.FIRST_EXCEPTION)
        if others:
            await asyncio.wait(others, timeout=DEATH_SEEN_AFTER_S)
        if not sides[1].done():
            with contextlib.suppress(OffbeatError):  # a trainer that is gone sends nothing either
                await withdraw()
            await asyncio.wait({sides[1]})  # it has a deadline of its own
    finally:
        for side in sides:
            side.cancel()
        await asyncio.gather(*sides, return_exceptions=True)
    for side in sides:
        if not side.cancelled():
            side.result()


async def is_lost(handle: ActorHandle, error: PeerFailedError | WeightSyncError) -> bool:
    """Whether the engine failed in such a way that only a new process mends it."""
    if isinstance(error, PeerFailedError) and error.peer == handle.name:
        return True
    gone = asyncio.ensure_future(handle.wait_dead())
    await asyncio.wait({gone}, timeout=DEATH_SEEN_AFTER_S)
    gone.cancel()
    return not handle.alive
