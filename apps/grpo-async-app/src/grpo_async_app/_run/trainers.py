"""The trainer's ranks, called and watched as one."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

from offbeat_actors import ActorGroup, ActorHandle, Launcher, RoleSpec, start_ranks
from offbeat_types import OffbeatError, PeerFailedError, WeightProof, WeightSyncError


class Trainers(ActorGroup):
    """One trainer, or several ranks of it: every call goes to all of them, and rank 0 answers.

    Args:
        ranks: in order.
        silent_after_s: see `ActorGroup`.
        socket_path: where engines on the machine of rank 0 fetch weights.
        store: where they met, kept open for them.

    Attributes:
        transfer_ids: numbers that grow, one for each transfer of weights.
    """

    def __init__(
        self, ranks: Sequence[ActorHandle], silent_after_s: float, socket_path: str, store: object = None
    ) -> None:
        super().__init__(ranks, silent_after_s)
        self.socket_path, self._store, self._listens_at = socket_path, store, ""
        self.transfer_ids = itertools.count(1)

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
    """Start every rank of the trainer at once, and wait until all are ready. When one fails, none is left."""
    store: object = None
    places: list[Any] = []
    if num_ranks > 1:
        from offbeat_mesh import open_rendezvous  # imports torch: only several ranks need it

        # The driver keeps the place where the ranks meet, so it outlives any of them.
        store, places = open_rendezvous(
            launcher.address, num_ranks, start_deadline_s=start_deadline_s, call_deadline_s=call_deadline_s
        )
    return Trainers(await start_ranks(launcher, spec, places), silent_after_s, spec.kwargs["socket_path"], store)


DEATH_SEEN_AFTER_S: Final = 2.0
"""A call that fails and the death that made it fail are seen one after the other; how long to wait for the second."""


class WeightOffer:
    """The trainer's weights, to be fetched by one engine after the other: through memory where that can be.

    Args:
        trainer: that holds them.
        version: policy version.
        deadline_s: for one engine to come, load and prove.
    """

    def __init__(self, trainer: Trainers, version: int, deadline_s: float) -> None:
        self._trainer, self.version, self._deadline_s, self._transfer_id = trainer, version, deadline_s, 0

    async def source_for(self, host: str) -> str:
        """Where an engine on the machine of this IP address fetches them."""
        trainer = self._trainer
        return trainer.socket_path if host == trainer.address else await trainer.listen(self._deadline_s)

    async def send(self, source: str) -> None:
        """Make the trainer give them to the one engine that asks at this source."""
        self._transfer_id = next(self._trainer.transfer_ids)
        address = "" if source == self._trainer.socket_path else source
        args, deadline_s = (self.version, self._deadline_s, address, self._transfer_id), self._deadline_s + 5
        await self._trainer.call("send_weights", *args, returns=list[WeightProof], deadline_s=deadline_s)

    async def withdraw(self) -> None:
        """Tell the trainer that the engine of the last `send` does not come any more."""
        await self._trainer.call("withdraw", self._transfer_id, deadline_s=self._deadline_s)


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
