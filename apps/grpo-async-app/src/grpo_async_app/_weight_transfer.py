"""Weights from the trainer to one rollout engine, and whose fault it is when they do not arrive."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from offbeat_actors import ActorHandle
from offbeat_types import OffbeatError, PeerFailedError, WeightSyncError

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
