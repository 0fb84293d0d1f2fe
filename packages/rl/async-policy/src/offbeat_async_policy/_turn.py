"""The trainer's turn: what uses the trainer does so one after the other."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


class TrainerTurn:
    """Gives the trainer to one piece of work at a time.

    Two locks, because a validation that an action waits for may itself need weights of the trainer:

        action of the loop     waits for its turn -> is prepared -> has the trainer
        work between actions                                        has the trainer
    """

    def __init__(self) -> None:
        self._order, self._trainer = asyncio.Lock(), asyncio.Lock()

    @property
    def is_taken(self) -> bool:
        """Tell whether an action has its turn, be it only prepared."""
        return self._order.locked()

    @asynccontextmanager
    async def of_action(self, prepare: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Wait for the turn, first come, first served; then `prepare`, without holding the trainer."""
        async with self._order:
            await prepare()
            async with self._trainer:
                yield

    @asynccontextmanager
    async def between_actions(self) -> AsyncIterator[None]:
        """Take the trainer as soon as no action has it, such as for the weights of an engine that came late."""
        async with self._trainer:
            yield
