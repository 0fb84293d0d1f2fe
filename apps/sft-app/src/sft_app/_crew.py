"""The processes of the ranks other than 0, started and called while the main thread does its own part."""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Final, TypeVar

from offbeat_actors import ActorHandle, LocalLauncher, RoleSpec
from offbeat_types import OffbeatError, PeerFailedError

T = TypeVar("T")

_GRACE_S: Final = 1.0
"""Between the first failure and the end of all: a rank that died fails the others, and is found a moment later."""


class Crew:
    """The other ranks, seen from rank 0. They end with it, however it ends.

    The first failure of one is the end of all, so that whoever waits for it, this process too, is set free; and so is
    a second Ctrl-C or SIGTERM: torch's waits for another rank are set free by nothing else. Belongs to the main thread.

    Args:
        on_failure: called once, in a thread of its own, as soon as one has failed.
        deadline_s: for each call.
    """

    def __init__(self, on_failure: Callable[[], object], deadline_s: float) -> None:
        self._on_failure, self._deadline_s = on_failure, deadline_s
        self._launcher = LocalLauncher("sft-app")
        self._ranks: list[ActorHandle] = []
        self._failures: list[Exception] = []
        self._killed = False
        self._death: PeerFailedError | None = None
        self._settled = threading.Event()  # a rank has died, or the grace is over
        self._loop = asyncio.new_event_loop()
        # It must outlive the ranks: on Linux they end with the thread that started them.
        self._thread = threading.Thread(target=self._loop.run_forever, name="crew", daemon=True)
        self._thread.start()
        self._num_signals = 0
        self._signals, sink = socket.socketpair()
        for end in (self._signals, sink):
            end.setblocking(False)
        self._sink, self._former_sink = sink, signal.set_wakeup_fd(sink.fileno(), warn_on_full_buffer=False)
        self._loop.call_soon_threadsafe(self._loop.add_reader, self._signals, self._hear_signals)

    def start(self, specs: Sequence[RoleSpec]) -> None:
        """Start the ranks, at once, and wait for them.

        Raises:
            OffbeatError: as `Launcher.start`.
        """

        async def start_all() -> None:
            self._ranks += await asyncio.gather(*(self._launcher.start(spec) for spec in specs))

        self._run(start_all()).result()

    def call_first(self, method: str, returns: type[T]) -> T:
        """Call the first of them alone, and return its answer."""
        answer: T = self._run(self._ranks[0].call(method, returns=returns)).result()
        return answer

    def send(self, method: str, *args: Any) -> list["Future[None]"]:
        """Call all of them; `collect` waits for what comes of it."""
        return [self._run(self._call(rank, method, args)) for rank in self._ranks]

    def collect(self, answers: Sequence["Future[None]"]) -> None:
        """Wait until all have answered.

        Raises:
            OffbeatError: the first failure.
        """
        for answer in wait(answers, return_when=FIRST_EXCEPTION).done:  # each call has its deadline
            answer.result()

    def find_cause(self, error: Exception) -> Exception:
        """Of an error of rank 0 and those of the others the one that the rest follow from.

        A process that died comes first; then an error that speaks for itself; then one that names the rank that
        failed; last what torch says when its connection is gone.
        """
        speaks = isinstance(error, OffbeatError) and not isinstance(error, PeerFailedError)
        if not speaks:
            self._settled.wait(2 * _GRACE_S)
        return self._death or min([*self._failures, error], key=_remoteness)

    @property
    def is_interrupted(self) -> bool:
        """Whether the second signal came: Python may have made one of the two while torch did not let it act."""
        return self._num_signals > 1

    def kill(self) -> None:
        """End all of them now."""
        self._loop.call_soon_threadsafe(self._kill)

    def begin_to_stop(self) -> "Future[None]":
        """Ask all of them to close; they leave when rank 0 does."""
        return self._run(self._launcher.close())

    def close(self) -> None:
        """Stop the thread; the ranks are gone."""
        signal.set_wakeup_fd(self._former_sink)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._signals.close()
        self._sink.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _call(self, rank: ActorHandle, method: str, args: tuple[Any, ...]) -> None:
        try:
            await rank.call(method, *args, deadline_s=self._deadline_s)
        except Exception as error:
            self._note(rank, error)
            raise

    def _note(self, rank: ActorHandle, error: Exception) -> None:
        if self._killed:
            return
        if not self._failures:
            self._loop.call_later(_GRACE_S, self._kill)
            threading.Thread(target=self._on_failure, name="crew-failure", daemon=True).start()
        self._failures.append(error)
        if not rank.alive and isinstance(error, PeerFailedError):
            self._death = self._death or error
            self._settled.set()

    def _hear_signals(self) -> None:
        self._num_signals += sum(number in (signal.SIGINT, signal.SIGTERM) for number in self._signals.recv(64))
        if self._num_signals > 1:
            self._kill()

    def _kill(self) -> None:
        self._killed = True
        self._settled.set()
        self._launcher.kill()


def _remoteness(error: Exception) -> int:
    if isinstance(error, PeerFailedError):
        return 1
    return 2 if isinstance(error, RuntimeError) else 0
