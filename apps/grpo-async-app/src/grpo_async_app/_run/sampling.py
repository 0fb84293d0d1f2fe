"""Samples of one prompt, scored: a completion each or, with an environment or an agent, an episode each."""

import asyncio
from collections import Counter
from collections.abc import Awaitable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count

from grpo_async_app._config.resolved import Environment, Judge, ResolvedRun
from grpo_async_app._fleet.agents import AgentFailedError, Agents
from grpo_async_app._fleet.fleet import Fleet
from grpo_async_app._scoring.error_share import ErrorShare
from offbeat_actors import gather_or_cancel
from offbeat_async_policy import Busy
from offbeat_core import (
    Completion,
    DataError,
    GenerateRequest,
    Ids,
    Image,
    OffbeatError,
    Trajectory,
)
from offbeat_data import (
    CompletionText,
    EnvironmentFailedError,
    EpisodeLimits,
    Prompt,
    RewardScore,
    play_episode,
)


class EpisodesLostError(OffbeatError):
    """More episodes of agents or environments came to nothing than the settings allow."""


TURN_SEEDS = 1 << 36
"""Turn t draws with the seed of its sample plus t times this: far beyond the seeds of other groups."""


@dataclass(frozen=True, kw_only=True)
class ScoredSample:
    """One sample and its score.

    Args:
        trajectories: what is trained on; several where an agent has branched, all with this score.
        score: of the whole.
        answer: text that the `reward` section scores, or would: what the model said last, or what an agent printed.
    """

    trajectories: tuple[Trajectory, ...]
    score: RewardScore
    answer: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(trajectory.num_tokens for trajectory in self.trajectories)

    @property
    def num_turns(self) -> int:
        return sum(len(trajectory.turns) for trajectory in self.trajectories)

    @property
    def is_cut_off(self) -> bool:
        """Return whether a limit has ended any of its trajectories."""
        return any(trajectory.ended != "done" for trajectory in self.trajectories)


class Rollouts:
    """Samples and scores on the fleet.

    Args:
        run: with the templates of its environments.
        fleet: of the run.
        busy: wraps each use of the rollout engine it is called with.

    Attributes:
        left_out: samples that are not trained on, by the metric that counts them: their environment or reward failed,
            or the engine did not let them come to an end.
        last_left_out: why the latest of them was left out.
    """

    def __init__(
        self,
        run: ResolvedRun,
        fleet: Fleet,
        busy: Busy = lambda _: nullcontext(),
    ) -> None:
        config = run.config
        self._fleet, self._templates, self._busy = fleet, run.templates, busy
        self._deadline_s = config.async_.group_deadline_s
        self._agents = Agents(config, fleet.engines, fleet.agent, busy) if config.agent.is_set else None
        self._reward = config.reward
        self._agents_lost = ErrorShare("agent.max_error_share", config.agent.max_error_share)
        self._lost = {
            each: ErrorShare("environment.max_error_share", each.settings.max_error_share) for each in run.environments
        }
        self.left_out: Counter[str] = Counter()
        self.last_left_out = ""

    async def sample(
        self, name: str, prompt: Prompt, request: GenerateRequest, judge: Judge, environment: Environment
    ) -> list[ScoredSample]:
        """Sample and score.

        Args:
            name: of the engine.
            prompt: whose images the request gets here.
            request: for the first turn of all samples; its limit of tokens is for each later turn too.
            judge: scores what the environment does not.
            environment: answers the model, if it is set.

        Returns:
            In order; fewer than asked for where environments or rewards failed or samples were aborted: counted.
        """
        if self._agents is not None:
            plays = [
                self._act(self._agents, name, prompt, request, index, judge) for index in range(request.num_samples)
            ]
            return [sample for sample in await gather_or_cancel(plays) if sample is not None]
        if prompt.pictures:
            # In a thread: reading pictures would hold up all other groups in the event loop.
            request = replace(request, images=await asyncio.to_thread(lambda: prompt.images))
        if not environment.is_set:
            completions = self._ended(await self._generate(name, request))
            scores = await self._scores(prompt, completions, judge)
            return [
                ScoredSample(trajectories=(Trajectory.of(completion),), score=score, answer=completion.text)
                for completion, score in zip(completions, scores, strict=True)
                if score is not None
            ]
        # All samples begin with one request, so that an engine computes their prompt once; then each goes its own way.
        max_tokens = min(request.params.max_tokens, environment.settings.max_tokens)
        request = replace(request, params=replace(request.params, max_tokens=max_tokens))
        first = asyncio.ensure_future(self._generate(name, request))
        try:
            play = [
                self._play(name, prompt, request, index, first, judge, environment)
                for index in range(request.num_samples)
            ]
            return [sample for sample in await gather_or_cancel(play) if sample is not None]
        finally:
            first.cancel()  # an episode that fails at once may leave it running

    async def _play(
        self,
        name: str,
        prompt: Prompt,
        request: GenerateRequest,
        index: int,
        first: Awaitable[list[Completion]],
        judge: Judge,
        environment: Environment,
    ) -> ScoredSample | None:
        """Play one episode; None when its environment or its reward failed.

        Raises:
            EpisodesLostError: too many have failed.
        """
        template = self._templates[environment]
        limits = EpisodeLimits.of(environment.settings, request.params.max_tokens)
        turns = count()

        async def sample(context_ids: Ids, images: tuple[Image, ...], max_tokens: int) -> Completion:
            turn = next(turns)
            if not turn:
                return (await asyncio.shield(first))[index]  # one that is cancelled must not end it for others
            later = _later_turn(request, context_ids, images, index, turn, max_tokens)
            [completion] = await self._generate(name, later)
            return completion

        try:
            async with self._fleet.environments[environment].episode(prompt) as episode:
                trajectory = await play_episode(prompt.ids, sample, episode.step, template, limits)
                # An aborted last turn is no end that could be scored, and no fault of the environment.
                if not self._ended([trajectory.turns[-1]]):
                    return None
                score = await episode.finish()
        except EnvironmentFailedError as error:
            self._lose(self._lost[environment], f"environment/{error.reason}", str(error))
            return None
        except DataError as error:  # it said what is no text, or in a role that the chat template refuses
            self._lose(self._lost[environment], "environment/unreadable", str(error))
            return None
        if score is None:
            self._lost[environment].add(failed=False)  # failures are counted among the last episodes
            [score] = await self._scores(prompt, [trajectory.turns[-1]], judge)
        else:
            score = self._taken(score, self._lost[environment], "its environment gave")
        if score is None:
            return None
        return ScoredSample(trajectories=(trajectory,), score=score, answer=trajectory.turns[-1].text)

    async def _act(
        self, agents: Agents, name: str, prompt: Prompt, request: GenerateRequest, index: int, judge: Judge
    ) -> ScoredSample | None:
        """Play one episode of an agent; None when it came to no end, or its reward failed. Raises as `_play`."""
        try:
            recorded = await agents.play(name, prompt, request, index)
        except AgentFailedError as error:
            self._lose(self._agents_lost, f"agent/{error.reason}", str(error))
            return None
        if recorded.num_aborted:
            self.skip("rollout/aborted", f"an engine ended {recorded.num_aborted} calls of an agent")
            return None
        if recorded.reward is not None:
            posted = RewardScore(value=recorded.reward, parts=recorded.reward_parts)
            judged = self._taken(posted, self._agents_lost, "its agent posted")
        else:
            self._agents_lost.add(failed=False)
            [judged] = await self._score(prompt, [CompletionText(text=recorded.answer)], judge)
        if judged is None:
            return None
        return ScoredSample(trajectories=recorded.trajectories, score=judged, answer=recorded.answer)

    async def _scores(self, prompt: Prompt, completions: list[Completion], judge: Judge) -> list[RewardScore | None]:
        return await self._score(
            prompt, [CompletionText(text=each.text, ids=each.ids.tolist()) for each in completions], judge
        )

    async def _score(self, prompt: Prompt, written: list[CompletionText], judge: Judge) -> list[RewardScore | None]:
        scores = await self._fleet.score(prompt, written, judge)
        if failed := scores.count(None):
            self.skip("reward/dropped", self._fleet.last_reward_error, failed)
        return scores

    def _ended(self, completions: list[Completion]) -> list[Completion]:
        """Return those that are complete: what an engine has aborted is no answer, and is not scored."""
        ended = [completion for completion in completions if completion.stop_reason != "aborted"]
        for completion in completions:
            if completion.stop_reason == "aborted":
                self.skip("rollout/aborted", f"an engine ended a sample after {len(completion.ids)} tokens")
        return ended

    def _taken(self, score: RewardScore, lost: ErrorShare, by: str) -> RewardScore | None:
        """Return the reward that an episode has brought along; None, and counted, where it cannot be right."""
        if complaint := self._reward.range_complaint(score.value, score.parts):
            self._lose(lost, "reward/dropped", f"{by} a reward that is not taken: {complaint}")
            return None
        lost.add(failed=False)
        return score

    def _lose(self, lost: ErrorShare, metric: str, why: str) -> None:
        """Leave out an episode that came to nothing, and end the run where too many do."""
        self.skip(metric, why)
        lost.add(failed=True)
        if complaint := lost.complaint("episodes came to nothing"):
            raise EpisodesLostError(f"{complaint}; the latest: {why}")

    def skip(self, metric: str, why: str, num_samples: int = 1) -> None:
        self.left_out[metric] += num_samples
        self.last_left_out = why

    async def _generate(self, name: str, request: GenerateRequest) -> list[Completion]:
        with self._busy(name):
            return await self._fleet.engines.generate(name, request, self._deadline_s)


def _later_turn(
    request: GenerateRequest, context_ids: Ids, images: tuple[Image, ...], index: int, turn: int, max_tokens: int
) -> GenerateRequest:
    """Return the request for one more turn of one sample, with the images of the first turn and those since."""
    params = request.params
    seed = None if params.seed is None else params.seed + index + turn * TURN_SEEDS
    return replace(
        request,
        request_id=f"{request.request_id}-{index}-{turn}",
        prompt_ids=context_ids,
        images=(*request.images, *images),
        num_samples=1,
        params=replace(params, max_tokens=max_tokens, seed=seed),
    )
