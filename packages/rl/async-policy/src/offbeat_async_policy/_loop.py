"""The asyncio loop that performs the policy's actions on a backend, and ends in a named error rather than never.

    run: policy.actions() -> _perform, which starts tasks and waits for none of them
     ^     submit tasks, one for each group           at once; a Drop cancels that of its group
     |     drop tasks, one for each dropped group     at once
     |     update, sync, checkpoint                   one after the other: `TrainerTurn`, first come, first served
     |             |
     |             v  a task ends, by a result, an error or a cancellation
     |     _note_end: the task into the queue _ended, news event set
     |             |
     |             v
    _wait_for_news: wakes by the news event, or after idle_every_s without one;
           gives each ended task's result to the policy, asks backend.wants_end
           _look_for_movement: raises after stall_after_s without movement, unless the trainer's turn is taken;
                   starts the idle task (backend.idle), one at a time, whose answer is read at a later wake

An update whose version is to be saved starts its checkpoint; what is left at the end is cancelled and awaited.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeVar

from offbeat_async_policy._clock import BusyClock, BusyShares
from offbeat_async_policy._policy import AsyncPolicy
from offbeat_async_policy._state import Action, Drop, Finish, Submit, Sync, Update
from offbeat_async_policy._turn import TrainerTurn
from offbeat_core import DeadlineError, PeerFailedError


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """Result of one group. Its samples stay with the backend.

    Args:
        oldest_version: policy version that sampled the oldest of its tokens.
        filtered: it has no learning signal and is not trained.
    """

    oldest_version: int
    filtered: bool = False


class LoopBackend(Protocol):
    """Performs the actions of the policy, many at once in one event loop; but never two of update, sync, checkpoint.

    Of these each has the trainer to itself while its method runs; see `TrainerTurn`.
    """

    async def submit(self, group_id: int) -> GroupResult:
        """Generate and score a group, and keep its samples until `update` or `drop` names it.

        Raises:
            PeerFailedError: its engine died; the group is issued again. All other errors end the run.
        """
        ...

    async def prepare(self, action: Literal["update", "sync", "checkpoint"]) -> None:
        """Called before each update, sync and checkpoint, outside its deadline: wait for what has to end first.

        What is waited for here needs deadlines of its own, and may use the trainer between two actions.
        """
        ...

    async def update(self, group_ids: tuple[int, ...], version: int) -> None:
        """Train on these groups; the trainer goes from `version` to `version + 1`."""
        ...

    async def sync(self, version: int, interrupt: bool) -> None:
        """Bring the trainer's weights to every engine; with `interrupt`, hold what is in flight meanwhile."""
        ...

    async def drop(self, group_id: int) -> None:
        """Forget a group: abort it if it is in flight (its `submit` is cancelled too), free its samples."""
        ...

    def wants_checkpoint(self, version: int) -> bool:
        """Return whether to call `checkpoint` now that the trainer holds `version`; asked once after each update."""
        ...

    def wants_end(self) -> str:
        """Return a reason to end the run now, or an empty string; asked about every second and after each action.

        Groups already started are trained and synced before the run ends.
        """
        ...

    async def checkpoint(self, state: Mapping[str, Any]) -> None:
        """Write trainer, state and the samples of the groups in state["finished"] as one.

        Generation continues meanwhile: take hold of the samples before the first `await`.
        """
        ...

    async def idle(self, wait: str, idle_s: float) -> float:
        """Called about every second; a place to show the wait, and to raise if a process has died.

        Args:
            wait: which role waits for which, in one line.
            idle_s: seconds since anything moved.

        Returns:
            Any number that changes while work moves, such as the tokens sampled so far: it separates slow from stuck.
        """
        ...

    def where(self, group_id: int) -> str:
        """Name of the engine that holds a group in flight, such as "rollout-0"."""
        ...


CANCEL_GRACE_S: Final = 10.0
"""Time that cancelled work gets to put things away, before the loop leaves it behind."""

T = TypeVar("T")
Settle = Callable[[Any], None]


@dataclass(frozen=True, kw_only=True)
class LoopSummary:
    """Times of a run, in seconds, by what they went to.

    Args:
        elapsed_s: from first action to Finish.
        updating_s: an update ran.
        generating_s: at least one group was in flight.
        overlap_s: both.
        syncing_s: a weight sync ran.
        checkpointing_s: a checkpoint ran.
    """

    elapsed_s: float
    updating_s: float
    generating_s: float
    overlap_s: float
    syncing_s: float
    checkpointing_s: float

    @classmethod
    def of(cls, shares: BusyShares) -> "LoopSummary":
        """Take the times of a whole run."""
        seconds = {
            kind: shares.busy_s.get(kind, 0.0) for kind in ("updating", "generating", "syncing", "checkpointing")
        }
        return cls(
            elapsed_s=shares.wall_s,
            overlap_s=shares.overlap * shares.wall_s,
            **{f"{kind}_s": spent_s for kind, spent_s in seconds.items()},
        )

    @property
    def trainer_idle_share(self) -> float:
        """Share of the time in which no update ran, in [0, 1]."""
        return 1 - self.updating_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def rollouter_idle_share(self) -> float:
        """Share of the time in which no group was in flight, in [0, 1]."""
        return 1 - self.generating_s / self.elapsed_s if self.elapsed_s else 0.0


async def run_loop(
    policy: AsyncPolicy,
    backend: LoopBackend,
    *,
    turn: TrainerTurn | None = None,
    clock: Callable[[], float] = time.monotonic,
    idle_every_s: float = 1.0,
    stop: asyncio.Event | None = None,
) -> LoopSummary:
    """Drive the policy until it finishes. Updates, generation and syncs overlap as far as the policy allows.

    Args:
        policy: new or restored; its config holds the deadlines.
        backend: does the work.
        turn: of the trainer, if the backend uses the trainer between actions too.
        clock: seconds that never go back; the judge of stalls.
        idle_every_s: time between two calls of `backend.idle`.
        stop: once it is set, nothing more is started; the update, sync or checkpoint that the trainer is at ends, and
            all groups in flight are cancelled. The policy's state is then that of a checkpoint.

    Raises:
        DeadlineError: one action passed its deadline, or nothing moved for `stall_after_s` while the trainer
            had nothing to do; names which role waits for which.
        PeerFailedError: a group was lost too often, or a process died that is not an engine's.
        Exception: whatever else the backend raises. In every case all work is cancelled and awaited first.
    """
    return await _Loop(policy, backend, turn or TrainerTurn(), clock, idle_every_s, stop or asyncio.Event()).run()


class _Loop:
    def __init__(
        self,
        policy: AsyncPolicy,
        backend: LoopBackend,
        turn: TrainerTurn,
        clock: Callable[[], float],
        idle_every_s: float,
        stop: asyncio.Event,
    ) -> None:
        self._policy, self._backend, self._turn, self._config = policy, backend, turn, policy.config
        self._clock, self._idle_every_s, self._stop = clock, idle_every_s, stop
        self._work: dict[asyncio.Task[Any], Settle] = {}  # what runs, and what its result means
        self._ended: deque[asyncio.Task[Any]] = deque()  # of the work, what has ended and is not taken in yet
        self._news = asyncio.Event()
        self._submits: dict[int, asyncio.Task[Any]] = {}  # group -> its submit
        self._losses: Counter[int] = Counter()
        self._trainer_is_at_work = False
        self._busy = BusyClock("updating", lambda: 1, clock, lambda *_: None)
        self._idle_task: asyncio.Task[float] | None = None
        self._progress = 0.0
        self._last_move = clock()
        self._next_idle = self._last_move + idle_every_s

    async def run(self) -> LoopSummary:
        try:
            while not (self._stop.is_set() or self._perform(self._policy.actions())):
                await self._wait_for_news()
            while self._must_end:
                await self._wait_for_news()
        finally:
            await self._cancel_all()
        return LoopSummary.of(self._busy.lap())

    @property
    def _must_end(self) -> bool:
        """Return whether something runs that must end: drops and checkpoints; once stopped, the trainer's work."""
        return self._trainer_is_at_work if self._stop.is_set() else bool(self._work)

    # ── performing actions ────────────────────────────────────────────────────────────────────────────────────────

    def _perform(self, actions: list[Action]) -> bool:
        """Start every action; return whether the run is over."""
        for action in actions:
            match action:
                case Submit(group_id):
                    settle = partial(self._group_came_back, group_id)
                    self._submits[group_id] = self._start(self._submit(group_id), settle)
                case Update():
                    self._start(self._update(action), self._update_finished)
                case Sync():
                    self._start(self._sync(action), lambda _: self._policy.sync_finished())
                case Drop(group_id):
                    self._cancel_submit(group_id)
                    self._start(self._drop(group_id), _nothing)
                case Finish():
                    return True
        return False

    def _start(self, work: Coroutine[Any, Any, Any], settle: Settle) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(self._noted(work))
        self._work[task] = settle
        task.add_done_callback(self._note_end)
        return task

    async def _noted(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work and note its end in the same turn of the event loop.

        A done-callback comes a turn later, in which the policy could drop a group that has come back already. The
        callback stays for errors, and for work that is cancelled before it began.
        """
        result = await work
        task = asyncio.current_task()
        assert task is not None
        self._note_end(task)
        return result

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._ended.append(task)
        self._news.set()

    async def _submit(self, group_id: int) -> GroupResult | PeerFailedError:
        try:
            with self._busy.busy("generating"):
                return await self._within(
                    self._backend.submit(group_id), f"group {group_id}", "an engine", self._config.group_deadline_s
                )
        except PeerFailedError as error:
            # A result, not a failure: of all errors this one alone does not end the run.
            return error

    async def _update(self, action: Update) -> None:
        async with self._turn_of_trainer("update", "updating"):
            work = self._backend.update(action.group_ids, action.version)
            await self._within(work, f"update {action.version}", "the trainer", self._config.update_deadline_s)

    async def _sync(self, action: Sync) -> None:
        async with self._turn_of_trainer("sync", "syncing"):
            work = self._backend.sync(action.version, action.interrupt)
            on = "the trainer and the engines"
            await self._within(work, f"sync {action.version}", on, self._config.sync_deadline_s)

    async def _checkpoint(self, state: dict[str, Any]) -> None:
        async with self._turn_of_trainer("checkpoint", "checkpointing"):
            work, on = self._backend.checkpoint(state), "the trainer and the disk"
            await self._within(work, f"checkpoint {state['version']}", on, self._config.update_deadline_s)

    @asynccontextmanager
    async def _turn_of_trainer(
        self, action: Literal["update", "sync", "checkpoint"], doing: str
    ) -> AsyncIterator[None]:
        # Outside the action's deadline: the wait for the turn, and `prepare`, which has deadlines of its own.
        async with self._turn.of_action(partial(self._backend.prepare, action)):
            self._trainer_is_at_work = True  # not before: a run that is stopped waits for no action that has not begun
            try:
                with self._busy.busy(doing):
                    yield
            finally:
                self._trainer_is_at_work = False

    async def _drop(self, group_id: int) -> None:
        await self._within(
            self._backend.drop(group_id), f"drop of group {group_id}", "an engine", self._config.group_deadline_s
        )

    async def _within(self, work: Awaitable[T], waiting: str, on: str, deadline_s: float) -> T:
        scope = asyncio.timeout(deadline_s)
        try:
            async with scope:
                return await work
        except TimeoutError as error:
            if not scope.expired():
                raise  # the backend's own
            raise DeadlineError(waiting, on, deadline_s, self._who_waits()) from error

    # ── taking in what happened ───────────────────────────────────────────────────────────────────────────────────

    async def _wait_for_news(self) -> None:
        """Take in everything that has ended, or, when nothing has for a while, see whether anything moves at all."""
        assert self._work, f"nothing runs and nothing is to be started: {self._who_waits()}"
        # It goes on without news, too: `wants_end`, `idle` and stalls are looked at about every second.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._idle_every_s):
                await self._news.wait()
        self._news.clear()
        while self._ended:
            task = self._ended.popleft()
            settle = self._work.pop(task, None)
            if settle is None:
                continue  # noted twice
            # One that the loop cancelled is passed over; in any other task a cancellation is an error.
            if settle is not _dropped:
                settle(self._result(task))
            elif not task.cancelled():
                task.exception()  # looked at, so that asyncio does not report it
            self._last_move = self._clock()
        if reason := self._backend.wants_end():
            self._policy.end_early(reason)
        self._look_for_movement()

    def _result(self, task: asyncio.Task[Any]) -> Any:
        """Return what the work returned, or raise what it raised; work that cancels itself must not look like ours."""
        if task.cancelled():
            raise PeerFailedError("backend", f"its work was cancelled, but not by the loop: {self._who_waits()}")
        return task.result()

    def _group_came_back(self, group_id: int, result: GroupResult | PeerFailedError) -> None:
        del self._submits[group_id]
        if isinstance(result, PeerFailedError):
            self._count_loss(group_id, result)
            self._policy.group_lost(group_id)
        elif result.filtered:
            self._policy.group_filtered(group_id)
        else:
            self._policy.group_finished(group_id, result.oldest_version)

    def _count_loss(self, group_id: int, error: PeerFailedError) -> None:
        self._losses[group_id] += 1
        if self._losses[group_id] > self._config.max_group_retries:
            raise PeerFailedError(
                error.peer,
                f"group {group_id} was lost {self._losses[group_id]} times, async.max_group_retries="
                f"{self._config.max_group_retries} allows no more; the last time: {error.reason}",
                error.log_tail,
            ) from error

    def _update_finished(self, _: None) -> None:
        self._policy.update_finished()
        if self._backend.wants_checkpoint(self._policy.version):
            # Before the policy's next actions, so that its turn comes before that of the next update.
            self._start(self._checkpoint(self._policy.state()), _nothing)

    def _look_for_movement(self) -> None:
        now = self._clock()
        if self._idle_task and self._idle_task.done():
            progress, self._idle_task = self._idle_task.result(), None  # raises what `idle` has raised, such as a death
            if progress != self._progress:
                self._progress, self._last_move = progress, now
        idle_s = now - self._last_move
        # What the trainer does has a deadline of its own, and may lawfully take longer than a stall.
        if idle_s >= self._config.stall_after_s and not self._turn.is_taken:
            raise DeadlineError("async loop", "anything to move", self._config.stall_after_s, self._who_waits())
        if self._idle_task is None and now >= self._next_idle:
            self._next_idle = now + self._idle_every_s
            self._idle_task = asyncio.ensure_future(self._backend.idle(self._who_waits(), idle_s))

    def _who_waits(self) -> str:
        return self._policy.describe_wait(self._backend.where)

    # ── ending ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _cancel_submit(self, group_id: int) -> None:
        """Cancel the submit of a group that is dropped; what it returns or raises means nothing any more."""
        submit = self._submits.pop(group_id, None)
        if submit is not None:
            submit.cancel()
            self._work[submit] = _dropped  # still work: the run does not end before it has ended

    async def _cancel_all(self) -> None:
        tasks = [*self._work, *([self._idle_task] if self._idle_task else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_GRACE_S)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # the run ends with the first error; the others are looked at, so asyncio says nothing
        self._work.clear()


def _nothing(_: object) -> None:
    """Do nothing: the end of this work means nothing to the policy."""


def _dropped(_: object) -> None:
    """Mark the submit of a dropped group, whose end and whose error mean nothing any more."""
