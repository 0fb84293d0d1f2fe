"""Scoring of a run: every reward is asked where it belongs, and what cannot be scored is counted and bounded."""

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from grpo_async_app._roles.scorer import Judged, ScorerAsk, ScorerTraits
from grpo_async_app._scoring.error_share import ErrorShare
from grpo_async_app._scoring.processes import BlockingScorers, ScorerStarter, zero_score
from grpo_async_app._scoring.scoring_metrics import ScoringMetrics
from grpo_async_app._scoring.waiting import WaitingScorer
from offbeat_actors import ClusterConfig, Notify
from offbeat_core import Metrics, OffbeatError, printable
from offbeat_data import CompletionText, Prompt, RewardConfig, RewardError, RewardScore

_logger = logging.getLogger(__name__)

_MOST_KEPT: Final = 20
"""Tracebacks in the log."""


def _log_beside(errors: Path, scorer: str) -> Path:
    """Return the log of one scorer, such as scorer-0-math.log beside reward_errors-math.log."""
    return errors.with_name(f"{scorer}{errors.stem.removeprefix('reward_errors')}.log")


class Scores(Protocol):
    """A reward model in processes of its own: (prompt, texts) to the score of each, before any weight."""

    async def __call__(self, prompt: Prompt, texts: Sequence[str]) -> list[Judged]: ...


class ScorerPool:
    """Scores completions: in processes, in one process that waits, and by a reward model, all at once.

    Scorers run beside the driver, also where other roles run on other machines: a user's functions lie here.

    Args:
        config: the `reward` section.
        cluster: how long a scorer may take to start, which imports what the reward needs.
        log: takes the first tracebacks of completions that could not be scored; what scorers print is beside it. None:
            neither is kept.
        reward_model: asks it, where `config` names one.
        notify: takes a line when a scorer first prints.

    Attributes:
        last_error: why the latest completion that could not be scored was not; empty when all were.
    """

    def __init__(
        self,
        config: RewardConfig,
        cluster: ClusterConfig,
        log: Path | None = None,
        reward_model: Scores | None = None,
        notify: Notify = _logger.warning,
    ) -> None:
        self._config, self._log, self._reward_model = config, log, reward_model
        self._gauge = ScoringMetrics()
        log_of = partial(_log_beside, log) if log else None
        self.starter = ScorerStarter(config, cluster, self._gauge, log_of, notify)
        self._blocking = BlockingScorers(config, self.starter)
        self._waiting: WaitingScorer | None = None
        self._lanes: list[Callable[[ScorerAsk], Awaitable[list[Judged]]]] = []
        self._failed = ErrorShare("reward.max_error_share", config.max_error_share)
        self._num_kept, self._num_by_model = 0, 0
        self.last_error = ""

    async def start(self) -> None:
        """Start a scorer, and another where rewards wait; raises as `BlockingScorers.start`."""
        if set(self._config.all_weights) == {"reward_model"}:
            return
        traits = await self._blocking.start()
        if traits.waiting:
            self._waiting = WaitingScorer(self._config, self.starter, self._blocking)
            await self._waiting.start()
        self._lanes = list(self._plan_lanes(traits))

    async def close(self) -> None:
        """End the scorers without waiting for a slow verifier: what is being scored, or waits for it, raises."""
        await self.starter.close()

    def kill(self) -> None:
        """End every scorer now."""
        self.starter.kill()

    @property
    def num_scored(self) -> int:
        """Completions that were judged, each counted at once, whatever came of it; it distinguishes slow from stuck."""
        waiting = self._waiting.num_scored if self._waiting is not None else 0
        return self._blocking.num_scored + waiting + self._num_by_model

    def metrics(self) -> Metrics:
        """Since this was last asked: queue, busy share and latencies; costs of judges since the beginning."""
        return self._gauge.lap()

    async def score(self, prompt: Prompt, written: Sequence[CompletionText]) -> list[RewardScore | None]:
        """Score completions of one prompt: as `reward.on_error` says, None or a score of 0 for one that cannot be.

        Raises:
            RewardError, DataError: as `judge`, when such completions are too many or none is allowed.
        """
        return [self._counted(each) for each in await self._judged(prompt, written)]

    async def judge(self, prompt: Prompt, completion: str) -> RewardScore:
        """Score one completion; one that takes too long gets 0 and has the part `timed_out` 1.

        Raises:
            RewardError: a user's function raised or returned no finite number (with the traceback as a note), the
                scorer died twice over it, or this is closed.
            DataError: the prompt lacks what a reward compares with.
        """
        [judged] = await self._judged(prompt, [CompletionText(text=completion)])
        if isinstance(judged, RewardScore):
            return judged
        raise judged

    def _plan_lanes(self, traits: ScorerTraits) -> "list[Callable[[ScorerAsk], Awaitable[list[Judged]]]]":
        """Rewards that are asked alike are asked together."""
        lanes: list[Callable[[ScorerAsk], Awaitable[list[Judged]]]] = []
        for names, scorers in ((traits.blocking, self._blocking), (traits.waiting, self._waiting)):
            if scorers is None:
                continue
            groups = {
                "alone": [name for name in names if name not in traits.grouping],
                "split": [name for name in names if name in traits.grouping and name not in traits.comparing],
                "whole": [name for name in names if name in traits.comparing],
            }
            lanes += [partial(self._ask, scorers, kind, own) for kind, own in groups.items() if own]
        return lanes

    async def _ask(
        self, scorers: BlockingScorers | WaitingScorer, kind: str, names: list[str], ask: ScorerAsk
    ) -> list[Judged]:
        """Ask some rewards. What takes groups is asked for a group, and one by one where that fails and may be."""
        ask = replace(ask, names=names)
        if kind == "alone" or len(ask.texts) == 1:
            return await scorers.score(ask)
        judged = await scorers.score_together(ask)
        is_sound = not any(isinstance(each, OffbeatError) or each.parts.get("timed_out") for each in judged)
        return judged if is_sound or kind == "whole" else await scorers.score(ask)

    async def _judged(self, prompt: Prompt, written: Sequence[CompletionText]) -> list[Judged]:
        if self.starter.is_closed:
            raise RewardError("scoring has ended: this reward is closed")
        needs_ids = any(":" in name for name in self._config.all_weights)
        ask = ScorerAsk(
            prompt=prompt.to_json(),
            texts=[each.text for each in written],
            ids=[list(map(int, each.ids)) for each in written] if needs_ids else [],
            names=[],
        )
        with self._gauge.scoring(len(written)):
            lanes = [lane(ask) for lane in self._lanes]
            if self._reward_model is not None:
                lanes.append(self._ask_model(self._reward_model, prompt, ask.texts))
            found = await asyncio.gather(*lanes)
        return [self._together(each) for each in zip(*found, strict=True)]

    async def _ask_model(self, model: Scores, prompt: Prompt, texts: list[str]) -> list[Judged]:
        judged = await model(prompt, texts)
        self._num_by_model += len(judged)
        weight = self._config.all_weights["reward_model"]
        return [replace(each, value=weight * each.value) if isinstance(each, RewardScore) else each for each in judged]

    def _together(self, judged: Sequence[Judged]) -> Judged:
        """Return the sum of what different rewards say to one completion; the first error where there is one."""
        scores = []
        for each in judged:
            if isinstance(each, OffbeatError):
                return each
            self._gauge.add_costs(each.costs)
            scores.append(each)
        if any(score.parts.get("timed_out") for score in scores):
            return zero_score(self._config, "timed_out")
        parts = {name: part for score in scores for name, part in score.parts.items()}
        value, own = sum(score.value for score in scores), {name: parts[name] for name in self._config.all_weights}
        if complaint := self._config.range_complaint(value, own):
            return RewardError(complaint)
        return RewardScore(value=value, parts=parts)

    def _counted(self, judged: Judged) -> RewardScore | None:
        if isinstance(judged, OffbeatError) and self.starter.is_closed:
            raise judged
        if isinstance(judged, RewardScore):
            self._failed.add(failed=False)
            return judged
        self._count_failed(judged)
        return zero_score(self._config, "failed") if self._config.on_error == "zero" else None

    def _count_failed(self, error: OffbeatError) -> None:
        """Raises RewardError when too many could not be scored, or the error where `reward.on_error` allows none."""
        self._failed.add(failed=True)
        self.last_error = str(error)
        self._keep(error)
        if self._config.on_error == "fail":
            raise error
        if complaint := self._failed.complaint("completions could not be scored"):
            where = f"; tracebacks in {self._log}" if self._log else ""
            raise RewardError(f"{complaint}; the latest: {error}{where}") from error

    def _keep(self, error: OffbeatError) -> None:
        if self._log is None or self._num_kept >= _MOST_KEPT:
            return
        self._num_kept += 1
        with self._log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(printable("".join(traceback.format_exception_only(error))) + "\n")
