"""Trainer and rollout engines on the same devices: they take turns, and memory changes hands in one fixed order.

    training      the engines sleep, the trainer has all its memory
      |  trainer: sleep(1)          moments and all else but the weights go
      |  each engine: wake(weights), and takes the weights
      |  trainer: sleep(2)          the weights go too, unless there is room for them
      |  all engines: wake(kv_cache), resume
    generation    the trainer sleeps, the engines have all their memory
      |  all engines: pause(wait)   what they have is finished
      |  all engines: sleep(level)
      |  trainer: wake()
    training      ...

With `cluster.sleep_level` 0 memory stays where it is: engines are paused and go on, and nothing else is done.

Each of these steps has the deadline `cluster.turn_timeout_s` (the pause that of a sync, `async.sync_deadline_s`), is
named in its error, and stands in the timeline with the main memory that the process holds afterwards. An engine that
died has nothing to give back; it is started again when it is the engines' turn, and the trainer waits for that.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

from grpo_async_app._config.parking import PARKS_ALL, PARKS_SOME, Parking
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.events import RunEvents
from grpo_async_app._fleet.trainers import Trainers, is_lost
from offbeat_actors import ActorHandle, Member
from offbeat_core import ConfigError, DeadlineError, OffbeatError, PauseMode, PeerFailedError
from offbeat_run import clock_s

WEIGHTS: Final = "weights"
KV_CACHE: Final = "kv_cache"


class ColocationSchedule:
    """Turns on the devices. The trainer has the first, until the first sync.

    Args:
        trainer: the one there is.
        events: takes every step.
        parking: what roles put away; None: all of the trainer's memory, and of the engines' what
            `cluster.sleep_level` says.
    """

    def __init__(
        self, config: GrpoConfig, trainer: Callable[[], Trainers], events: RunEvents, parking: Parking | None = None
    ) -> None:
        self._level = config.cluster.sleep_level
        self._parking = parking or Parking(engines=self._level)
        self._step_deadline_s, self._pause_deadline_s = config.cluster.turn_timeout_s, config.async_.sync_deadline_s
        self._start_deadline_s = config.cluster.start_timeout_s
        self._trainer, self._events = trainer, events
        self._away: WeakKeyDictionary[ActorHandle, frozenset[str]] = WeakKeyDictionary()  # what an engine gave back
        self._engines_may_start = asyncio.Event()
        self._engines_may_start.set()
        self._starting: dict[str, asyncio.Event] = {}  # engines that are being started, and whether they are there
        self._is_training = True
        self._spent_s = 0.0

    @property
    def is_training(self) -> bool:
        return self._is_training

    def take_spent_s(self) -> float:
        """Seconds that steps took since this was last asked."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    # ── starting ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def trainer_started(self) -> None:
        """The trainer is there, before any engine: it makes room for their start."""
        await self._call_trainer("sleep", PARKS_ALL)

    async def engines_started(self) -> None:
        """All engines are there for the first time, and sleep: it is the trainer's turn."""
        # First: an engine that starts now would take the memory that the trainer is given.
        self._engines_may_start.clear()
        await self._call_trainer("wake")

    @asynccontextmanager
    async def starting(self, name: str) -> AsyncIterator[Callable[[ActorHandle], Any]]:
        """Start an engine in the block, which begins when engines may use the devices. What it yields is called with
        the engine: one of the first sleeps at once, as no turn of theirs has come.
        """
        await self._engines_may_start.wait()
        self._starting[name] = asyncio.Event()
        try:
            yield self._started
        finally:
            self._starting.pop(name).set()

    async def _started(self, handle: ActorHandle) -> None:
        if self._is_training:
            await self._put_to_sleep(handle)

    # ── to the trainer ────────────────────────────────────────────────────────────────────────────────────────────

    async def to_training(self, engines: Sequence[Member]) -> None:
        """Give the trainer the devices, unless it has them. Errors name the role that did not sleep, start or wake."""
        if not self._is_training:
            await self._put_to_sleep_all(engines, "wait")
            await self._call_trainer("wake")
            self._is_training = True

    async def trainer_is_gone(self, engines: Sequence[Member]) -> None:
        """Its memory is free. The engines sleep, so that another can be started."""
        await self._put_to_sleep_all(engines, "abort")
        self._is_training = True

    async def _put_to_sleep_all(self, engines: Sequence[Member], mode: PauseMode) -> None:
        # No other begins to start. One that has begun holds memory, and can be put to sleep only when it is there.
        self._engines_may_start.clear()
        for name, ended in list(self._starting.items()):
            try:
                async with asyncio.timeout(self._start_deadline_s):
                    await ended.wait()
            except TimeoutError:
                raise DeadlineError("turn of the trainer", f"{name} to start", self._start_deadline_s) from None
        # From here on callers wait for the engines' next turn.
        for engine in engines:
            engine.serves.clear()
        awake = [engine.actor for engine in engines if not self._away.get(engine.actor)]
        half_awake = [engine.actor for engine in engines if self._away.get(engine.actor) == frozenset({KV_CACHE})]
        await self._each(awake, lambda handle: self._call(handle, "pause", mode, deadline_s=self._pause_deadline_s))
        await self._each(half_awake, lambda handle: self._wake(handle, KV_CACHE))  # a sync was cut short
        await self._each([*awake, *half_awake], self._put_to_sleep)

    async def _put_to_sleep(self, handle: ActorHandle) -> None:
        if not self._level:
            return
        await self._step(handle.name, "sleep", handle.call, "sleep", self._level)
        self._away[handle] = frozenset({WEIGHTS, KV_CACHE})

    # ── to the engines ────────────────────────────────────────────────────────────────────────────────────────────

    async def show_weights(self) -> None:
        """The trainer has its weights on the devices and nothing else: engines may take them."""
        if self._is_training:
            await self._call_trainer("sleep", PARKS_SOME)
        else:  # one engine has come up in the midst of the engines' turn
            await self._call_trainer("wake", (WEIGHTS,))

    async def make_room(self, handle: ActorHandle) -> None:
        """Let an engine have memory for the weights that come."""
        await self._wake(handle, WEIGHTS)

    async def to_generation(self, engines: Sequence[Member]) -> None:
        """Take the weights from the trainer's memory, and let these engines continue, which have theirs."""
        if self._parking.trainer == PARKS_ALL:
            await self._call_trainer("sleep", PARKS_ALL)
        by_handle = {engine.actor: engine for engine in engines if engine.actor.alive}
        for handle in await self._each(list(by_handle), self._resume):
            if handle.alive:
                by_handle[handle].serves.set()
        # Before others may start: in the trainer's turn `_started` puts them to sleep.
        self._is_training = False
        self._engines_may_start.set()

    async def _resume(self, handle: ActorHandle) -> None:
        await self._wake(handle, KV_CACHE)
        await self._call(handle, "resume", deadline_s=self._step_deadline_s)

    async def _wake(self, handle: ActorHandle, tag: str) -> None:
        away = self._away.get(handle, frozenset())
        if tag in away:
            await self._step(handle.name, f"wake {tag}", handle.call, "wake", [tag])
            self._away[handle] = away - {tag}

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _call_trainer(self, method: str, *args: Any) -> None:
        if not self._level:
            return
        words = [method, *(str(each) if isinstance(each, int) else " ".join(each) for each in args)]
        await self._step(self._trainer().name, " ".join(words), self._trainer().call, method, *args)

    async def _step(self, role: str, step: str, call: Callable[..., Any], method: str, *args: Any) -> None:
        start_s = clock_s()
        try:
            resident_bytes = await call(method, *args, returns=int, deadline_s=self._step_deadline_s)
        except OffbeatError as error:
            if type(error) in (OffbeatError, ConfigError):  # the others name the role themselves
                planned = f" (cluster.sleep_level = -1: {self._parking.why})" if self._parking.why else ""
                raise type(error)(f"{role} cannot {step}: {error}{planned}") from error
            raise
        self._spent_s += clock_s() - start_s
        self._events.handed_over(role, step, start_s, clock_s(), resident_bytes)

    async def _call(self, handle: ActorHandle, method: str, *args: Any, deadline_s: float) -> None:
        await handle.call(method, *args, deadline_s=deadline_s)

    async def _each(self, handles: Sequence[ActorHandle], step: Callable[[ActorHandle], Any]) -> list[ActorHandle]:
        """Take one step with all engines at once. All end before an error is raised, so that none is left half asleep.

        Returns:
            Those that have done it. One that is lost is gone for good, so that the next finds its memory free.

        Raises:
            DeadlineError: names all that were late, and what each is doing.
            OffbeatError: of an engine that lives.
        """
        outcomes = await asyncio.gather(*(step(handle) for handle in handles), return_exceptions=True)
        failed = [(handle, each) for handle, each in zip(handles, outcomes, strict=True) if each is not None]
        late = {handle.name: error for handle, error in failed if isinstance(error, DeadlineError)}
        if len(late) > 1:
            first = next(iter(late.values()))
            advice = "; ".join(f"{name}: {error.advice or error.waiting}" for name, error in late.items())
            raise DeadlineError(f"{first.waiting} and others", ", ".join(late), first.deadline_s, advice) from first
        for handle, error in failed:
            if not isinstance(error, PeerFailedError) or not await is_lost(handle, error):
                assert isinstance(error, BaseException)
                raise error
            await self._kill_and_wait(handle)
        return [handle for handle, each in zip(handles, outcomes, strict=True) if each is None]

    async def _kill_and_wait(self, handle: ActorHandle) -> None:
        """Kill what is left of a process whose step has failed: it holds memory."""
        if handle.alive:
            handle.kill()
        try:
            async with asyncio.timeout(self._step_deadline_s):
                await handle.wait_dead()
        except TimeoutError:
            raise DeadlineError(f"the end of {handle.name}", handle.name, self._step_deadline_s) from None
