"""Tools for keeping actors alive: a question whether one is, the end of a silent one, and a budget of restarts.

A process that is stopped, or stuck where not even its event loop turns, is as good as dead; but nothing says so. So
each actor is asked something it can answer at once whatever it computes. One that stays silent, answers with errors
alone, or answers that its work does not advance is killed: all of it becomes a death, which is handled in one place.
"""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

from offbeat_actors._actor import ActorHandle
from offbeat_core import DeadlineError, OffbeatError, PeerFailedError

T = TypeVar("T")

_log: Final = logging.getLogger(__name__)

QUESTIONS_PER_DEADLINE: Final = 4
"""A silence is found at most a quarter of its deadline late."""

Notify = Callable[[str], None]
"""Takes one line about what has happened to an actor, for the user."""


class StuckError(OffbeatError):
    """An actor that answers, and whose work has not advanced for too long: only a new process mends that."""


class Ask(Protocol):
    """Asks an actor something, and waits so many seconds for its answer; raises StuckError for one to be replaced."""

    def __call__(self, *, deadline_s: float) -> Awaitable[object]: ...


async def wait_gone(actor: ActorHandle, ask: Ask, silent_after_s: float) -> str:
    """Wait until an actor is gone, and say how it ended.

    Args:
        actor: started.
        ask: asks it.
        silent_after_s: one that answers nothing for so long is killed, and one that `ask` finds stuck at once.
    """
    gone = asyncio.ensure_future(actor.wait_dead())
    failing_since_s: float | None = None
    try:
        while not gone.done():
            cause = ""
            try:
                await ask(deadline_s=silent_after_s)
                failing_since_s = None  # it has answered: errors of before do not count any more
            except DeadlineError:
                cause = "it answered nothing"
            except StuckError as error:
                cause = str(error)
            except PeerFailedError as error:  # its end, or it cannot do so much as answer: it may be without memory
                failing_since_s = failing_since_s or time.monotonic()
                if time.monotonic() - failing_since_s >= silent_after_s:
                    cause = f"it answered with errors alone ({error.reason})"
            # One that has ended meanwhile is described by its own end, which says more.
            if cause and not gone.done():
                actor.kill()
                await gone
                return f"{cause} for {silent_after_s:g} s (cluster.silent_after_s) and was killed"
            await asyncio.wait({gone}, timeout=silent_after_s / QUESTIONS_PER_DEADLINE)
        return gone.result()
    finally:
        gone.cancel()  # ends this wait alone: `wait_dead` shields what watches the process


class RestartBudget:
    """Budget of restarts of an actor: enough for accidents, too few for a crash loop.

    Args:
        max_restarts: of one actor within the window.
        window_s: its length; what was longer ago is forgotten.

    Attributes:
        spent: restarts of each actor since the start.
    """

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts, self._window_s = max_restarts, window_s
        self._at_s: defaultdict[str, deque[float]] = defaultdict(deque)
        self.spent: defaultdict[str, int] = defaultdict(int)

    def spend(self, name: str, cause: str, now_s: float) -> None:
        """Take one restart.

        Args:
            name: such as "rollout-0".
            cause: how it ended, as text.
            now_s: of any clock that never goes back.

        Raises:
            PeerFailedError: there is none left; with the cause.
        """
        recent = self._at_s[name]
        while recent and recent[0] <= now_s - self._window_s:
            recent.popleft()
        if len(recent) >= self._max_restarts:
            raise PeerFailedError(
                name,
                f"{cause}; it was started again {len(recent)} times within {self._window_s:g} s, and "
                f"cluster.max_restarts = {self._max_restarts} allows no more",
            )
        recent.append(now_s)
        self.spent[name] += 1


async def start_again(
    budget: RestartBudget, name: str, cause: str, start: Callable[[], Awaitable[T]], notify: Notify
) -> T:
    """Start what has ended, and once more when the new one ends before it is ready, while the budget lasts.

    Args:
        budget: takes each attempt.
        name: such as "rollout-0".
        cause: how it ended, as text.
        start: starts it.
        notify: takes a line for each attempt.

    Raises:
        PeerFailedError: the budget is spent; with the last cause.
        OffbeatError: it cannot be started, and another attempt would not help.
    """
    while True:
        budget.spend(name, cause, time.monotonic())
        notify(f"{name}: {cause}; it is started again")
        try:
            return await start()
        except (PeerFailedError, DeadlineError) as error:  # by chance; any other error of offbeat would come again
            cause = error.reason if isinstance(error, PeerFailedError) else str(error)
            _log.warning("%s", error)  # the end of its log too
