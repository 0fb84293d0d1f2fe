"""How often a role may be started again: enough for accidents, too seldom for a crash loop."""

import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from offbeat_run import clock_s
from offbeat_types import DeadlineError, PeerFailedError

T = TypeVar("T")

_log: Final = logging.getLogger(__name__)

Tell = Callable[[str], None]
"""Takes one line about what has happened to a role, for whoever looks at the run."""


class RestartBudget:
    """Counts the restarts of each role within a stretch of time. Pure: it is told what time it is.

    Args:
        max_restarts: of one role within the window.
        window_s: its length; what was longer ago is forgotten.

    Attributes:
        spent: restarts of each role since the start.
    """

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts, self._window_s = max_restarts, window_s
        self._at_s: defaultdict[str, deque[float]] = defaultdict(deque)
        self.spent: defaultdict[str, int] = defaultdict(int)

    def spend(self, role: str, cause: str, now_s: float) -> None:
        """Take one restart.

        Args:
            role: such as "rollout-0".
            cause: how it ended, in words.
            now_s: of any clock that never goes back.

        Raises:
            PeerFailedError: there is none left; with the cause.
        """
        recent = self._at_s[role]
        while recent and recent[0] <= now_s - self._window_s:
            recent.popleft()
        if len(recent) >= self._max_restarts:
            raise PeerFailedError(
                role,
                f"{cause}; it was started again {len(recent)} times within {self._window_s:g} s, and "
                f"cluster.max_restarts = {self._max_restarts} allows no more",
            )
        recent.append(now_s)
        self.spent[role] += 1


async def start_again(budget: RestartBudget, role: str, cause: str, start: Callable[[], Awaitable[T]], tell: Tell) -> T:
    """Start a role that has ended, and once more when the new one ends before it is ready, while the budget lasts.

    Args:
        budget: takes each attempt.
        role: such as "rollout-0".
        cause: how it ended, in words.
        start: starts it.
        tell: takes a line for each attempt.

    Raises:
        PeerFailedError: the budget is spent; with the last cause.
        OffbeatError: it cannot be started, and another attempt would not help.
    """
    while True:
        budget.spend(role, cause, clock_s())
        tell(f"{role}: {cause}; it is started again")
        try:
            return await start()
        except (PeerFailedError, DeadlineError) as error:
            cause = error.reason if isinstance(error, PeerFailedError) else str(error)
            _log.warning("%s", error)  # the end of its log too
