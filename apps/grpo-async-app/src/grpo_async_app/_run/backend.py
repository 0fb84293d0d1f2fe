"""The work of the asynchronous loop: groups sampled and scored, updates, syncs, checkpoints, validation."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from grpo_async_app._config.resolved import ResolvedRun
from grpo_async_app._fleet.fleet import Fleet
from grpo_async_app._preflight.data import mark_of
from grpo_async_app._roles.groups import SampledGroup, save_groups
from grpo_async_app._run.ending import EarlyEnd, SamplesLostError, UntrainedGroups
from grpo_async_app._run.first_look import look_at_mismatch
from grpo_async_app._run.log.activity import Activity, RunView
from grpo_async_app._run.log.run_logger import RunLogger
from grpo_async_app._run.prompt_stream import PromptDraw, PromptStream
from grpo_async_app._run.sampling import Rollouts, ScoredSample
from grpo_async_app._run.validation import OutdatedError, validate
from offbeat_async_policy import AsyncPolicy, BusyClock, GroupResult, TrainerTurn
from offbeat_core import ConfigError, GenerateRequest, Metrics, OffbeatError, RoleName, SamplingParams
from offbeat_data import Prompt
from offbeat_objectives import has_signal, overlong_penalty
from offbeat_run import RunFolder, clock_s

LOOP_FOLDER = "loop"
"""Folder beside the model in a checkpoint: what the loop resumes from. Readers do not take a folder for weights."""
STATE_FILE = "state.json"
T = TypeVar("T")
_TRAINER: Final = str(RoleName("trainer"))
"""Name of all ranks of the trainer on the clock and in the timeline."""


class GrpoBackend:
    """Performs the policy's actions on the fleet: implements `offbeat_async_policy.LoopBackend`.

    Must be made inside a running event loop.

    Args:
        run: with its prompts and validation sets.
        policy: driven by the loop; only read here.
        stream: says which prompt each group is about.
        folder: of the run.
        logger: takes metrics, generations, timeline and progress.
        groups: finished groups of a restored run.
        turn: of the trainer, which weights of late engines take between two actions.
        early_end: says whether the run should end before its data does.

    Attributes:
        saved_version: policy version of the latest checkpoint; 0 before there is one.
    """

    def __init__(
        self,
        run: ResolvedRun,
        fleet: Fleet,
        policy: AsyncPolicy,
        *,
        stream: PromptStream,
        folder: RunFolder,
        logger: RunLogger,
        groups: dict[int, SampledGroup] | None = None,
        turn: TrainerTurn,
        early_end: EarlyEnd,
    ) -> None:
        self._run, self._config, self._fleet, self._policy = run, run.config, fleet, policy
        self._stream, self._folder, self._logger = stream, folder, logger
        self._groups = groups or {}
        self._where: dict[int, str] = {}
        self._validating: asyncio.Task[None] | None = None
        self._last_asked = -1  # version of the weights that a validation was last begun for
        self._trainer_version = self.saved_version = policy.version
        self._clock = BusyClock(_TRAINER, lambda: len(fleet.engines.names), clock_s, self._note_worked)
        self._rollouts = Rollouts(run, fleet, self._clock.busy)
        self._turn, self._early_end, self._end_wish = turn, early_end, ""
        self._untrained = UntrainedGroups()
        self._trained, self._num_validated, self._is_saving = "", 0, False
        self._last_update: tuple[list[SampledGroup], int] | None = None
        self._alarming: list[SampledGroup] = []  # in the update that has raised the alarm about a mismatch
        self._late_syncs = asyncio.create_task(self._sync_late_engines())

    # ── rollouter ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def submit(self, group_id: int) -> GroupResult:
        draw = self._stream.draw(group_id)
        name = self._where[group_id] = self._fleet.engines.least_loaded().name
        with self._fleet.engines.hold(name):
            samples = await self._sample(group_id, draw, name)
            greedy = await self._sample_greedy(group_id, draw, name)
        return await self._take_in(group_id, draw, samples, greedy)

    async def _take_in(
        self, group_id: int, draw: PromptDraw, samples: list[ScoredSample], greedy: ScoredSample | None
    ) -> GroupResult:
        """Keep a group for training, unless its samples teach nothing or cannot be trained on."""
        samples = self._with_all_parts(samples)
        if not self._can_be_compared(samples, greedy):
            self._untrained.note(trained=False, lost=True)
            return GroupResult(oldest_version=self._policy.version, filtered=True)
        # Before the filter: a curriculum counts how groups fare that are not trained on as well.
        self._stream.record(draw, [sample.score.value for sample in samples])
        group = self._group(group_id, draw, samples, greedy)
        may_filter = self._config.algorithm.filter_groups and not group.flaw
        filtered = may_filter and not self._has_signal(samples, greedy)
        group = group if filtered else await self._taught(group)
        if group.flaw:
            self._rollouts.skip("rollout/untrainable", f"group {group_id} has {group.flaw}", len(group.rewards))
            self._logger.left_out(self._rollouts.left_out, self._rollouts.last_left_out)
            filtered = True
        if not filtered:
            self._groups[group_id] = group
        self._untrained.note(trained=not filtered, lost=bool(group.flaw))
        return GroupResult(oldest_version=group.oldest_version, filtered=filtered)

    def _has_signal(self, samples: list[ScoredSample], greedy: ScoredSample | None) -> bool:
        """Return whether a group teaches anything, by its rewards before anything is taken off for length."""
        return has_signal(
            [sample.score.value for sample in samples],
            self._config.algorithm,
            parts=[sample.score.parts for sample in samples],
            weights=self._config.reward.all_weights if self._config.reward.is_set else {},
            greedy_reward=greedy.score.value if greedy else None,
            masked=[sample.is_cut_off for sample in samples] if self._config.algorithm.mask_truncated else (),
        )

    async def _taught(self, group: SampledGroup) -> SampledGroup:
        """Return the group with what the teacher has to say to it, where there is one."""
        if (teachers := self._fleet.teachers) is None:
            return group

        def where(name: str) -> None:
            self._where[group.group_id] = name

        images = await asyncio.to_thread(lambda: tuple(picture.pixels() for picture in group.pictures))
        logprobs = await teachers.score(group.group_id, group.prompt_ids, group.trajectories, where, images)
        return replace(group, teacher_logprobs=logprobs)

    async def _sample(self, group_id: int, draw: PromptDraw, name: str) -> list[ScoredSample]:
        params = self._config.rollout.sampling(self._seed(group_id))
        request = GenerateRequest(
            request_id=f"group-{group_id}",
            prompt_ids=draw.prompt.ids,
            num_samples=self._config.rollout.samples_per_prompt,
            params=params,
        )
        return await self._ask(draw, name, request)

    async def _ask(self, draw: PromptDraw, name: str, request: GenerateRequest) -> list[ScoredSample]:
        return await self._rollouts.sample(name, draw.prompt, request, draw.source.judge, draw.source.environment)

    async def _sample_greedy(self, group_id: int, draw: PromptDraw, name: str) -> ScoredSample | None:
        """Return the greedy sample that ReMax compares with; None for other advantages, or where it has failed."""
        if not self._config.algorithm.needs_greedy_reward:
            return None
        rollout = self._config.rollout
        params = SamplingParams(max_tokens=rollout.max_tokens, temperature=0.0, stop=tuple(rollout.stop))
        request = GenerateRequest(request_id=f"greedy-{group_id}", prompt_ids=draw.prompt.ids, params=params)
        samples = await self._ask(draw, name, request)
        return samples[0] if samples else None

    def _with_all_parts(self, samples: list[ScoredSample]) -> list[ScoredSample]:
        """Return the samples that can be trained on; GDPO learns from each reward by its name.

        An agent or an environment may give a reward of its own, without parts or with others.
        """
        if self._config.algorithm.advantage != "gdpo":
            return samples
        names = [name for name, weight in self._config.reward.all_weights.items() if weight]
        found = []
        for sample in samples:
            if missing := [name for name in names if name not in sample.score.parts]:
                why = (
                    f"a reward with the parts {', '.join(sample.score.parts) or 'none'}, where algorithm.advantage = "
                    f"gdpo learns from each that reward.weights names: it lacks {', '.join(missing)}; let the agent or "
                    "the environment give them, or leave the reward to section reward"
                )
                self._rollouts.skip("reward/missing_parts", why)
            else:
                found.append(sample)
        return found

    def _can_be_compared(self, samples: list[ScoredSample], greedy: ScoredSample | None) -> bool:
        """Return whether enough of a group is left, with the greedy sample where the advantage subtracts it."""
        lacks_greedy = self._config.algorithm.needs_greedy_reward and greedy is None
        if len(samples) < self._config.rollout.samples_per_prompt or lacks_greedy:
            self._logger.left_out(self._rollouts.left_out, self._rollouts.last_left_out)
        return len(samples) >= min(2, self._config.rollout.samples_per_prompt) and not lacks_greedy

    def _group(
        self, group_id: int, draw: PromptDraw, samples: list[ScoredSample], greedy: ScoredSample | None
    ) -> SampledGroup:
        return SampledGroup(
            group_id=group_id,
            item=draw.item,
            prompt_ids=draw.prompt.ids,
            pictures=draw.prompt.pictures,
            trajectories=[trajectory for sample in samples for trajectory in sample.trajectories],
            sizes=[len(sample.trajectories) for sample in samples],
            rewards=[self._worth(sample, draw) for sample in samples],
            parts=[sample.score.parts for sample in samples],
            greedy_reward=self._worth(greedy, draw) if greedy else None,
        )

    def _worth(self, sample: ScoredSample, draw: PromptDraw) -> float:
        """Return what is trained on: the reward, and what is taken off it for length."""
        algorithm = self._config.algorithm
        if not algorithm.overlong_buffer_tokens:
            return sample.score.value
        return sample.score.value + overlong_penalty(
            max(len(trajectory.ids) for trajectory in sample.trajectories),
            max_tokens=draw.source.response_tokens,
            buffer_tokens=algorithm.overlong_buffer_tokens,
            factor=algorithm.overlong_penalty_factor or 1.0,
        )

    async def drop(self, group_id: int) -> None:
        """Forget a group, aborting it if it is being sampled."""
        if self._groups.pop(group_id, None) is None:
            await self._fleet.engines.abort(f"group-{group_id}")

    def where(self, group_id: int) -> str:
        """Return the engine that holds a group in flight."""
        return self._where.get(group_id, "the verifier")

    # ── trainer ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def prepare(self, action: Literal["update", "sync", "checkpoint"]) -> None:
        """Let a validation end: before a sync, so that it has one version, and before engines that share devices sleep.

        Nothing is locked meanwhile: what it waits for may be an engine that needs weights from the trainer. Where it
        continues while weights come, only its errors are raised.
        """
        validating = self._validating
        must_wait = not self._config.validation_goes_on or self._is_last_sync  # which is validated too
        must_end = self._fleet.turns is not None or (action == "sync" and must_wait)
        # One that has ended is taken in as well: `finish` raises its error.
        if must_end or (validating is not None and validating.done()):
            await self.finish()

    async def update(self, group_ids: tuple[int, ...], version: int) -> None:
        groups = [self._groups[group_id] for group_id in group_ids]
        await self._fleet.engines.to_training()
        metrics = await self._healing(lambda: self._train(groups, version))
        self._last_update = (groups, version) if self._fleet.keeps_copies else None
        self._trainer_version = version + 1  # engines that come up late get this from now on
        for group_id in group_ids:
            del self._groups[group_id]
        prompts = {group.item: self._stream.prompts[group.item] for group in groups}
        is_alarmed = self._logger.updated(
            version + 1,
            groups,
            prompts,
            {**metrics, **self._stream.take_metrics()},
            self._clock.lap(),
            self._policy.statistics,
            self._fleet.metrics(),
            self._rollouts.left_out,
        )
        if is_alarmed:
            self._alarming = groups

    async def _train(self, groups: list[SampledGroup], version: int) -> Metrics:
        trainer, settings, self._trained = self._fleet.trainer, self._config.async_, ""
        with self._clock.busy(_TRAINER):
            async with trainer.reporting_progress(self._note_trained):
                metrics: Metrics = await trainer.call(
                    "update",
                    groups,
                    settings.require_batches,
                    version,
                    returns=Metrics,
                    deadline_s=settings.update_deadline_s,
                )
        return metrics

    async def _healing(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do what needs the trainer; do it again where a rank has died meanwhile and was replaced.

        Before it comes the last update that has ended: not all ranks may have had copies of it. If they have, they say
        so at once.
        """
        is_replaced = False
        while True:
            try:
                if is_replaced and self._last_update is not None:
                    await self._train(*self._last_update)
                return await work()
            except OffbeatError:
                if not await self._fleet.heal_trainer():
                    raise
                is_replaced = True

    def _note_worked(self, role: str, start_s: float, end_s: float) -> None:
        self._logger.worked(role, "train" if role == _TRAINER else "generate", start_s, end_s)

    def _note_trained(self, so_far: str) -> None:
        self._trained = so_far

    # ── synchroniser ──────────────────────────────────────────────────────────────────────────────────────────────

    async def sync(self, version: int, interrupt: bool) -> None:
        started_s = clock_s()
        work = self._healing(lambda: self._sync_all(version, interrupt))
        await self._fleet.name_who_is_late(work, f"sync {version}", self._config.async_.sync_deadline_s)
        self._logger.synced(version, started_s, clock_s())
        groups, self._alarming = self._alarming, []
        if groups and self._fleet.turns is None:  # roles that take turns are not both awake
            with suppress(OffbeatError):  # who has died is seen to elsewhere
                if look := await look_at_mismatch(self._fleet, self._config, groups):
                    self._logger.message(f"a first look at the mismatch: {look}")
        if self._validation_is_due(version):
            await self._begin_validation(version)

    async def _sync_all(self, version: int, interrupt: bool) -> None:
        with self._clock.held(self._fleet.engines.names):
            await self._fleet.engines.sync(self._fleet.offer_weights(version), interrupt)

    async def _sync_late_engines(self) -> None:
        """Give engines that come up between two syncs what the trainer holds: maybe newer than what others do."""
        async for name in self._fleet.engines.late_engines():
            async with self._turn.between_actions():  # no update changes the weights meanwhile
                await self._healing(lambda name=name: self._sync_late(name))  # type: ignore[misc]

    async def _sync_late(self, name: str) -> None:
        await self._fleet.engines.sync_late(name, self._fleet.offer_weights(self._trainer_version))

    # ── validation ────────────────────────────────────────────────────────────────────────────────────────────────

    def _validation_is_due(self, version: int) -> bool:
        every = self._config.validates_every
        if not every or not self._run.sets:
            return False
        if self._validating is not None and not self._validating.done() and not self._is_last_sync:
            return False  # it continues while weights come
        last = self._logger.last_validated
        if last < 0:
            return True
        return version // every > last // every or (version > last and self._is_last_sync)

    @property
    def _is_last_sync(self) -> bool:
        status = self._policy.status
        return not (status.num_not_started or status.in_flight or status.num_finished or status.num_training)

    async def _begin_validation(self, version: int) -> None:
        await self.finish()  # the one before it has ended, well or not
        self._last_asked = version
        self._validating = asyncio.create_task(self._validate(version))

    async def validate_last(self) -> None:
        """Begin to validate the final weights, which the engines hold, unless the last sync has done so.

        Groups were left then, and none of them was trained: they were filtered or dropped, or their episodes failed.
        """
        version = self._policy.version
        if self._last_asked < version and self._validation_is_due(version):
            await self._begin_validation(version)

    async def finish(self) -> None:
        """Wait for the validation that runs, and raise what went wrong in it."""
        if self._validating is not None:
            validating, self._validating = self._validating, None  # first: its error is raised once
            await validating  # each of its answers has a deadline

    async def _validate(self, version: int) -> None:
        """Validate, and write it down. `finish` raises what goes wrong in either."""
        rollouts, self._num_validated = Rollouts(self._run, self._fleet), 0
        try:
            validation = await validate(
                rollouts, self._fleet.engines, self._config, self._run.sets, version, self._note_validated
            )
        except OutdatedError as error:
            self._logger.message(f"the validation of version {version} is left to the next sync: {error}")
            return
        finally:
            self._rollouts.left_out.update(rollouts.left_out)
        self._folder.checkpoints.set_score(validation.version, validation.score(self._config.eval.score_set))
        self._logger.validated(validation)

    def _note_validated(self, num_answered: int) -> None:
        self._num_validated = num_answered

    async def close(self) -> None:
        tasks = [self._late_syncs, *([self._validating] if self._validating is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ── checkpoints ───────────────────────────────────────────────────────────────────────────────────────────────

    def wants_checkpoint(self, version: int) -> bool:
        every = self._config.checkpoint.every
        return (every > 0 and version % every == 0) or self._folder.checkpoints.is_asked

    @property
    def why_ended_early(self) -> str:
        """Return why the run draws no more prompts although there are some; empty where it does."""
        reason = self._policy.ended_early
        return reason if reason == self._end_wish else self._untrained.reason(reason)

    def raise_if_lost(self) -> None:
        """Raise where samples that failed are why nothing was trained, or why the run has ended early.

        Raises:
            SamplesLostError: says how many, and why the latest.
        """
        if self._end_wish and self._policy.ended_early == self._end_wish:
            return  # accurate enough, or out of time, perhaps before its first update: a few failures do not matter
        left_out = self._rollouts.left_out
        is_cut_short = bool(self._policy.ended_early) and self._untrained.num_lost > self._untrained.num_equal
        if left_out and (is_cut_short or not self._policy.version):
            outcome = f"ended early: {self.why_ended_early}" if is_cut_short else "no update was made"
            counts = ", ".join(f"{number} {metric}" for metric, number in sorted(left_out.items()))
            raise SamplesLostError(f"{outcome}; left out: {counts}; the latest: {self._rollouts.last_left_out}")

    def wants_end(self) -> str:
        self._end_wish = self._end_wish or self._early_end.reason(
            self._logger.last_accuracy, self._logger.last_validated
        )
        return self._end_wish

    def unsaved(self) -> str:
        """Return what is lost if the run ends now, and how it is kept; an empty string for nothing."""
        version = self._policy.version
        if self._policy.status.num_training:
            return f"finishing update {version + 1} and saving it"
        return f"saving update {version}" if version > self.saved_version else ""

    async def checkpoint(self, state: Mapping[str, Any]) -> None:
        """Write weights, optimizer, the loop's state and the finished groups as one folder."""
        # Before the first `await`: the loop goes on meanwhile, and may drop some of them.
        groups, known = [self._groups[int(group_id)] for group_id, _ in state["finished"]], self._known()
        await self._fleet.engines.to_training()
        self._is_saving = True
        with self._folder.checkpoints.write(self._policy.version) as folder:
            await self._healing(partial(self._save, folder))
            save_groups(folder / LOOP_FOLDER, groups)
            loop = {"policy": dict(state), "prompts": mark_of(self._stream.prompts), **known}
            (folder / LOOP_FOLDER / STATE_FILE).write_text(json.dumps(loop))
        self._is_saving = False
        self.saved_version = self._policy.version
        self._folder.checkpoints.prune(self._config.checkpoint.keep)  # only when the new one is whole

    async def _save(self, folder: Path) -> None:
        with_optimizer, deadline_s = self._config.checkpoint.save_optimizer, self._config.async_.update_deadline_s
        await self._fleet.trainer.call("save", str(folder), with_optimizer, deadline_s=deadline_s)

    # ── watching ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def idle(self, wait: str, idle_s: float) -> float:
        """Show the wait, and raise if a process has died that the run needs."""
        self._fleet.raise_if_dead()
        if self._late_syncs.done():
            self._late_syncs.result()  # it ends by an error alone, which is raised here
        self._logger.waiting(wait, idle_s)
        return self._fleet.progress

    def activity(self, num_updates: int) -> Activity:
        """Say what the run is doing, of so many updates in all."""
        is_validating = self._validating is not None and not self._validating.done()
        num_asked = sum(len(each.prompts) for each in self._run.sets)
        return RunView(
            status=self._policy.status,
            num_updates=num_updates,
            samples_per_group=self._config.rollout.samples_per_prompt,
            num_tokens=self._fleet.engines.num_tokens,
            trained=self._trained,
            validated=(self._num_validated, num_asked) if is_validating else None,
            is_saving=self._is_saving,
        ).describe()

    # ── small things ──────────────────────────────────────────────────────────────────────────────────────────────

    def _known(self) -> dict[str, Any]:
        known = self._stream.state()
        return {"curriculum": known} if known else {}

    def _seed(self, group_id: int) -> int:
        """Return a sampling seed of its own for each group; sample i of the group draws with this plus i."""
        return (self._config.rollout.seed << 40) + group_id * self._config.rollout.samples_per_prompt


def read_loop_state(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / LOOP_FOLDER / STATE_FILE).read_text()))


def check_same_prompts(state: Mapping[str, Any], prompts: Sequence[Prompt], run: Path) -> None:
    """Refuse to go on with other prompts than those that a checkpoint's state was written with."""
    begun, now = state.get("prompts"), mark_of(prompts)  # older checkpoints have none
    if begun and begun != now:
        raise ConfigError(
            f"{run} was begun with {begun['number']} training prompts and would continue with {now['number']}, not all "
            "of them the same: some would be trained twice and others never; resume with the rows it was begun with, "
            "or start a new run with model.path set to its latest checkpoint"
        )
