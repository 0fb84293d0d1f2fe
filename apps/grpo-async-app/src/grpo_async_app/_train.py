"""A training run from checked configuration to report: new, resumed, or only evaluated."""

from dataclasses import dataclass, replace
from pathlib import Path

from grpo_async_app._backend import LOOP_FOLDER, GrpoBackend, read_loop_state
from grpo_async_app._config import GrpoConfig
from grpo_async_app._evaluation import Validation, validate
from grpo_async_app._fleet import Fleet
from grpo_async_app._groups import SampledGroup, load_groups
from grpo_async_app._interrupt import run_interruptible
from grpo_async_app._journal import Journal
from grpo_async_app._preflight import Preflight
from grpo_async_app._rollouts import Rollouts
from offbeat_async_policy import AsyncPolicy, LoopSummary, run_loop
from offbeat_run import Checkpoint, RunFolder
from offbeat_types import RunFolderError


def train(preflight: Preflight, run: RunFolder) -> LoopSummary:
    """Train from the first policy to the end of the data."""
    policy = AsyncPolicy(preflight.config.async_, preflight.num_groups, preflight.max_updates)
    policy.request_sync()  # the engines prove that they hold the trainer's weights before anything is sampled
    return _run(_Session(preflight, run, policy, {}, None))


def resume(preflight: Preflight, run: RunFolder) -> LoopSummary:
    """Go on from the latest whole checkpoint; from the beginning when the run was killed before its first.

    Raises:
        RunFolderError: the run was told not to keep its optimizer.
    """
    if not preflight.config.checkpoint.save_optimizer:
        raise RunFolderError(f"{run.path} was run with checkpoint.save_optimizer = false: it cannot be resumed")
    checkpoint = run.checkpoints.latest()
    if checkpoint is None:
        return train(preflight, run)
    state = read_loop_state(checkpoint.path)
    policy = AsyncPolicy.restore(preflight.config.async_, state["policy"], preflight.num_groups, preflight.max_updates)
    return _run(_Session(preflight, run, policy, load_groups(checkpoint.path / LOOP_FOLDER), checkpoint))


def evaluate(preflight: Preflight, log_folder: Path) -> Validation:
    """Validate the model of the configuration once."""
    fleet = Fleet(preflight.config, str(preflight.model.path), log_folder)

    async def once() -> Validation:
        async with fleet:
            await fleet.start()
            rollouts = Rollouts(preflight.config, fleet, preflight.template)
            return await validate(rollouts, fleet.rollout_names, preflight.config, preflight.held_out, 0)

    return run_interruptible(once(), fleet.kill)


@dataclass(frozen=True)
class _Session:
    """What one process does of a run."""

    preflight: Preflight
    run: RunFolder
    policy: AsyncPolicy
    groups: dict[int, SampledGroup]
    checkpoint: Checkpoint | None


def _run(session: _Session) -> LoopSummary:
    fleet = Fleet(session.preflight.config, str(session.preflight.model.path), session.run.logs)
    return run_interruptible(_train(session, fleet), fleet.kill)


async def _train(session: _Session, fleet: Fleet) -> LoopSummary:
    config, preflight, run = session.preflight.config, session.preflight, session.run
    start = session.checkpoint
    with Journal(run, config, preflight.num_updates, start.step if start else -1) as journal:
        async with fleet:
            journal.message("starting trainer and rollout engines ...")
            await fleet.start_training(preflight.num_updates, start.path if start else None)
            run.keep()
            backend = GrpoBackend(
                config,
                fleet,
                session.policy,
                prompts=preflight.prompts.train,
                held_out=preflight.held_out,
                run=run,
                journal=journal,
                groups=session.groups,
                template=preflight.template,
            )
            summary = await run_loop(session.policy, backend)
            if session.policy.ended_early:
                journal.message(f"ended early: {session.policy.ended_early}")
            await backend.finish()
            if not start or start.step < session.policy.version:
                await backend.checkpoint(session.policy.state())
    return summary


def with_model(config: GrpoConfig, path: Path) -> GrpoConfig:
    """The same configuration for another model folder."""
    return replace(config, model=replace(config.model, path=str(path)))
