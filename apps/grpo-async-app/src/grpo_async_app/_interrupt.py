"""Ctrl-C and SIGTERM: the first one stops the run, the second one kills what is left of it."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_interruptible(work: Coroutine[Any, Any, T], kill: Callable[[], None]) -> T:
    """Run asynchronous work to its end, or until it is asked to end.

    Args:
        work: cancelled by the first signal; what it puts away then should take seconds.
        kill: called at the second signal, to leave the work nothing to wait for. A third ends this process at once.

    Raises:
        KeyboardInterrupt: asked to end; whatever the work raised after that is of no interest any more.
        Exception: what the work raises by itself.
    """
    signals_seen = 0

    async def run() -> T:
        task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()

        def take_signal() -> None:
            nonlocal signals_seen
            signals_seen += 1
            if signals_seen == 1:
                task.cancel()
            else:
                kill()
                for number in SIGNALS:
                    loop.remove_signal_handler(number)

        for number in SIGNALS:
            loop.add_signal_handler(number, take_signal)
        return await task

    try:
        return asyncio.run(run())
    except BaseException:
        if signals_seen:
            raise KeyboardInterrupt from None
        raise
