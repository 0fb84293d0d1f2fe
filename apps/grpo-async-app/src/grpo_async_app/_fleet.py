"""The processes of a run: one trainer, some rollout engines, a verifier; started, called, restarted, stopped."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from grpo_async_app._config import GrpoConfig
from grpo_async_app._environment_process import EnvironmentProcess
from grpo_async_app._gathering import all_or_first_error
from grpo_async_app._trainers import DEATH_SEEN_AFTER_S, Trainers, start_trainers
from offbeat_cluster import ActorHandle, Launcher, RoleSpec, available_cpus, split_threads
from offbeat_data import GuardedReward, Prompt, RewardScore
from offbeat_types import (
    Completion,
    ConfigError,
    DeadlineError,
    GenerateRequest,
    PeerFailedError,
    WeightProof,
    WeightSyncError,
    load_backend,
)
from offbeat_weightsync import new_socket_path

_log = logging.getLogger(__name__)


SyncOne = Callable[[str], Awaitable[None]]
"""Brings the trainer's weights to the engine of this name, when no update and no other sync runs."""

QUICK_STOP_S = 2.0
"""Time for all roles to stop when the run has failed or was interrupted: nobody waits for an update to finish then."""


@dataclass
class _Rollout:
    """One rollout engine: its process, and how much it has to do."""

    spec: RoleSpec
    handle: ActorHandle
    num_groups: int = 0
    restarting: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Fleet:
    """All role processes of one run. Use it in an `async with` block, which ends with all of them stopped.

    Args:
        config: of the run.
        model_path: folder the engines start from.
        log_folder: takes one log file per role.
    """

    trainer: Trainers

    def __init__(self, config: GrpoConfig, model_path: str, log_folder: Path) -> None:
        self._config, self._model_path, self._log_folder = config, model_path, log_folder
        self._launcher: Launcher = load_backend("offbeat.launcher", config.cluster.launcher)("grpo", config.cluster)
        self._rollouts: dict[str, _Rollout] = {}
        self._socket_path = new_socket_path()
        self._restarts: set[asyncio.Task[None]] = set()
        self._threads = plan_threads(config)
        self.num_restarts = 0
        self.environment = self._environment() if config.environment.name else None
        self._reward = (
            GuardedReward(config.reward, start_timeout_s=config.cluster.start_timeout_s)
            if config.reward.is_set
            else None
        )

    async def __aenter__(self) -> "Fleet":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for restart in self._restarts:
            restart.cancel()
        await self._launcher.close(QUICK_STOP_S if error else None)
        if self._reward is not None:
            self._reward.close()

    def kill(self) -> None:
        """End every role now; leaving the block then takes no time."""
        self._launcher.kill()

    @property
    def rollout_names(self) -> list[str]:
        """Names of the rollout engines, in order."""
        return [f"rollout-{number}" for number in range(self._config.rollout.num_engines)]

    async def start_training(self, num_updates: int, checkpoint: Path | None) -> None:
        """Start every role at once, and wait until all are ready. No engine samples before its first weight sync.

        Args:
            num_updates: of the whole run, for the learning rate's schedule.
            checkpoint: folder the trainer goes on from.
        """
        cluster, spec = self._config.cluster, self._trainer_spec(num_updates, checkpoint)
        trainers = start_trainers(
            self._launcher,
            spec,
            self._config.engine.num_ranks,
            start_deadline_s=cluster.start_timeout_s,
            call_deadline_s=self._config.async_.update_deadline_s,
        )
        self.trainer, *_ = await all_or_first_error([trainers, self._start_serving()])

    async def start(self) -> None:
        """Start the rollout engines alone: they serve the model folder as it is."""
        await self._start_serving()
        for rollout in self._rollouts.values():
            rollout.ready.set()

    async def _start_serving(self) -> None:
        specs = self._rollout_specs()
        environments = [self.environment.start()] if self.environment else []
        handles = await all_or_first_error([*(self._launcher.start(spec) for spec in specs), *environments])
        for spec, handle in zip(specs, handles, strict=False):  # the environment keeps its own
            self._rollouts[spec.name] = _Rollout(spec=spec, handle=handle)

    # ── sampling and scoring ──────────────────────────────────────────────────────────────────────────────────────

    def least_loaded(self) -> str:
        """The ready rollout engine with the fewest groups; any engine when none is ready."""
        ready = {name: rollout for name, rollout in self._rollouts.items() if rollout.ready.is_set()}
        pool = ready or self._rollouts
        return min(pool, key=lambda name: pool[name].num_groups)

    async def generate(self, name: str, request: GenerateRequest, deadline_s: float) -> list[Completion]:
        """Sample on one engine, once it is ready.

        Raises:
            PeerFailedError: the engine died; it is being started again.
        """
        rollout = self._rollouts[name]
        rollout.num_groups += 1
        try:
            async with asyncio.timeout(deadline_s):
                await rollout.ready.wait()
            return await rollout.handle.call("generate", request, returns=list[Completion], deadline_s=deadline_s)
        except TimeoutError:
            raise DeadlineError("generate", f"{name} to be ready", deadline_s, "see its log") from None
        finally:
            rollout.num_groups -= 1

    async def abort(self, request_id: str) -> None:
        """End a request wherever it runs."""
        await asyncio.gather(*(rollout.handle.call("abort", request_id) for rollout in self._rollouts.values()))

    async def score(self, prompt: Prompt, texts: list[str]) -> list[RewardScore]:
        """Rewards of completions of one prompt. One that takes its verifier too long gets 0 and is counted.

        Raises:
            ConfigError: an environment left this to the `reward` section, which names no reward.
        """
        reward = self._reward
        if reward is None:
            raise ConfigError(
                f"environment.name = {self._config.environment.name!r} leaves the last turn to the reward section: "
                "give reward.name, or return a RewardScore from the environment"
            )
        return await asyncio.to_thread(lambda: [reward.score(prompt, text) for text in texts])

    # ── weights ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def sync(self, version: int, interrupt: bool, sync_one: SyncOne) -> None:
        """Bring the trainer's weights to every engine, one after the other: the fleet never stops as a whole."""
        for name, rollout in self._rollouts.items():
            if rollout.restarting:
                continue  # it gets its weights when it is up again
            try:
                await self._sync_one(name, version, interrupt)
            except (PeerFailedError, WeightSyncError) as error:
                await self._raise_unless_dead(rollout, error)
                self.restart_if_dead(name, sync_one)

    async def _sync_one(self, name: str, version: int, interrupt: bool) -> None:
        rollout, deadline_s = self._rollouts[name], self._config.async_.sync_deadline_s
        if rollout.ready.is_set():
            await rollout.handle.call("pause", "keep" if interrupt else "wait", deadline_s=deadline_s)
        send = self.trainer.call(
            "send_weights", version, deadline_s, returns=list[WeightProof], deadline_s=deadline_s + 5
        )
        take = rollout.handle.call(
            "receive_weights",
            self._socket_path,
            version,
            deadline_s,
            name,
            returns=WeightProof,
            deadline_s=deadline_s + 5,
        )
        await all_or_first_error([send, take])
        await rollout.handle.call("resume", deadline_s=deadline_s)
        rollout.ready.set()

    # ── life and death ────────────────────────────────────────────────────────────────────────────────────────────

    def restart_if_dead(self, name: str, sync_one: SyncOne) -> None:
        """Start a dead rollout engine again in the background; `sync_one` brings it the trainer's weights."""
        rollout = self._rollouts[name]
        if rollout.handle.alive or rollout.restarting:
            return
        rollout.restarting = True
        rollout.ready.clear()
        task = asyncio.create_task(self._restart(rollout, sync_one))
        self._restarts.add(task)

    async def _restart(self, rollout: _Rollout, sync_one: SyncOne) -> None:
        self.num_restarts += 1
        _log.warning("%s died and is started again", rollout.spec.name)
        rollout.handle = await self._launcher.start(rollout.spec)
        await sync_one(rollout.spec.name)
        rollout.restarting = False

    async def _raise_unless_dead(self, rollout: _Rollout, error: Exception) -> None:
        """Raise the error when the engine lives: then it is not a matter of starting it again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_SEEN_AFTER_S):
                await rollout.handle.wait_dead()
        if rollout.handle.alive:
            raise error

    async def sync_restarted(self, name: str, version: int) -> None:
        """Bring the weights to one engine that has been started again."""
        await self._sync_one(name, version, interrupt=False)

    def raise_if_dead(self) -> None:
        """Raise when a role is gone without which the run cannot go on."""
        for restart in self._restarts:
            if restart.done() and not restart.cancelled() and (error := restart.exception()):
                raise error
        self.trainer.raise_if_dead()

    # ── what is started ───────────────────────────────────────────────────────────────────────────────────────────

    def _trainer_spec(self, num_updates: int, checkpoint: Path | None) -> RoleSpec:
        config = self._config
        engine = config.train_engine(self._model_path, self._threads["trainer"])
        steps = num_updates * config.async_.require_batches
        options = {"temperature": config.rollout.temperature, **engine.options}
        if config.algorithm.needs_entropy_gradient:
            options["entropy_gradient"] = True
        return RoleSpec(
            name="trainer-0",
            target="grpo_async_app._roles.trainer:TrainerRole",
            kwargs={
                "backend": config.engine.backend,
                "config": replace(engine, total_steps=steps, options=options),
                "algorithm": config.algorithm,
                "socket_path": self._socket_path,
                "rollout_dtype": config.rollout.dtype,
                "bucket_bytes": config.rollout.sync_bucket_bytes,
                "checkpoint": str(checkpoint or ""),
                "stall_after_s": config.liveness.stall_after_s,
            },
            num_threads=self._threads["trainer"],
            log_path=self._log_folder / "trainer-0.log",
        )

    def _environment(self) -> EnvironmentProcess:
        spec = RoleSpec(
            name="environment-0",
            target="grpo_async_app._roles.environment:EnvironmentRole",
            kwargs={"config": self._config.environment},
            num_threads=1,
            log_path=self._log_folder / "environment-0.log",
        )
        return EnvironmentProcess(self._launcher, spec, self._config.environment.step_timeout_s)

    def _rollout_specs(self) -> list[RoleSpec]:
        return [
            RoleSpec(
                name=name,
                target="grpo_async_app._roles.rollout:RolloutRole",
                kwargs={
                    "backend": self._config.rollout.backend,
                    "config": self._config.rollout_engine(self._model_path, self._threads["rollout"]),
                },
                num_threads=self._threads["rollout"],
                log_path=self._log_folder / f"{name}.log",
            )
            for name in self.rollout_names
        ]


def plan_threads(config: GrpoConfig) -> dict[str, int]:
    """CPU threads of one trainer rank and of one rollout engine."""
    trainers = [f"trainer-{rank}" for rank in range(config.engine.num_ranks)]
    rollouts = [f"rollout-{number}" for number in range(config.rollout.num_engines)]
    shares = split_threads(available_cpus(), dict.fromkeys([*trainers, *rollouts], 1.0))
    return {
        "trainer": config.cluster.trainer_threads or shares["trainer-0"],
        "rollout": config.cluster.rollout_threads or shares["rollout-0"],
    }
