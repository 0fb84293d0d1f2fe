"""Rewards that wait without holding a thread, such as a judge: many completions at once in one process."""

import asyncio
import logging
from functools import partial

from grpo_async_app._roles.scorer import Judged, ScorerAnswer, ScorerAsk
from grpo_async_app._scoring.processes import BlockingScorers, Scorer, ScorerStarter, split
from offbeat_actors import ActorHandle, wait_gone
from offbeat_core import PeerFailedError
from offbeat_data import RewardConfig, RewardError

_log = logging.getLogger(__name__)


class WaitingScorer:
    """Scores `config.concurrency` completions side by side, each with its deadline, in one process.

    A coroutine function that holds the thread holds up all others. Then the process is ended, and whatever was under
    way in it is asked again, each alone in a process: the one that hangs costs itself.

    Args:
        alone: where that happens.
    """

    def __init__(self, config: RewardConfig, starter: ScorerStarter, alone: BlockingScorers) -> None:
        self._config, self._starter, self._gauge, self._alone = config, starter, starter.gauge, alone
        self._scorer: Scorer = starter.new()
        self._gate = asyncio.Semaphore(config.concurrency)
        self._watched: ActorHandle | None = None
        self.num_scored = 0

    async def start(self) -> None:
        """Start the process."""
        await self._started()
        self._gauge.num_scorers += 1

    async def score(self, ask: ScorerAsk) -> list[Judged]:
        """Score completions side by side."""
        return await asyncio.gather(*(self._one(each) for each in split(ask)))

    async def score_together(self, ask: ScorerAsk) -> list[Judged]:
        """Score a whole group by one call, whose result, or failure, is that of all."""
        with self._gauge.queued(len(ask.texts)):
            await self._gate.acquire()
        try:
            return await self._call(ask)
        except RewardError as error:
            return [error] * len(ask.texts)
        except PeerFailedError:
            _log.info("a scorer ended while others waited in it: a group is asked about again, alone")
        finally:
            self._gate.release()
        return await self._alone.score_together(ask)

    async def _one(self, ask: ScorerAsk) -> Judged:
        judged: Judged | None
        with self._gauge.queued():
            await self._gate.acquire()
        try:
            [judged] = await self._call(ask)
        except PeerFailedError:
            judged = None
        except RewardError as error:
            judged = error
        finally:
            self._gate.release()
        return judged or await self._alone.score_one(ask)

    async def _call(self, ask: ScorerAsk) -> list[Judged]:
        handle = await self._started()
        with self._gauge.busy(self._scorer.name):
            # The role holds each to its deadline; that the role is held up is seen by its beat.
            answers: list[ScorerAnswer] = await handle.call(
                "wait", ask, returns=list[ScorerAnswer], deadline_s=_A_DAY_S
            )
        self.num_scored += len(answers)
        return [answer.judged() for answer in answers]

    async def _started(self) -> ActorHandle:
        handle = await self._scorer.started()
        if handle is not self._watched:
            self._watched = handle
            self._starter.in_background(self._watch(handle))
        return handle

    async def _watch(self, handle: ActorHandle) -> None:
        """End the process when it does not so much as say that it lives for the time of one completion."""
        await wait_gone(handle, partial(handle.call, "beat"), self._config.timeout_s)
        if not self._starter.is_closed:
            self._scorer.start_again()


_A_DAY_S = 86400.0
"""Longer than any queue before a judge's rate limit."""
