"""The rollout engines of a run: called, watched, started again, joined by others, and let go."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import count, islice
from typing import Any, Final

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.colocation import ColocationSchedule
from grpo_async_app._fleet.engine_watch import EngineSpeeds, TokenWatch
from grpo_async_app._fleet.weights import WeightOffer, bring_weights
from offbeat_actors import (
    ActorHandle,
    RestartBudget,
    Supervised,
    Tell,
    gather_or_cancel,
    least_loaded,
    start_again,
    wait_gone,
)
from offbeat_core import (
    Completion,
    EngineHealth,
    GenerateRequest,
    OffbeatError,
    PeerFailedError,
    PlacementError,
)
from offbeat_run import clock_s

JOINING_AT_ONCE: Final = 4
"""Engines that start beside a run that goes on: each loads a model, and a hundred at once would take the machine."""


class Engine(Supervised):
    """One rollout engine, through all its processes; its load is the groups that it works on.

    Attributes:
        empty: it has nothing to do.
        leaving: it takes no more groups, and is stopped when it is empty.
        has_left: it will never serve again.
        num_tokens: sampled by its process, as it last said.
        version: of the policy whose weights its process holds; None before its first sync.
    """

    def __init__(self, name: str, actor: ActorHandle) -> None:
        super().__init__(name, actor)
        self.empty = asyncio.Event()
        self.leaving = self.has_left = False
        self.num_tokens = 0
        self.version: int | None = None

    async def ask_health(self, watch: TokenWatch, *, deadline_s: float) -> None:
        """Ask its process, which answers at once whatever it computes; raise StuckError where it decodes in vain."""
        health: EngineHealth = await self.actor.call("health", returns=EngineHealth, deadline_s=deadline_s)
        self.num_tokens = health.num_tokens
        watch.look(health, clock_s())


class Engines:
    """Rollout engines, which may die, stop answering, come and go while the run goes on.

    Args:
        start: starts the process of the engine of this name.
        tell: takes a line when something has happened to an engine.
        turns: where the engines share their devices with the trainer; None where they have their own.
    """

    def __init__(
        self,
        config: GrpoConfig,
        start: Callable[[str], Awaitable[ActorHandle]],
        budget: RestartBudget,
        tell: Tell,
        turns: ColocationSchedule | None = None,
    ) -> None:
        self._config, self._start_process, self._budget, self._tell = config, start, budget, tell
        self._num_starting = 0
        self._engines: dict[str, Engine] = {}
        self._joining: set[str] = set()
        self._wanted = config.rollout.num_engines
        self._serve_as_started = False
        self._all_started = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._without_weights: asyncio.Queue[str] = asyncio.Queue()
        self._speeds = EngineSpeeds()
        self._stragglers: dict[str, float] = {}
        self._turns = turns

    async def start(self) -> None:
        """Start as many as the configuration says. None serves before it has got weights, or `serve` is called."""
        names = [f"rollout-{number}" for number in range(self._wanted)]
        for name, handle in zip(names, await gather_or_cancel([self._start(name) for name in names]), strict=True):
            self._add(name, handle)

    async def _start(self, name: str) -> ActorHandle:
        self._num_starting += 1
        try:
            return await self._start_process(name)
        finally:
            self._num_starting -= 1

    @property
    def are_starting(self) -> bool:
        return self._num_starting > 0

    def let_others_join(self) -> None:
        """All roles are there: begin with what `scale` was asked for meanwhile."""
        self._all_started = True
        self._adjust()

    def serve(self) -> None:
        """Let all serve the weights that they start with, now and after a restart."""
        self._serve_as_started = True
        for engine in self._engines.values():
            engine.serves.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ── who is there ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def names(self) -> list[str]:
        """Those that take part, in order; one that is being started again is among them, one that leaves is not."""
        return sorted((engine.name for engine in self._engines.values() if not engine.leaving), key=_number)

    @property
    def living(self) -> list[Engine]:
        """Those whose process runs and is not being stopped."""
        return [engine for engine in self._engines.values() if engine.actor.alive and not engine.has_left]

    @property
    def num_tokens(self) -> int:
        """A sum that changes while any of them samples: it tells slow from stuck."""
        return sum(engine.num_tokens for engine in self._engines.values())

    @property
    def versions(self) -> dict[str, int]:
        """The policy version that each engine holds; an engine without weights is left out."""
        return {engine.name: engine.version for engine in self._engines.values() if engine.version is not None}

    @property
    def num_restarts(self) -> int:
        return sum(times for role, times in self._budget.spent.items() if role.startswith("rollout-"))

    @property
    def stragglers(self) -> dict[str, float]:
        """Engines much slower than the others, and how many times."""
        return {name: times for name, times in self._stragglers.items() if name in self._engines}

    def least_loaded(self) -> str:
        """The serving engine with the fewest groups; any one when none serves."""
        there = [self._engines[name] for name in self.names]
        return least_loaded(there).name

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Give an engine a group to work on, or weights: it does not leave before the block ends."""
        engine = self._engines[name]
        engine.load += 1
        engine.empty.clear()
        try:
            yield
        finally:
            engine.load -= 1
            if not engine.load:
                engine.empty.set()

    # ── sampling ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def generate(self, name: str, request: GenerateRequest, deadline_s: float) -> list[Completion]:
        """Sample on one engine, once it serves; it is started again where only a new process mends what went wrong."""
        await self._find(name).ready("generate", deadline_s)
        began_s = clock_s()
        completions: list[Completion] = await self.call(
            name, "generate", request, returns=list[Completion], deadline_s=deadline_s
        )
        self._note_speed(name, max((len(each.ids) for each in completions), default=0), clock_s() - began_s)
        return completions

    async def call(self, name: str, method: str, *args: Any, returns: Any = None, deadline_s: float) -> Any:
        """Call the role of an engine, once it serves."""
        engine = self._find(name)
        await engine.ready(method, deadline_s)
        actor = self._find(name).actor  # it may have left instead
        try:
            return await actor.call(method, *args, returns=returns, deadline_s=deadline_s)
        except PeerFailedError as error:
            self._give_up(engine, actor, error.reason)
            raise

    def _note_speed(self, name: str, num_tokens: int, seconds: float) -> None:
        self._speeds.took(name, num_tokens, seconds)
        slow = self._speeds.stragglers(self.names)
        for slower in slow.keys() - self._stragglers.keys():
            self._tell(f"{slower} is a straggler: {slow[slower]:.1f} times slower than the others; it gets less to do")
        self._stragglers = slow

    async def abort(self, request_id: str) -> None:
        """End a request wherever it runs. An engine that is gone has ended it."""
        handles = [engine.actor for engine in self.living]
        for outcome in await asyncio.gather(
            *(handle.call("abort", request_id) for handle in handles), return_exceptions=True
        ):
            if isinstance(outcome, BaseException) and not isinstance(outcome, PeerFailedError):
                raise outcome

    def _find(self, name: str) -> Engine:
        engine = self._engines.get(name)
        if engine is not None and engine.failure is not None:
            raise engine.failure
        if engine is None or engine.has_left:
            raise PeerFailedError(name, "it has left the run")
        return engine

    # ── weights ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def sync(self, offer: WeightOffer, interrupt: bool) -> None:
        """Bring weights to every engine."""
        await self.to_training()
        # One that does not live gets its weights when it is up again.
        await self._bring_weights(self.living, offer, interrupt)

    async def to_training(self) -> None:
        """Where trainer and engines share devices: let the engines finish and sleep."""
        if self._turns is not None:
            await self._turns.to_training(self.living)

    async def next_without_weights(self) -> str:
        """Wait for an engine that has come up between two syncs, and serves once `sync_one` has brought it weights."""
        return await self._without_weights.get()

    async def sync_one(self, name: str, offer: WeightOffer) -> None:
        engine = self._engines.get(name)
        late = self._turns is not None and self._turns.is_training  # the next sync is about to do it
        if engine is not None and engine.actor.alive and not engine.serves.is_set() and not late:
            await self._bring_weights([engine], offer, interrupt=False)

    async def _bring_weights(self, engines: list[Engine], offer: WeightOffer, interrupt: bool) -> None:
        turns, deadline_s = self._turns, self._config.async_.sync_deadline_s
        if turns is not None:
            await turns.show_weights()
        with contextlib.ExitStack() as held:
            for engine in engines:
                held.enter_context(self.hold(engine.name))
            synced = await bring_weights(engines, offer, interrupt, deadline_s, turns, self._give_up)
        for engine in synced:
            engine.version = offer.version
        if turns is not None:
            await turns.to_generation(synced)

    # ── life and death ────────────────────────────────────────────────────────────────────────────────────────────

    def raise_if_failed(self) -> None:
        """Raise what went wrong with an engine and is not to be mended by starting it again.

        Each time: the run may take it for the trainer's fault, go on, and would have an engine that nobody looks after.
        """
        for task in [task for task in self._tasks if task.done()]:
            if not task.cancelled() and (error := task.exception()):
                raise error
            self._tasks.discard(task)

    def _add(self, name: str, handle: ActorHandle) -> Engine:
        engine = self._engines[name] = Engine(name, handle)
        engine.empty.set()
        self._tasks.add(asyncio.create_task(self._look_after(engine)))
        return engine

    def _give_up(self, engine: Engine, actor: ActorHandle, why: str) -> None:
        """End what is left of a process that has failed; who looks after the engine starts it again."""
        if engine.give_up(actor):
            self._tell(f"{engine.name} is ended, because only a new process mends this: {why}")

    async def _look_after(self, engine: Engine) -> None:
        """Watch an engine through all its lives. Who waits for it to serve hears why it never will."""
        try:
            await self._keep_alive(engine)
        except Exception as error:
            engine.failure = error
            raise
        finally:
            engine.has_left = True
            engine.serves.set()
        del self._engines[engine.name]
        self._tell(f"{engine.name} has left: {_count(self.names)}")

    async def _keep_alive(self, engine: Engine) -> None:
        """Start an engine again whenever it ends, until it leaves."""
        while True:
            silent_after_s = self._config.cluster.silent_after_s
            ask = partial(engine.ask_health, TokenWatch(silent_after_s))
            cause = await wait_gone(engine.actor, ask, silent_after_s)
            engine.serves.clear()
            engine.version = None
            self._speeds.forget(engine.name)
            if engine.leaving or not await self._is_started_again(engine, cause):
                break

    async def _is_started_again(self, engine: Engine, cause: str) -> bool:
        try:
            engine.actor = await start_again(
                self._budget, engine.name, cause, lambda: self._start(engine.name), self._tell
            )
        except PlacementError as error:
            if self.names == [engine.name]:
                raise
            self._go_on_without(engine.name)
            self._tell(f"{engine.name} has no place any more, and the others go on: {error}")
            return False
        if engine.leaving:  # it was asked to while it was started: it has nothing to finish
            await self._stop(engine)
            return False
        self._send_for_weights(engine)
        return True

    def _send_for_weights(self, engine: Engine) -> None:
        if self._serve_as_started:
            engine.serves.set()
        else:
            self._without_weights.put_nowait(engine.name)

    # ── coming and going ──────────────────────────────────────────────────────────────────────────────────────────

    def scale(self, number: int) -> None:
        """Let engines join or leave until there are so many. One that leaves finishes first what it has."""
        self._wanted = number
        if self._all_started:
            self._adjust()

    def _adjust(self) -> None:
        staying = self.names
        for name in staying[self._wanted :]:
            self._engines[name].leaving = True
            self._tasks.add(asyncio.create_task(self._dismiss(self._engines[name])))
        missing = self._wanted - len(staying) - len(self._joining)
        free = filter(self._is_free, map("rollout-{}".format, count()))
        for name in islice(free, max(0, min(missing, JOINING_AT_ONCE - len(self._joining)))):
            self._joining.add(name)
            self._tasks.add(asyncio.create_task(self._join(name)))

    def _is_free(self, name: str) -> bool:
        return name not in self._engines and name not in self._joining

    async def _join(self, name: str) -> None:
        try:
            handle = await self._start(name)
        except OffbeatError as error:
            self._joining.discard(name)
            self._go_on_without(name)
            self._tell(f"{name} cannot be started, so {_count(self.names)} go on: {error}")
        else:
            self._joining.discard(name)
            self._send_for_weights(self._add(name, handle))
            self._tell(f"{name} has joined: {_count(self.names)}")
        self._adjust()  # others may be waiting to start, or too many by now

    def _go_on_without(self, name: str) -> None:
        """Want no more engines than there are without this one, which cannot be started: it is not tried again."""
        there = {*self.names, *self._joining} - {name}
        self._wanted = min(self._wanted, len(there))

    async def _dismiss(self, engine: Engine) -> None:
        while engine.load:  # again: it may have got something to do before this task went on
            await engine.empty.wait()
        await self._stop(engine)

    async def _stop(self, engine: Engine) -> None:
        """Stop its process. What goes wrong is told: it is gone anyway, and nobody needs it."""
        engine.has_left = True
        try:
            await engine.actor.stop()
        except OffbeatError as error:
            self._tell(f"{engine.name} did not close well: {error}")


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _count(names: list[str]) -> str:
    return f"{len(names)} rollout engine{'s' if len(names) != 1 else ''}"
