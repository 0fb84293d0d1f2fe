"""The processes of a run: trainer, rollout engines, environments, scorers; started, called, restarted, stopped."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from grpo_async_app._config.parking import Parking
from grpo_async_app._config.resolved import Judge, ResolvedRun
from grpo_async_app._config.reward_model import reward_model_of
from grpo_async_app._config.weight_sync import assign_ranks, settle_lora_sync
from grpo_async_app._fleet.agents import AgentProcess
from grpo_async_app._fleet.colocation import ColocationSchedule
from grpo_async_app._fleet.engines import Engines
from grpo_async_app._fleet.environments import EnvironmentProcess
from grpo_async_app._fleet.events import LoggedEvents, RunEvents
from grpo_async_app._fleet.healing import TrainerHealer, keeps_copies
from grpo_async_app._fleet.replicas import Replicas
from grpo_async_app._fleet.role_specs import RoleSpecs
from grpo_async_app._fleet.teachers import RewardModels, Teachers
from grpo_async_app._fleet.trainers import Trainers, start_trainers
from grpo_async_app._fleet.weights import WeightOffer
from grpo_async_app._scoring.pool import ScorerPool
from offbeat_actors import (
    ActorHandle,
    KeepAlive,
    Launcher,
    RestartBudget,
    RolePlace,
    RoleSpec,
    check_processes,
    gather_or_cancel,
    start_again,
)
from offbeat_core import (
    ConfigError,
    DeadlineError,
    Metric,
    Metrics,
    PeerFailedError,
    PlacementError,
    RoleName,
    load_backend,
)
from offbeat_data import CompletionText, Prompt, RewardScore
from offbeat_placement import Placement
from offbeat_run import clock_s, doing
from offbeat_weightsync import new_socket_path, transport_class

QUICK_STOP_S = 2.0
"""Time for all roles to stop when the run has failed or was interrupted: the update is not finished then."""

REPORT_BEFORE_S: Final = 2.0
"""So long before the deadline of a sync the driver looks what it waits for: afterwards all calls are cancelled."""

_OTHER_CALLS: Final = ("generate", "score", "health", "beat")
"""Calls that run beside a sync and are no part of it."""


class Fleet:
    """All role processes of one run. Use it in an `async with` block, which ends with all of them stopped.

    Args:
        run: its environments and judges are started too.
        model_path: folder the engines start from.
        log_folder: takes one log file per role.
        has_images: prompts have some.
        events: takes what happens to roles.
        parking: what roles that take turns put away; None: what `cluster.sleep_level` says.

    Attributes:
        turns: where the engines share their devices with the trainer; None where they have their own.
        environments: processes of the run's environments.
        agent: runs the programs of section `agent`, where it names one.
        teachers: replicas of the teacher, where the run has one.
    """

    def __init__(
        self,
        run: ResolvedRun,
        model_path: str,
        log_folder: Path,
        *,
        has_images: bool = False,
        events: RunEvents | None = None,
        parking: Parking | None = None,
    ) -> None:
        self._config = config = settle_lora_sync(run.config)
        self._roles = RoleSpecs(config, model_path, log_folder, has_images=has_images)
        self._launcher: Launcher = load_backend("offbeat.launcher", config.cluster.launcher)("grpo", config.cluster)
        self._trainer: Trainers | None = None
        self._trainer_spec: RoleSpec | None = None
        self._healer: TrainerHealer | None = None
        self._gives_devices = False
        self._ranks: Mapping[str, Sequence[int]] = {}
        self._budget = RestartBudget(config.cluster.max_restarts, config.cluster.restart_window_s)
        self.events = events = events or LoggedEvents()
        self._keep = KeepAlive(budget=self._budget, silent_after_s=config.cluster.silent_after_s, notify=events.message)
        self.turns = None
        if config.cluster.colocate:
            self.turns = ColocationSchedule(config, lambda: self.trainer, events, parking)
        self.engines = Engines(config, self._start_rollout, self._keep, self.turns)
        self.environments = {
            each: EnvironmentProcess(
                self._launcher, self._roles.environment(index, each.settings), each.settings.step_timeout_s
            )
            for index, each in enumerate(run.environments)
        }
        self.agent = (
            AgentProcess(self._launcher, self._roles.agent(), config.agent.deadline_s) if config.agent.command else None
        )
        self._replicas: list[Replicas] = []
        self.teachers = (
            Teachers(config, self._make_replicas("teacher", config.teacher.num_replicas))
            if config.teacher.is_set
            else None
        )
        model = None
        if (options := reward_model_of(config.reward)) is not None:
            model = RewardModels(options, self._make_replicas("reward_model", options.num_replicas))
        self._reward_models = model
        self._scorers = {
            judge: ScorerPool(
                judge.settings,
                config.cluster,
                log_folder / f"{'-'.join(['reward_errors', *judge.label.split('/')]).rstrip('-')}.log",
                model.score if model else None,
                events.message,
            )
            for judge in run.judges
        }

    def _make_replicas(self, kind: str, number: int) -> Replicas:
        replicas = Replicas(self._config, kind, number, self._start_replica, self._keep, self.events)
        self._replicas.append(replicas)
        return replicas

    async def __aenter__(self) -> "Fleet":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        doing("stopping the roles")
        await self.engines.close()
        for replicas in self._replicas:
            await replicas.close()
        if self._trainer is not None:
            await self._trainer.forget()
        if self._healer is not None:
            await self._healer.close()
        await self._launcher.close(QUICK_STOP_S if error else None)
        for scorers in self._scorers.values():
            await scorers.close()

    async def cluster_loss(self) -> PeerFailedError:
        """Wait until what runs the roles is lost, for ever on one machine."""
        return await self._launcher.cluster_loss()

    def kill(self) -> None:
        """End every role now; leaving the block then takes no time."""
        self._launcher.kill()
        for scorers in self._scorers.values():
            scorers.kill()

    async def start_training(self, placement: Placement, num_updates: int, checkpoint: Path | None) -> None:
        """Start every role at once, and wait until all are ready. No engine samples before its first weight sync."""
        await self._place(placement)
        if keeps_copies(self._config):
            has_devices = any(rank.role == "trainer" and rank.device is not None for rank in placement.plan.ranks)
            keeps_spare = not (has_devices or self._launcher.reserves)
            self._healer = TrainerHealer(
                self._config, self._launcher, self._budget, self.events.message, keeps_spare=keeps_spare
            )
        self._ranks = assign_ranks(self._config, placement)
        if (turns := self.turns) is not None:  # one after the other: there is room for one only
            self._trainer = await self._start_trainers(num_updates, checkpoint)
            await turns.trainer_started()
            await self._start_serving()
            await turns.engines_started()
            await gather_or_cancel(self._starting_replicas())
        else:
            self._trainer, *_ = await gather_or_cancel(
                [self._start_trainers(num_updates, checkpoint), self._start_serving(), *self._starting_replicas()]
            )
        self.engines.let_others_join()

    async def start(self, placement: Placement) -> None:
        """Start the rollout engines alone, each in its place: they serve the model folder as it is."""
        await self._place(placement.only("rollout", "environment", "agent", "reward_model"))
        await self._start_serving()
        if self._reward_models is not None:
            await self._reward_models.replicas.start_all()
        self.engines.serve()

    async def _place(self, placement: Placement) -> None:
        await self._launcher.place(placement.plan, placement.groups)
        self._gives_devices = any(rank.role == "rollout" and rank.device is not None for rank in placement.plan.ranks)

    async def _start_serving(self) -> None:
        actors = [each.start() for each in (*self.environments.values(), self.agent) if each is not None]
        judges = [scorers.start() for scorers in self._scorers.values()]
        await gather_or_cancel([self.engines.start_wanted(), *actors, *judges])

    def _starting_replicas(self) -> list[Coroutine[Any, Any, None]]:
        return [replicas.start_all() for replicas in self._replicas]

    async def _start_replica(self, role: RoleName) -> ActorHandle:
        return await self._launcher.start(self._roles.replica(role))

    async def _start_rollout(self, role: RoleName) -> ActorHandle:
        self._check_reserved(role.index + 1)
        turns = self.turns if self._trainer is not None else None  # without a trainer no role takes turns
        if turns is None:
            return await self._launcher.start(self._roles.rollout(role))
        async with turns.starting(str(role)) as started:
            handle = await self._launcher.start(self._roles.rollout(role))
            await started(handle)
        return handle

    def check_engines(self, number: int) -> None:
        """Refuse more rollout engines than there is room for, as `train` does.

        Raises:
            PlacementError: devices were given out when the run started, for fewer.
            ConfigError: this machine does not hold so many processes.
        """
        self._check_reserved(number)
        if not self._launcher.reserves:
            check_processes({**self._config.processes, "rollout.num_engines": number})

    def _check_reserved(self, number: int) -> None:
        planned = self._config.rollout.num_engines
        if number > planned and (self._launcher.reserves or self._gives_devices):
            raise PlacementError(
                f"devices were reserved for {planned} rollout engines (rollout.num_engines), and none for "
                f"{RoleName('rollout', number - 1)}: end the run and resume it with as many as it shall have"
            )

    # ── scoring ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def last_reward_error(self) -> str:
        return next((scorers.last_error for scorers in self._scorers.values() if scorers.last_error), "")

    async def score(self, prompt: Prompt, written: Sequence[CompletionText], judge: Judge) -> list[RewardScore | None]:
        """Score completions of one prompt; None for one that could not be scored and shall be left out.

        One that takes its verifier too long gets 0 and is counted.
        """
        scorers = self._scorers.get(judge)
        if scorers is None and self._config.agent.is_set:
            raise ConfigError(
                "an agent has ended its episode without a reward: give reward.name, or have the agent post one to "
                "/v1/sessions/end"
            )
        if scorers is None and not (self.environments and self._config.algorithm.needs_reward):  # there is a teacher
            return [RewardScore(value=0.0, parts={}) for _ in written]
        if scorers is None:
            where = judge.table or "environment.name"
            raise ConfigError(
                f"{where}: the environment leaves the last turn to a reward, and there is none: give reward.name, or "
                "return a RewardScore from the environment"
            )
        return await scorers.score(prompt, written)

    # ── the trainer ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def trainer(self) -> Trainers:
        assert self._trainer is not None
        return self._trainer

    async def trainer_death(self) -> PeerFailedError | None:
        """Return how the trainer has ended; None when it still runs, or was never started."""
        return await self._trainer.death() if self._trainer is not None else None

    @property
    def keeps_copies(self) -> bool:
        """Return whether ranks of the trainer are replaced."""
        return self._healer is not None

    async def heal_trainer(self) -> bool:
        """Replace the trainer's ranks that have died, where that can be done; return whether it was."""
        if self._healer is None or self._trainer_spec is None or await self.trainer_death() is None:
            return False
        return await self._healer.heal(self.trainer, self._trainer_spec)

    async def restart_trainer(self, cause: str, num_updates: int, checkpoint: Path | None) -> None:
        """Start all ranks of a trainer again that has died; the engines wait meanwhile."""
        await self.trainer.destroy()
        if self.turns is not None:
            await self.turns.trainer_is_gone(self.engines.living)
        start = partial(self._start_trainers, num_updates, checkpoint)
        self._trainer = await start_again(self._budget, "trainer", cause, start, self.events.message)

    async def _start_trainers(self, num_updates: int, checkpoint: Path | None) -> Trainers:
        sending = {0}.union(*self._ranks.values())
        # New ones each time: what still looks for a former trainer shall not find this one.
        paths = [new_socket_path() if rank in sending else "" for rank in range(self._config.engine.num_ranks)]
        healer = self._healer
        spec = self._trainer_spec = self._roles.trainer(paths, num_updates, checkpoint, is_replaced=healer is not None)
        trainer = await start_trainers(self._launcher, spec, self._config)
        if healer is not None:
            healer.prepare(spec)
        return trainer

    def offer_weights(self, version: int) -> WeightOffer:
        rollout, deadline_s = self._config.rollout, self._config.async_.sync_deadline_s
        parts, reach = rollout.weight_parts, transport_class(rollout.weight_transport).reach
        return WeightOffer(self.trainer, version, deadline_s, self.events, parts, reach, self._ranks)

    async def name_who_is_late(self, work: Coroutine[Any, Any, None], waiting: str, deadline_s: float) -> None:
        """Await work that calls roles; shortly before its deadline, raise an error with the calls not answered."""
        task = asyncio.ensure_future(work)
        early_s = max(deadline_s - REPORT_BEFORE_S, deadline_s / 2)
        try:
            await asyncio.wait({task}, timeout=early_s)
            if task.done():
                return task.result()
            waits = [
                f"{wait.name} ({wait.lasted_s:.0f} s)"
                for wait in self._launcher.waits()
                if wait.method not in _OTHER_CALLS
            ]
            raise DeadlineError(waiting, ", ".join(waits[:3]) or "the trainer's turn", early_s, "see the role's log")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def start_reference(self, model_path: Path) -> ActorHandle:
        """Start the model that a diagnosis compares with, of the weights in a folder."""
        spec = self._roles.reference(str(model_path))
        return await self._launcher.start(spec, deadline_s=self._config.cluster.start_timeout_s)

    # ── where it runs ─────────────────────────────────────────────────────────────────────────────────────────────

    def places(self) -> list[RolePlace]:
        """Return the place of every role and the state of its process, scorers included."""
        scorers = (place for pool in self._scorers.values() for place in pool.starter.places())
        return [*self._launcher.places(), *scorers]

    def num_restarts(self, role: RoleName) -> int:
        """Return how often a role was started again; the ranks of a trainer are started together."""
        return self._budget.spent.get("trainer" if role.kind == "trainer" else str(role), 0)

    # ── how it goes ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def progress(self) -> float:
        """A number that changes while any role makes progress: engines that sample or start, judges, environments."""
        scored = sum(scorers.num_scored for scorers in self._scorers.values())
        answered = sum(environment.num_answers for environment in self.environments.values())
        answered += self.agent.num_ended if self.agent is not None else 0
        starting_s = clock_s() if self.engines.are_starting else 0.0  # which has a deadline of its own
        return self.engines.num_tokens + scored + answered + starting_s

    def raise_if_dead(self) -> None:
        """Raise when a role is gone that the run cannot continue without."""
        self.engines.raise_if_failed()
        for replicas in self._replicas:
            replicas.raise_if_failed()
        if self._healer is None:  # else the next action replaces the rank
            self.trainer.raise_if_dead()

    def metrics(self) -> Metrics:
        """Return what scoring takes; and what has happened to the roles, where anything has."""
        num_engines = len(self.engines.names)
        counts = {
            "engines/restarts": self.engines.num_restarts,
            "engines/stragglers": len(self.engines.stragglers),
            "engines/serving": num_engines if num_engines != self._config.rollout.num_engines else 0,
            "trainer/restarts": self._budget.spent["trainer"],
            **{f"{replicas.kind}/restarts": replicas.num_restarts for replicas in self._replicas},
        }
        metrics = {name: Metric(value=float(count), how="last") for name, count in counts.items() if count}
        for judge, scorers in self._scorers.items():
            if judge.trains:
                prefix = f"{judge.label}/" if judge.label else ""
                metrics |= {f"{prefix}{name}": metric for name, metric in scorers.metrics().items()}
        if self.turns is not None:
            metrics["perf/handover_s"] = Metric(value=self.turns.take_spent_s())
        return metrics
