"""The caller's side of one role process, wherever it runs."""

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeVar, overload

import msgspec

import offbeat_liveness as liveness
from offbeat_actors._failures import read_log_tail, rebuild_failure
from offbeat_actors._spec import ClusterConfig, RoleSpec, RoleState, Wait
from offbeat_actors._wire import (
    STOP_ID,
    Bytes,
    Call,
    Cancel,
    Channel,
    Failure,
    Frame,
    FrameWriter,
    Result,
    Stop,
    write_frame,
)
from offbeat_core import DeadlineError, OffbeatError, PeerFailedError, RoleName

T = TypeVar("T")

_GRACE_S: Final = 0.5
"""The end of a process and the end of its socket are seen one after the other; how long to wait for the second."""


_STATE_TIMEOUT_S: Final = 2.0
"""Time for asking what a process that did not answer in time is doing."""


_STALLED_S: Final = 0.1
"""A deadline noticed later than this was not noticed in time: this process was stopped, or in a long step."""


_CATCH_UP_S: Final = 1.0
"""Time for reading what came while this process was stalled."""


class RoleProcess(Protocol):
    """The process of a role, here or on another machine."""

    @property
    def pid(self) -> int:
        """Process id on its machine, which is also that of its process group."""
        ...

    @property
    def address(self) -> str:
        """IP address of its machine."""
        ...

    @property
    def place(self) -> str:
        """Return where it runs, for error texts: "" for this machine, else such as " on 10.0.0.7"."""
        ...

    @property
    def alive(self) -> bool:
        """False once it is gone."""
        ...

    async def wait(self) -> int | str:
        """Wait for its end: its exit code, minus the signal that killed it, or a text if its exit status is unknown."""
        ...

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to its process group. After SIGKILL `wait` returns before long, whatever has happened."""
        ...

    async def state(self) -> str:
        """Return what it is doing, for an error text; "" when nothing is odd about it."""
        ...


class ActorHandle:
    """A started role, of whatever launcher. All methods belong to the event loop that started it.

    Args:
        spec: what was started.
        process: its process.
        channel: to its process.
        config: deadlines.
    """

    def __init__(self, spec: RoleSpec, process: RoleProcess, channel: Channel, config: ClusterConfig) -> None:
        self._spec, self._process, self._channel, self._config = spec, process, channel, config
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Frame]] = {}
        self._calls: dict[int, tuple[str, float, float]] = {}
        self._stopping = self._is_ready = self._was_killed = False
        self._reason: str | None = None
        self._since_s = time.time()
        self._end = asyncio.create_task(self._watch())

    @property
    def role(self) -> RoleName:
        """Its kind and number."""
        return self._spec.role

    @property
    def name(self) -> str:
        """Name of its role, such as "rollout-0"."""
        return self._spec.name

    @property
    def pid(self) -> int:
        """Process id, which is also that of its process group."""
        return self._process.pid

    @property
    def address(self) -> str:
        """IP address of the machine where it runs, as the other machines see it."""
        return self._process.address

    @property
    def alive(self) -> bool:
        """False once its process is gone."""
        return self._reason is None and self._process.alive

    @property
    def state(self) -> tuple[RoleState, float, str]:
        """Return what its process does, the Unix time since when, and how it ended where it has."""
        if self._reason is not None:
            return "ended", self._since_s, self._reason
        return "ready" if self._is_ready else "starting", self._since_s, ""

    def mark_ready(self) -> None:
        """Note that its constructor and its `start()` are done."""
        self._is_ready, self._since_s = True, time.time()

    @property
    def log(self) -> str:
        """Describe where its output goes."""
        return str(self._spec.log_path) if self._spec.log_path else "its output"

    @overload
    async def call(
        self, method: str, *args: Any, returns: type[T], deadline_s: float | None = None, **kwargs: Any
    ) -> T: ...
    @overload
    async def call(
        self, method: str, *args: Any, returns: None = None, deadline_s: float | None = None, **kwargs: Any
    ) -> None: ...
    async def call(
        self, method: str, *args: Any, returns: Any = None, deadline_s: float | None = None, **kwargs: Any
    ) -> Any:
        """Call a public method of the role.

        Methods that are not `async` run one at a time, in the order they were called; `async` ones run at once,
        also while another method is busy. Cancelling the call cancels an `async` method and takes a waiting sync one
        off the queue; a sync method that has begun runs to its end.

        Args:
            method: its name.
            args: positional arguments: plain data, dataclasses, numpy arrays, decoded by the method's annotations.
            returns: type of the result, such as `list[Completion]`; None throws the result away.
            deadline_s: seconds until DeadlineError; None: the launcher's `call_timeout_s`.
            kwargs: keyword arguments, likewise.

        Raises:
            OffbeatError: the method raised it, with the same type and text.
            PeerFailedError: the method raised another error, or the process died.
            DeadlineError: no answer in time.
        """
        deadline_s = self._config.call_timeout_s if deadline_s is None else deadline_s
        call_id = next(self._ids)
        frame = write_call(call_id, method, args, kwargs)
        waiting = f"{self.name}.{method}"
        self._calls[call_id] = (method, time.monotonic(), deadline_s)
        try:
            # An edge of the graph of waits, in which the monitor finds circles of calls between roles.
            with liveness.waiting(waiting, on=self.name, deadline_s=deadline_s):
                answer = await self.request(call_id, frame, deadline_s)
        except TimeoutError:
            raise DeadlineError(waiting, self.name, deadline_s, await self._advise()) from None
        finally:
            self._calls.pop(call_id, None)
        if returns is None or not isinstance(answer.message, Result):
            return None
        try:
            return answer.unpack(answer.message.value, returns)
        except msgspec.ValidationError as error:
            raise PeerFailedError(self.name, f"{method} returned something else than declared: {error}") from error

    def waits(self) -> list[Wait]:
        """Calls that have not been answered."""
        now_s = time.monotonic()
        return [
            Wait(self.name, method, now_s - since_s, deadline_s) for method, since_s, deadline_s in self._calls.values()
        ]

    async def request(self, call_id: int, frame: Bytes, deadline_s: float | None = None) -> Frame:
        """Send one frame and wait for the answer to `call_id`; abandoned when cancelled, or by TimeoutError."""
        if self._reason is not None:
            raise self._death()
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = answer
        self._channel.send(frame)
        try:
            return await _in_time(answer, deadline_s)
        except (asyncio.CancelledError, TimeoutError):
            # Otherwise the role would go on with an `async` method, or keep a sync one in its queue.
            self._channel.send(write_frame(Cancel(call_id)))
            raise
        finally:
            self._pending.pop(call_id, None)

    async def wait_dead(self) -> str:
        """Wait until the process is gone and say how it ended."""
        return await asyncio.shield(self._end)  # many wait for it, and one that is cancelled must not end it

    async def stop(self, deadline_s: float | None = None) -> None:
        """Close the role and end its process: politely, then SIGTERM, then SIGKILL, all within the deadline.

        Raises:
            OffbeatError: the role's `close()` failed. The process is gone all the same.
        """
        deadline_s = self._config.stop_timeout_s if deadline_s is None else deadline_s
        if self._stopping or not self.alive:
            await self.wait_dead()
            return
        self._stopping = True
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.8 * deadline_s):  # the rest is for SIGTERM and SIGKILL
                    await self._close_politely()
        finally:
            # Also where its `close()` has failed or the caller is cancelled: no process may be left.
            await self._end_process(0.1 * deadline_s)

    def kill(self) -> None:
        """End the process, and those it has started, now."""
        self._was_killed = True
        self._process.send_signal(signal.SIGKILL)

    async def destroy(self) -> None:
        """Kill, and wait until nothing is left."""
        self._stopping = True
        self.kill()
        await self.wait_dead()

    async def _close_politely(self) -> None:
        try:
            await self.request(STOP_ID, write_frame(Stop()))
        except OffbeatError as error:
            await self.wait_dead()
            if not isinstance(error, PeerFailedError) or error.reason != self._reason:
                raise  # its close() failed; otherwise it died, which is what was wanted
        await self.wait_dead()

    async def _end_process(self, patience_s: float) -> None:
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
            await asyncio.wait({self._end}, timeout=patience_s)
        if self.alive:
            self.kill()
        await self.wait_dead()

    async def _advise(self) -> str:
        state = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STATE_TIMEOUT_S):  # on Ray its agent is asked, which may be silent too
                state = await self._process.state()
        doing = state or "it is alive, so it is slow or waits itself"
        return f"{doing}: see {self.log}, or raise the deadline"

    async def _watch(self) -> str:
        """Hand out answers until the process or its socket ends, then fail every call that still waits."""
        reading = asyncio.create_task(self._read())
        exiting = asyncio.create_task(self._process.wait())
        await asyncio.wait({reading, exiting}, return_when=asyncio.FIRST_COMPLETED)
        # A process that it has forked may hold its socket for ever, so its own end is the end. Where the socket ends
        # first, `stop` has a deadline of its own.
        patience_s = None if self._stopping and not exiting.done() else _GRACE_S
        await asyncio.wait({reading, exiting}, timeout=patience_s)
        fault = reading.exception() if reading.done() and not reading.cancelled() else None
        reading.cancel()
        # A role without its socket is of no use, and what it has started must not outlive it.
        self._process.send_signal(signal.SIGKILL)
        self._reason, self._since_s = self._explain(await exiting, fault), time.time()
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self._death())
        await self._channel.close()
        return self._reason

    async def _read(self) -> None:
        while (frame := await self._channel.receive()) is not None:
            if not isinstance(frame.message, Result | Failure):
                raise TypeError(f"unexpected {type(frame.message).__name__}")
            answer = self._pending.get(frame.message.id)
            if answer is None or answer.done():
                continue  # abandoned
            if isinstance(frame.message, Failure):
                answer.set_exception(rebuild_failure(frame.message, self.name))
            else:
                answer.set_result(frame)

    def _explain(self, end: int | str, fault: BaseException | None) -> str:
        if self._stopping:
            return "stopped by its launcher"
        if fault is not None:
            return f"sent a message that cannot be read: {fault}"
        if isinstance(end, str):
            return end
        if end >= 0:
            return f"its process{self._process.place} exited with code {end}"
        hint = " (not by offbeat; out of memory? see dmesg)" * (end == -signal.SIGKILL and not self._was_killed)
        return f"its process{self._process.place} was killed by {signal.Signals(-end).name}{hint}"

    def _death(self) -> PeerFailedError:
        return PeerFailedError(self.name, self._reason or "", self._log_tail())

    def _log_tail(self) -> str:
        return read_log_tail(self._spec.log_path) if self._spec.log_path else ""


async def _in_time(answer: "asyncio.Future[Frame]", deadline_s: float | None) -> Frame:
    """Await an answer; one that came while this process was stalled is read after its deadline, and is not late."""
    if deadline_s is not None:
        end_s = time.monotonic() + deadline_s
        # `wait`, as `wait_for` would cancel the answer at the deadline: it may be waited for again below.
        await asyncio.wait({answer}, timeout=deadline_s)
        if not answer.done() and time.monotonic() - end_s > _STALLED_S:
            await asyncio.wait({answer}, timeout=_CATCH_UP_S)
        if not answer.done():
            raise TimeoutError
    return await answer


def write_call(call_id: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bytes:
    """Return the frame of a call."""
    writer = FrameWriter()
    packed_args = [writer.pack(value) for value in args]
    packed_kwargs = {key: writer.pack(value) for key, value in kwargs.items()}
    return writer.finish(Call(call_id, method, packed_args, packed_kwargs))
