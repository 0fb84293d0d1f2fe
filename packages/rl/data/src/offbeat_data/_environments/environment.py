"""The interface of an environment: it answers the model's turns, and scores them in the end.

Environments are other people's work. A host lets none of them take the others, or the process, with it: a deadline
holds for work that waits, and for work that never lets go of the thread. `asyncio.timeout` ends what waits. What blocks
(a loop without an end, a socket without a deadline, `time.sleep`) stops the event loop and every deadline in it; here a
timer signal breaks into it, and the time it took is given back to all that waited meanwhile. That works in the
main thread only, where Python runs signal handlers; elsewhere only waiting is bounded. Code that neither waits nor lets
Python look at signals cannot be ended but with its process.
"""

import asyncio
import contextlib
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from offbeat_core import OffbeatError
from offbeat_data._chat.template import Message
from offbeat_data._datasets.prompts import Prompt
from offbeat_data._scoring.rewards import RewardScore
from offbeat_data._sources.rows import to_plain


class Environment(Protocol):
    """One episode, from a prompt to a reward. Its methods are awaited one at a time: reset, step …, reward, close.

    One that raises, or does not return in time, ends its own episode. `close` is called in every case.
    """

    async def reset(self, prompt: Prompt) -> None:
        """Get ready: the model is about to read this prompt."""

    async def step(self, text: str) -> Sequence[Message] | None:
        """Take what the model said in its turn; also in its last one, which was cut off or had no more turns after it.

        Args:
            text: without control tokens.

        Returns:
            What it is sent, as chat messages such as {"role": "tool", "content": "42"}; None when the episode is over.
        """

    async def reward(self) -> RewardScore | None:
        """Return the score of the episode; None leaves its last turn to the `reward` section."""

    async def close(self) -> None:
        """Free what the episode holds."""


EnvironmentFactory = Callable[[], Environment]
"""Makes the environment of one episode."""


class EnvironmentFailedError(OffbeatError):
    """An environment broke: its episode has no reward and is not trained on.

    Args:
        reason: to be counted: `raised`, `timed_out`, `not_finite` (its reward), or `lost` with the process it ran in.
        detail: what went wrong.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"the environment of an episode failed ({self.reason}): {self.detail}"


_log = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSE_TIMEOUT_S: Final = 5.0
_LONGEST_DETAIL: Final = 500


class EpisodeHost:
    """Environments by the number of their episode. Methods other than `close` raise EnvironmentFailedError only.

    Args:
        make: makes the environment of one episode.
        step_timeout_s: for each call of an environment.
    """

    def __init__(self, make: EnvironmentFactory, step_timeout_s: float) -> None:
        self._make, self._step_timeout_s = make, step_timeout_s
        self._episodes: dict[int, Environment] = {}

    async def reset(self, episode: int, prompt: Prompt) -> None:
        """Begin an episode.

        Raises:
            EnvironmentFailedError: its environment raised, or took too long; it is closed.
        """

        async def begin() -> None:
            environment = self._episodes[episode] = self._make()
            await environment.reset(prompt)

        await self._call(episode, begin())

    async def step(self, episode: int, text: str) -> list[dict[str, Any]] | None:
        """Give an episode what the model said, as `Environment.step`. Raises as `reset`."""

        async def answer() -> list[dict[str, Any]] | None:
            messages = await self._find(episode).step(text)
            return None if messages is None else [_plain(message) for message in messages]

        return await self._call(episode, answer())

    async def reward(self, episode: int) -> RewardScore | None:
        """Return the score of an episode, as `Environment.reward`. Raises as `reset`."""

        async def judge() -> RewardScore | None:
            score = await self._find(episode).reward()
            if score is not None and not math.isfinite(score.value):
                raise EnvironmentFailedError("not_finite", f"a reward must be a finite number, got {score.value}")
            return score

        return await self._call(episode, judge())

    async def close(self, episode: int) -> None:
        """End an episode. Nothing is raised: it is over, and its score is known."""
        environment = self._episodes.pop(episode, None)
        if environment is not None:
            try:
                await within(environment.close(), _CLOSE_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001  whatever it is, the episode is over
                _log.warning("the environment of episode %d did not close well: %r", episode, error)

    def _find(self, episode: int) -> Environment:
        environment = self._episodes.get(episode)
        if environment is None:
            raise EnvironmentFailedError("lost", f"there is no episode {episode}; it began in another process")
        return environment

    async def _call(self, episode: int, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await within(work, self._step_timeout_s)
        except Exception as error:
            await self.close(episode)
            raise _failure(error, self._step_timeout_s) from error


def _failure(error: Exception, step_timeout_s: float) -> EnvironmentFailedError:
    if isinstance(error, EnvironmentFailedError):
        return error
    if isinstance(error, TimeoutError):
        advice = f"no answer within environment.step_timeout_s = {step_timeout_s:g}"
        return EnvironmentFailedError("timed_out", str(error) or advice)
    return EnvironmentFailedError("raised", f"{type(error).__name__}: {error}"[:_LONGEST_DETAIL])


def _plain(message: Message) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise TypeError(f"an answer must be chat messages with role and content, got {message!r:.80}")
    plain: dict[str, Any] = to_plain(dict(message))
    return plain


_AGAIN_S: Final = 1.0
"""The timer strikes again after so long, should the work have caught what the first stroke raised."""
_NOTICED_S: Final = 0.01
"""Stretches shorter than this delay no other episode."""
_allowed_s: ContextVar[float] = ContextVar("offbeat_step_deadline_s", default=0.0)
_waiting: WeakKeyDictionary[asyncio.AbstractEventLoop, set[asyncio.Timeout]] = WeakKeyDictionary()


class StepBlockedError(BaseException):
    """Raised inside work that blocks the thread for too long. No Exception, like KeyboardInterrupt: it must get out."""


async def within(work: Coroutine[Any, Any, T], deadline_s: float) -> T:
    """Await work for at most `deadline_s`, not counting time in which other work held the thread; else TimeoutError."""
    _allowed_s.set(deadline_s)
    scopes = _waiting.setdefault(asyncio.get_running_loop(), set())
    try:
        async with asyncio.timeout(deadline_s) as scope:
            scopes.add(scope)
            try:
                return await _Interruptible(work, deadline_s, scope)
            finally:
                scopes.discard(scope)
    except StepBlockedError:
        raise TimeoutError(f"it blocked the thread for {deadline_s:g} s") from None


async def interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Await work in a task made inside `within`, whose deadline holds for each stretch of it that blocks."""
    try:
        return await _Interruptible(work, _allowed_s.get())
    except StepBlockedError:
        raise TimeoutError(f"it blocked the thread for {_allowed_s.get():g} s") from None


class _Interruptible(Generic[T]):
    """Runs a coroutine stretch by stretch, from one wait to the next, each under the timer."""

    def __init__(self, work: Coroutine[Any, Any, T], deadline_s: float, own: asyncio.Timeout | None = None) -> None:
        self._work, self._deadline_s, self._own = work, deadline_s, own

    def __await__(self) -> Generator[Any, Any, T]:
        error: BaseException | None = None
        try:
            while True:
                try:
                    with _timer(self._deadline_s, self._own):
                        waited = self._work.send(None) if error is None else self._work.throw(error)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
                error = None
                try:
                    yield waited
                except BaseException as thrown:  # noqa: BLE001  as `await` does: what is thrown here is for the work
                    error = thrown
        finally:
            self._work.close()


@contextlib.contextmanager
def _timer(deadline_s: float, own: asyncio.Timeout | None) -> Iterator[None]:
    """Break into the body after `deadline_s`, and put back whatever timer and handler there were."""
    if deadline_s <= 0 or threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False

    def strike(number: int, frame: object) -> None:
        if not is_over:  # a stroke may be on its way when the timer is cancelled
            raise StepBlockedError

    handler = signal.signal(signal.SIGALRM, strike)
    begun_s = time.monotonic()
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, deadline_s, _AGAIN_S)
    try:
        yield
    finally:
        is_over = True
        taken_s = time.monotonic() - begun_s
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(left_s - taken_s, 0.001), interval_s)
        if taken_s > _NOTICED_S:
            _give_back(taken_s, own)


def _give_back(taken_s: float, own: asyncio.Timeout | None) -> None:
    """Move the deadlines of all that waited while the thread was held, but not of the work that held it."""
    for scope in _waiting.get(asyncio.get_running_loop(), set()) - {own}:
        with contextlib.suppress(RuntimeError):  # one that has struck already
            scope.reschedule((scope.when() or 0.0) + taken_s)
