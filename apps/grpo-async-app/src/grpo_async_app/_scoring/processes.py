"""Scorers that are processes: one completion at a time in each, ended and replaced when it takes too long.

A completion may ask a verifier for 10**10**10, or send a user's regular expression into the woods. No thread can be
stopped and math-verify's own timeouts need the main thread, so scoring happens where it can be ended.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

from grpo_async_app._roles.scorer import AT_A_TIME_S, Judged, ScorerAnswer, ScorerAsk, ScorerTraits
from grpo_async_app._scoring.scoring_metrics import ScoringMetrics
from offbeat_actors import (
    ActorHandle,
    ClusterConfig,
    LocalLauncher,
    Notify,
    RoleOnCall,
    RolePlace,
    RoleSpec,
)
from offbeat_core import DeadlineError, OffbeatError, PeerFailedError, RoleName
from offbeat_data import RewardConfig, RewardError, RewardScore

T = TypeVar("T")

_SLOW_S: Final = 0.5
"""A completion that waits as long for a scorer gets one of its own: a quick reward is served by one."""
_KILL_EVERY_S: Final = 0.1
_LOG_BYTES: Final = 4 << 20
"""Longest beginning of a scorer's log: a reward is called thousands of times, and its first calls show what it says."""


class ScorerStarter:
    """Starts the processes that score, and ends them all.

    Args:
        log_of: the file of a scorer's output, by its name; None: it is not kept.
        notify: takes a line when a scorer first prints.

    Attributes:
        gauge: of all of them.
        is_closed: nothing is started any more.
    """

    def __init__(
        self,
        config: RewardConfig,
        cluster: ClusterConfig,
        gauge: ScoringMetrics,
        log_of: Callable[[str], Path] | None,
        notify: Notify,
    ) -> None:
        self._config, self.gauge, self.is_closed = config, gauge, False
        self._log_of, self._notify, self._has_notified = log_of, notify, False
        self._launcher, self._numbers = LocalLauncher("grpo", cluster, on_output=self._show), count()
        self._tasks: set[asyncio.Task[Any]] = set()

    def new(self) -> "Scorer":
        """Return a scorer, not yet started."""
        role = RoleName("scorer", next(self._numbers))
        spec = RoleSpec(
            role=role,
            target="grpo_async_app._roles.scorer:ScorerRole",
            kwargs={"config": self._config},
            main_thread=True,
            log_path=self._log_of(str(role)) if self._log_of else None,
            max_log_bytes=_LOG_BYTES,
        )
        return Scorer(RoleOnCall(self._launcher, spec), self)

    def _show(self, name: str, beginning: str) -> None:
        """Show once that rewards print, and how that begins."""
        if not self._has_notified:
            self._has_notified = True
            where = (
                f"; all that rewards print is in {self._log_of(name).with_name('scorer-*.log')}" if self._log_of else ""
            )
            self._notify(f"{name} prints: {beginning}{where}")

    def in_background(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        """Take the result of a call whose caller may be gone, as when a run ends."""
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def places(self) -> list[RolePlace]:
        """Return where each scorer is: on the driver's machine."""
        return self._launcher.places()

    def see(self, name: str) -> str:
        """Return the end of an error: the file with what a scorer has said; empty where that is not kept."""
        return f"; see {self._log_of(name)}" if self._log_of else ""

    def kill(self) -> None:
        """End every scorer now."""
        self._launcher.kill()

    async def close(self) -> None:
        """End the scorers without waiting for a slow verifier: what is being scored, or waits for it, raises."""
        self.is_closed = True
        self.kill()
        while self._tasks:  # one may just be starting another process
            await asyncio.wait(self._tasks, timeout=_KILL_EVERY_S)
            self.kill()
        await self._launcher.close()


class Scorer:
    """One scorer through all its processes."""

    def __init__(self, role: RoleOnCall, starter: ScorerStarter) -> None:
        self.name, self._role, self._starter = role.name, role, starter

    async def started(self) -> ActorHandle:
        """Its process; raises RewardError where it died before it was ready, or scoring has ended."""
        if self._starter.is_closed:
            raise RewardError("scoring has ended: this reward is closed")
        try:
            return await self._role.start()
        except PeerFailedError as error:
            if self._starter.is_closed:  # which has ended it
                raise RewardError("scoring has ended: this reward is closed") from error
            raise RewardError(
                f"{self.name}: {error.reason} before it was ready{self._starter.see(self.name)}"
            ) from error

    async def call(self, method: str, ask: ScorerAsk, deadline_s: float) -> list[ScorerAnswer]:
        """Call it, started or not; it is gone when DeadlineError is raised."""
        answers: list[ScorerAnswer] = await self._role.call(
            method, ask, returns=list[ScorerAnswer], deadline_s=deadline_s
        )
        return answers

    def died(self, error: PeerFailedError, ask: ScorerAsk) -> RewardError:
        """Return the error for a process that ended while it scored a completion."""
        index = json.loads(ask.prompt)["index"]
        return RewardError(f"{self.name}: {error.reason} on prompt {index}{self._starter.see(self.name)}")

    def start_again(self) -> None:
        """Start another process in the background; should that fail, the next call tries again."""
        self._starter.gauge.num_restarts += 1
        self._starter.in_background(self._start_quietly())

    async def _start_quietly(self) -> None:
        with contextlib.suppress(OffbeatError):
            await self.started()


class BlockingScorers:
    """Scores in up to `config.num_processes` scorers: one at first, others when completions wait.

    Attributes:
        num_scored: completions judged, each counted at once, whatever came of it; it distinguishes slow from stuck.
    """

    def __init__(self, config: RewardConfig, starter: ScorerStarter) -> None:
        self._config, self._starter, self._gauge = config, starter, starter.gauge
        self._idle: asyncio.Queue[Scorer] = asyncio.Queue()
        self._gate = asyncio.Semaphore(config.num_processes)
        self._is_quick, self._num_scorers, self.num_scored = True, 0, 0

    async def start(self) -> ScorerTraits:
        """Start a scorer, which is idle then, and return how it may be asked.

        Raises:
            ConfigError, BackendError: as `build_reward`.
            RewardError: it died while it started.
            DeadlineError: it did not start in time.
        """
        self._num_scorers += 1
        self._gauge.num_scorers += 1
        scorer = self._starter.new()
        try:
            handle = await scorer.started()
            traits: ScorerTraits = await handle.call("traits", returns=ScorerTraits)
        except BaseException:
            self._num_scorers -= 1
            self._gauge.num_scorers -= 1
            raise
        self._idle.put_nowait(scorer)
        return traits

    async def score(self, ask: ScorerAsk) -> list[Judged]:
        """Score completions one by one: all by one call where that is quick."""
        judged = await self._first(ask) if self._is_quick and len(ask.texts) > 1 else []
        return judged + await asyncio.gather(*(self.score_one(each) for each in split(ask)[len(judged) :]))

    async def score_together(self, ask: ScorerAsk) -> list[Judged]:
        """Score a whole group by one call, whose result, or failure, is that of all."""
        try:
            return await self._group("score_together", ask, self._config.timeout_s)
        except DeadlineError:
            return [zero_score(self._config, "timed_out")] * len(ask.texts)
        except RewardError as error:
            return [error] * len(ask.texts)

    async def score_one(self, ask: ScorerAsk) -> Judged:
        """Score the only completion of `ask`; one that takes too long gets 0 and has the part `timed_out` 1."""
        with self._gauge.queued():
            await self._gate.acquire()
            try:
                scorer = await self._take()
            except RewardError as error:
                self._gate.release()
                return error
            except BaseException:
                self._gate.release()
                raise
        try:
            # Cancelling leaves the scorer at work: it is idle when it has answered, or is ended at the deadline.
            return await asyncio.shield(self._starter.in_background(self._ask(scorer, ask)))
        except RewardError as error:
            return error
        finally:
            self._gate.release()

    async def _first(self, ask: ScorerAsk) -> list[Judged]:
        """Score by one call the first of them, or all if they are quick; none where one hangs or ends the scorer."""
        try:
            return await self._group("score", ask, self._config.timeout_s + AT_A_TIME_S)
        except (DeadlineError, RewardError):
            return []

    async def _group(self, method: str, ask: ScorerAsk, deadline_s: float) -> list[Judged]:
        async with self._gate:
            with self._gauge.queued(len(ask.texts)):
                scorer = await self._take()
            return await asyncio.shield(self._starter.in_background(self._ask_group(scorer, method, ask, deadline_s)))

    async def _take(self) -> Scorer:
        """Return a scorer that is idle; after a while a new one is started, if there may be more."""
        if not self._idle.empty():
            return self._idle.get_nowait()
        if self._num_scorers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SLOW_S):
                    return await self._idle.get()
        if self._num_scorers < self._config.num_processes:
            await asyncio.shield(self._starter.in_background(self.start()))
        return await self._idle.get()

    async def _ask(self, scorer: Scorer, ask: ScorerAsk) -> Judged:
        """Ask a scorer, and its next process where it dies: it may have been killed from outside."""
        try:
            for is_last in (False, True):
                try:
                    [answer] = await self._call(scorer, "score", ask, self._config.timeout_s)
                    return answer.judged()
                except DeadlineError:
                    self.num_scored += 1
                    scorer.start_again()
                    return zero_score(self._config, "timed_out")
                except PeerFailedError as error:
                    if is_last:
                        self.num_scored += 1
                        scorer.start_again()
                        raise scorer.died(error, ask) from error
        finally:
            self._idle.put_nowait(scorer)
        raise AssertionError  # the last attempt returns or raises

    async def _ask_group(self, scorer: Scorer, method: str, ask: ScorerAsk, deadline_s: float) -> list[Judged]:
        try:
            return [each.judged() for each in await self._call(scorer, method, ask, deadline_s)]
        except DeadlineError:
            scorer.start_again()
            raise
        except PeerFailedError as error:
            scorer.start_again()
            raise scorer.died(error, ask) from error
        finally:
            self._idle.put_nowait(scorer)

    async def _call(self, scorer: Scorer, method: str, ask: ScorerAsk, deadline_s: float) -> list[ScorerAnswer]:
        await scorer.started()  # what goes wrong here is no fault of a completion
        start_s = time.monotonic()
        with self._gauge.busy(scorer.name):
            answers = await scorer.call(method, ask, deadline_s)
        self._is_quick = time.monotonic() - start_s < AT_A_TIME_S
        self.num_scored += len(answers)
        return answers


def split(ask: ScorerAsk) -> list[ScorerAsk]:
    """Return one for each completion."""
    ids = [[each] for each in ask.ids] or [[]] * len(ask.texts)
    return [replace(ask, texts=[text], ids=each) for text, each in zip(ask.texts, ids, strict=True)]


def zero_score(config: RewardConfig, part: str) -> RewardScore:
    return RewardScore(value=0.0, parts={**dict.fromkeys(config.all_weights, 0.0), part: 1.0})
