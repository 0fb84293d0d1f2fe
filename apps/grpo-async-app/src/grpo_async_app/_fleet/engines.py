"""The rollout engines of a run: called, watched, started again, joined by others, and let go."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from itertools import count, islice
from typing import Any, Final

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.colocation import ColocationSchedule
from grpo_async_app._fleet.engine_watch import EngineSpeeds, TokenWatch
from grpo_async_app._fleet.weights import WeightOffer, bring_weights
from offbeat_actors import ActorHandle, Ask, KeepAlive, Member, Pool
from offbeat_core import (
    Completion,
    EngineHealth,
    GenerateRequest,
    OffbeatError,
    PeerFailedError,
    PlacementError,
    RoleName,
)
from offbeat_run import clock_s

JOINING_AT_ONCE: Final = 4
"""Engines that start at once during a run: each loads a model, and a hundred at once would overload the machine."""


class Engine(Member):
    """One rollout engine, through all its processes; its load is the groups that it works on.

    Attributes:
        empty: it has nothing to do, so one that leaves can be stopped.
        num_tokens: sampled by its process, as it last reported.
        version: of the policy whose weights its process holds; None before its first sync.
    """

    def __init__(self, actor: ActorHandle) -> None:
        super().__init__(actor)
        self.empty = asyncio.Event()
        self.empty.set()
        self.num_tokens = 0
        self.version: int | None = None

    async def ask_health(self, watch: TokenWatch, *, deadline_s: float) -> None:
        """Ask its process, which answers at once whatever it computes; raise StuckError where it decodes in vain."""
        health: EngineHealth = await self.actor.call("health", returns=EngineHealth, deadline_s=deadline_s)
        self.num_tokens = health.num_tokens
        watch.look(health, clock_s())


class Engines(Pool[Engine]):
    """Rollout engines, which may die, stop answering, come and go during the run.

    Args:
        start: starts the process of an engine.
        keep: how they are kept alive.
        turns: where the engines share their devices with the trainer; None where they have their own.
    """

    def __init__(
        self,
        config: GrpoConfig,
        start: Callable[[RoleName], Awaitable[ActorHandle]],
        keep: KeepAlive,
        turns: ColocationSchedule | None = None,
    ) -> None:
        super().__init__(start, keep, Engine)
        self._config, self._turns = config, turns
        self._joining: set[RoleName] = set()
        self._wanted = config.rollout.num_engines
        self._serve_as_started = self._all_started = False
        self._without_weights: asyncio.Queue[str] = asyncio.Queue()
        self._speeds = EngineSpeeds()
        self._stragglers: dict[str, float] = {}

    async def start_wanted(self) -> None:
        """Start as many as the configuration says. None serves before it has got weights, or `serve` is called."""
        await self.start(RoleName("rollout", index) for index in range(self._wanted))

    def let_others_join(self) -> None:
        """All roles are there: begin with what `scale` was asked for meanwhile."""
        self._all_started = True
        self._adjust()

    def serve(self) -> None:
        """Let all serve the weights that they start with, now and after a restart."""
        self._serve_as_started = True
        for engine in self.members.values():
            engine.serves.set()

    # ── members ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def names(self) -> list[str]:
        """Return those that take part, in order.

        One that is being started again is among them, one that leaves is not.
        """
        return [str(role) for role in self._staying]

    @property
    def _staying(self) -> list[RoleName]:
        return sorted(engine.role for engine in self.members.values() if not engine.leaving)

    @property
    def num_tokens(self) -> int:
        """A sum that changes while any of them samples: it distinguishes slow from stuck."""
        return sum(engine.num_tokens for engine in self.members.values())

    @property
    def versions(self) -> dict[str, int]:
        """The policy version that each engine holds; an engine without weights is left out."""
        return {engine.name: engine.version for engine in self.members.values() if engine.version is not None}

    @property
    def stragglers(self) -> dict[str, float]:
        """Engines much slower than the others, and how many times."""
        return {name: times for name, times in self._stragglers.items() if name in self.members}

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Give an engine a group to work on, or weights: it does not leave before the block ends."""
        engine = self.members[name]
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
        began_s = clock_s()  # not before: an engine that was awaited is not a slow one
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
            self.give_up(engine, actor, error.reason)
            raise

    def _note_speed(self, name: str, num_tokens: int, seconds: float) -> None:
        self._speeds.took(name, num_tokens, seconds)
        slow = self._speeds.stragglers(self.names)
        for slower in slow.keys() - self._stragglers.keys():
            self.keep.notify(
                f"{slower} is a straggler: {slow[slower]:.1f} times slower than the others; it gets less to do"
            )
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
        engine = self.members.get(name)
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
        await self._pull(self.living, offer, interrupt)

    async def to_training(self) -> None:
        """Let the engines finish and sleep, where they share devices with the trainer."""
        if self._turns is not None:
            await self._turns.to_training(self.living)

    async def late_engines(self) -> AsyncIterator[str]:
        """Yield each engine that has come up between two syncs, and serves once `sync_late` has brought it weights."""
        while True:
            yield await self._without_weights.get()

    async def sync_late(self, name: str, offer: WeightOffer) -> None:
        """Bring weights to one engine, unless a sync has done so meanwhile, or is about to."""
        engine = self.members.get(name)
        late = self._turns is not None and self._turns.is_training  # the next sync is about to do it
        if engine is not None and engine.actor.alive and not engine.serves.is_set() and not late:
            await self._pull([engine], offer, interrupt=False)

    async def _pull(self, engines: list[Engine], offer: WeightOffer, interrupt: bool) -> None:
        turns, deadline_s = self._turns, self._config.async_.sync_deadline_s
        if turns is not None:
            await turns.show_weights()
        with contextlib.ExitStack() as held:
            for engine in engines:
                held.enter_context(self.hold(engine.name))  # it may be asked to leave meanwhile
            synced = await bring_weights(engines, offer, interrupt, deadline_s, turns, self.give_up)
        for engine in synced:
            engine.version = offer.version
        if turns is not None:
            await turns.to_generation(synced)

    # ── life and death ────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, member: Engine) -> Ask:
        """Ask for its health: one that decodes in vain is stuck."""
        return partial(member.ask_health, TokenWatch(self.keep.silent_after_s))  # a process begins to count anew

    def on_up(self, member: Engine) -> None:
        """Let an engine serve what it starts with, or send for weights; the first ones get theirs by the first sync."""
        if self._serve_as_started:
            member.serves.set()
        elif self._all_started:
            self._without_weights.put_nowait(member.name)

    def on_end(self, member: Engine) -> None:
        """Forget what its process was: the next one is another, without weights."""
        member.version = None
        self._speeds.forget(member.name)

    def continues_without(self, member: Engine, error: OffbeatError) -> bool:
        """Let the others continue without an engine that has no place any more."""
        # Not where it is the last one: then nothing would sample any more.
        if not isinstance(error, PlacementError) or self._staying == [member.role]:
            return False
        self._want_no_more_than_without(member.role)
        self.keep.notify(f"{member.name} has no place any more, and the others continue: {error}")
        return True

    def describe(self) -> str:
        """Return how many rollout engines stay, as text."""
        number = len(self._staying)
        return f"{number} rollout engine{'s' if number != 1 else ''}"

    # ── coming and going ──────────────────────────────────────────────────────────────────────────────────────────

    def scale(self, number: int) -> None:
        """Let engines join or leave until there are so many. One that leaves finishes first what it has."""
        self._wanted = number
        if self._all_started:  # before that, `let_others_join` adjusts
            self._adjust()

    def _adjust(self) -> None:
        staying = self._staying
        for role in staying[self._wanted :]:
            engine = self.members[str(role)]
            engine.leaving = True
            self.in_background(self._leave_when_empty(engine))
        missing = self._wanted - len(staying) - len(self._joining)
        free = (role for role in map(partial(RoleName, "rollout"), count()) if self._is_free(role))
        for role in islice(free, max(0, min(missing, JOINING_AT_ONCE - len(self._joining)))):
            self._joining.add(role)
            self.in_background(self._join(role))

    def _is_free(self, role: RoleName) -> bool:
        return str(role) not in self.members and role not in self._joining

    async def _join(self, role: RoleName) -> None:
        try:
            actor = await self.start_process(role)
        except OffbeatError as error:
            self._joining.discard(role)
            self._want_no_more_than_without(role)
            self.keep.notify(f"{role} cannot be started, so {self.describe()} continue: {error}")
        else:
            self._joining.discard(role)
            self.add(actor)
            self.keep.notify(f"{role} has joined: {self.describe()}")
        self._adjust()  # others may be waiting to start, or too many by now

    def _want_no_more_than_without(self, role: RoleName) -> None:
        """Want no more engines than there are without this one, which cannot be started: it is not tried again."""
        there = {*self._staying, *self._joining} - {role}
        self._wanted = min(self._wanted, len(there))

    async def _leave_when_empty(self, engine: Engine) -> None:
        while engine.load:  # again: it may have got something to do before this task continued
            await engine.empty.wait()
        await self.leave(engine)
