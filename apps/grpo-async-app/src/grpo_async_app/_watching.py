"""Waits for the end of a role, and makes an end of one that has stopped answering.

A process that is stopped, or stuck where not even its event loop turns, is as good as dead; but nothing says so. So
each role is asked something it can answer at once whatever it computes, and one that stays silent, or has nothing but
errors to answer, is killed: silence turns into death, and death is dealt with in one place.
"""

import asyncio
import time
from collections.abc import Awaitable
from typing import Final, Protocol

from offbeat_actors import ActorHandle
from offbeat_types import DeadlineError, PeerFailedError

QUESTIONS_PER_DEADLINE: Final = 4
"""A silence is thus found at most a quarter of its deadline late."""


class Ask(Protocol):
    """Asks the role something, and waits so many seconds for its answer."""

    def __call__(self, *, deadline_s: float) -> Awaitable[object]: ...


async def wait_gone(handle: ActorHandle, ask: Ask, silent_after_s: float) -> str:
    """Wait until a role is gone, and say how it ended.

    Args:
        handle: of the role.
        ask: asks it.
        silent_after_s: a role that answers nothing for so long is killed.
    """
    gone = asyncio.ensure_future(handle.wait_dead())
    failing_since_s: float | None = None
    try:
        while not gone.done():
            cause = ""
            try:
                await ask(deadline_s=silent_after_s)
                failing_since_s = None
            except DeadlineError:
                cause = "it answered nothing"
            except PeerFailedError as error:  # its end, or it cannot do so much as answer: it may be without memory
                failing_since_s = failing_since_s or time.monotonic()
                if time.monotonic() - failing_since_s >= silent_after_s:
                    cause = f"it answered with errors alone ({error.reason})"
            if cause and not gone.done():
                handle.kill()
                await gone
                return f"{cause} for {silent_after_s:g} s (cluster.silent_after_s) and was killed"
            await asyncio.wait({gone}, timeout=silent_after_s / QUESTIONS_PER_DEADLINE)
        return gone.result()
    finally:
        gone.cancel()
