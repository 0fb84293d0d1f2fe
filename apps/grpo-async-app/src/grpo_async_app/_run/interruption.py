"""A run that is asked to end, as by a signal: what is in progress is finished and saved first, if there is time."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from offbeat_actors import Notify
from offbeat_run import EndRequests, ending_signals

T = TypeVar("T")


class Interruption:
    """Reaction to the first signal, or to a loss: a good end where something is unfinished, else an end at once.

    Args:
        within_s: the end may take so long; 0 ends at once.
        notify: takes a line about what is finished.

    Attributes:
        asked: set where something is finished.
    """

    def __init__(self, within_s: float = 0.0, notify: Notify = lambda _: None) -> None:
        self._within_s, self._notify = within_s, notify
        self._unfinished: Callable[[], str] = lambda: ""
        self._giving_up: asyncio.TimerHandle | None = None
        self.asked = asyncio.Event()

    @contextmanager
    def finishing(self, unfinished: Callable[[], str]) -> Iterator[None]:
        """Let the block look at `asked`, and finish what `unfinished` names; an empty text names nothing."""
        self._unfinished = unfinished
        try:
            yield
        finally:
            self._unfinished = lambda: ""
            if self._giving_up is not None:
                self._giving_up.cancel()

    def ask(self, by: str, cut_off: Callable[[], object]) -> bool:
        """Ask for a good end, which is cut off when it takes too long; return whether there is something to finish.

        Args:
            by: the cause: the name of a signal, or a text that says what has happened.
            cut_off: ends the work at once.
        """
        unfinished = self._unfinished() if self._within_s else ""
        if not unfinished or self.asked.is_set():
            return False

        def give_up() -> None:
            self._notify(f"{self._within_s:g} s (checkpoint.on_signal_s) are over: not saved, it is trained again")
            cut_off()

        again = {"SIGINT": "Ctrl-C again"}.get(by, "a second signal" if by in signal.Signals.__members__ else "Ctrl-C")
        self._notify(f"{by}: {unfinished}, for at most {self._within_s:g} s; {again} to stop at once")
        self.asked.set()
        self._giving_up = asyncio.get_running_loop().call_later(self._within_s, give_up)
        return True


def run_interruptible(
    work: Coroutine[Any, Any, T], kill: Callable[[], None], interruption: Interruption | None = None
) -> T:
    """Run asynchronous work to its end, or until a signal ends it: then KeyboardInterrupt is raised.

    The first signal asks `interruption` for a good end, or cancels the work where there is nothing to finish; what it
    puts away then should take seconds. The second signal calls `kill`, to leave the work nothing to wait for; a third
    ends this process at once.
    """
    signals_seen, requests = 0, EndRequests()
    interruption = interruption or Interruption()

    async def run() -> T:
        task, loop, numbers = asyncio.ensure_future(work), asyncio.get_running_loop(), ending_signals()

        def take_signal(number: signal.Signals) -> None:
            nonlocal signals_seen
            if requests.is_repeated(number):
                return
            signals_seen += 1
            if signals_seen == 1 and interruption.ask(number.name, task.cancel):
                return
            if not task.cancelling():  # a second time would end what is put away
                task.cancel()
            if signals_seen > 1:
                kill()
                for each in numbers:
                    loop.remove_signal_handler(each)

        for number in numbers:
            loop.add_signal_handler(number, take_signal, number)
        return await task

    before = {number: signal.getsignal(number) for number in ending_signals()}
    try:
        return asyncio.run(run())
    except BaseException:
        if signals_seen:
            raise KeyboardInterrupt from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
