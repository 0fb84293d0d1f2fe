"""A training run from checked configuration to report: new, resumed, or only evaluated."""

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import offbeat_liveness as liveness
from grpo_async_app._config.critic import check_critic_is_kept
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.fleet import Fleet
from grpo_async_app._preflight.preflight import Preflight
from grpo_async_app._roles.groups import SampledGroup, load_groups
from grpo_async_app._run.backend import LOOP_FOLDER, STATE_FILE, GrpoBackend, check_same_prompts, read_loop_state
from grpo_async_app._run.ending import EarlyEnd
from grpo_async_app._run.interruption import Interruption, run_interruptible
from grpo_async_app._run.log.activity import describe_start, following
from grpo_async_app._run.log.run_logger import RunLogger
from grpo_async_app._run.places import PlacesFile
from grpo_async_app._run.prompt_stream import PromptStream
from grpo_async_app._run.scaling import scale_as_asked
from offbeat_async_policy import AsyncPolicy, LoopSummary, TrainerTurn, run_loop
from offbeat_core import OffbeatError, PeerFailedError, RunFolderError, disk_errors
from offbeat_run import Checkpoint, LivenessConfig, RunFolder, print_text, reading


def train(preflight: Preflight, run: RunFolder) -> LoopSummary:
    return _run(Session.from_start(preflight, run))


def resume(session: "Session") -> LoopSummary:
    """Go on where `find_session` has found that a run can."""
    return _run(session)


def find_session(preflight: Preflight, run: RunFolder) -> "Session":
    """Read the latest whole checkpoint of a run; its beginning when the run was killed before its first."""
    if not preflight.config.checkpoint.save_optimizer:
        raise RunFolderError(f"{run.path} was run with checkpoint.save_optimizer = false: it cannot be resumed")
    return Session.from_latest(preflight, run)


@dataclass(frozen=True)
class Session:
    """A run from one point on, with one trainer.

    Args:
        known: what a checkpoint says of the prompts' success.
        notices: what it does not take over from the checkpoint.
    """

    preflight: Preflight
    run: RunFolder
    policy: AsyncPolicy
    groups: dict[int, SampledGroup]
    checkpoint: Checkpoint | None
    known: dict[str, Any]
    notices: tuple[str, ...] = ()

    @classmethod
    def from_start(cls, preflight: Preflight, run: RunFolder) -> "Session":
        policy = AsyncPolicy(preflight.config.async_, preflight.num_groups, preflight.max_updates)
        policy.request_sync()  # the engines prove that they hold the trainer's weights before anything is sampled
        return cls(preflight, run, policy, {}, None, {})

    @classmethod
    def from_latest(cls, preflight: Preflight, run: RunFolder, notify: Callable[[str], None] = print_text) -> "Session":
        """Read what is left after the latest whole checkpoint; the whole run when there is none yet."""
        found = run.checkpoints.read_latest(partial(_read_loop, preflight, run.path), notify)
        if found is None:
            return cls.from_start(preflight, run)
        checkpoint, (policy, stored, known) = found
        config = preflight.config
        if config.algorithm.needs_critic:
            check_critic_is_kept(checkpoint.path)
        finished = {group_id for group_id, _ in policy.state()["finished"]}
        groups = {group_id: group for group_id, group in stored.items() if group_id in finished}
        flawed = {group_id for group_id, group in groups.items() if group.flaw}
        policy.discard(flawed)  # of a run that was begun before rewards were looked at
        names = config.reward.all_weights if config.reward.is_set else {}
        lacks = {group_id: group.lack(config.algorithm, names) for group_id, group in groups.items()}
        anew = {group_id: lack for group_id, lack in lacks.items() if lack and group_id not in flawed}
        policy.reissue(anew)
        sound = {group_id: group for group_id, group in groups.items() if group_id not in {*flawed, *anew}}
        reasons = Counter(f"they have {lack}" for lack in anew.values())
        reasons["they are older than async.staleness_threshold = 0 admits"] = len(stored) - len(groups)
        notices = tuple(
            f"{count} finished groups of the checkpoint are sampled again: {reason}"
            for reason, count in reasons.items()
            if count
        )
        return cls(preflight, run, policy, sound, checkpoint, known, notices)

    @property
    def folder(self) -> Path | None:
        return self.checkpoint.path if self.checkpoint else None

    @property
    def step(self) -> int:
        """Updates done at its beginning; -1 when it is the whole run."""
        return self.checkpoint.step if self.checkpoint else -1


def _read_loop(
    preflight: Preflight, run: Path, folder: Path
) -> tuple[AsyncPolicy, dict[int, SampledGroup], dict[str, Any]]:
    """Read the loop's part of a checkpoint: policy, finished groups, and what is known of the prompts' success."""
    with reading(f"{LOOP_FOLDER}/{STATE_FILE}"):
        state = read_loop_state(folder)
        check_same_prompts(state, preflight.prompts.train, run)
        policy = AsyncPolicy.restore(
            preflight.config.async_, state["policy"], preflight.num_groups, preflight.max_updates
        )
        known = dict(state.get("curriculum", {}))
    groups = load_groups(folder / LOOP_FOLDER)
    if missing := sorted({group_id for group_id, _ in policy.state()["finished"]} - groups.keys()):
        raise RunFolderError(f"{LOOP_FOLDER} holds no samples of group {missing[0]}, which is finished")
    return policy, groups, known


def _run(session: Session) -> LoopSummary:
    preflight, logs = session.preflight, session.run.logs
    with watched_driver(preflight.config.liveness, logs):
        logger = RunLogger(session.run, preflight.config, preflight.num_updates)
        fleet = Fleet(
            preflight.run,
            str(preflight.model.path),
            logs,
            has_images=preflight.has_images,
            events=logger,
            parking=preflight.parking,
        )
        interruption = Interruption(preflight.config.checkpoint.on_signal_s, logger.message)
        return run_interruptible(_train(session, fleet, logger, interruption), fleet.kill, interruption)


async def _train(session: Session, fleet: Fleet, logger: RunLogger, interruption: Interruption) -> LoopSummary:
    """Train to the end, with the roles of the run around it."""
    with PlacesFile(session.run, fleet, session.preflight.config, logger) as places:
        async with fleet, places.following(), _scaling(session.run, fleet):
            training = _train_on(session, fleet, logger, interruption)
            return await _while_cluster_lives(training, fleet, interruption)


async def _while_cluster_lives(
    training: Coroutine[Any, Any, LoopSummary], fleet: Fleet, interruption: Interruption
) -> LoopSummary:
    """Train; when the cluster is lost, its machines still work for as long as it takes to save what was trained."""
    task, losing = asyncio.ensure_future(training), asyncio.ensure_future(fleet.cluster_loss())
    try:
        await asyncio.wait({task, losing}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        is_ending = interruption.asked.is_set()  # a signal has asked it to, within the time that it has for that
        if not is_ending and not interruption.ask(str(losing.result()), task.cancel):
            task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None:  # that was the end of the run
            return task.result()
        raise losing.result()
    finally:
        losing.cancel()
        task.cancel()
        await asyncio.gather(task, losing, return_exceptions=True)


async def _train_on(session: Session, fleet: Fleet, logger: RunLogger, interruption: Interruption) -> LoopSummary:
    """Train to the end. A trainer that dies is restarted and continues as a resumed run does; engines stay up."""
    death: PeerFailedError | None = None
    early_end: EarlyEnd | None = None
    while True:
        preflight, run = session.preflight, session.run
        with disk_errors(run.path), logger.opened(session.step):
            await _start(session, fleet, logger, death)
            early_end = early_end or EarlyEnd(preflight.config)  # the time limit counts once all roles are up
            try:
                return await _go_on(session, fleet, logger, early_end, interruption)
            except OffbeatError:
                death = await fleet.trainer_death()
                if death is None or interruption.asked.is_set() or not preflight.config.checkpoint.save_optimizer:
                    raise
        damaged: list[str] = []
        session = await asyncio.to_thread(Session.from_latest, preflight, run, damaged.append)
        session = replace(session, notices=(*damaged, *session.notices))


@contextlib.asynccontextmanager
async def _scaling(run: RunFolder, fleet: Fleet) -> AsyncIterator[None]:
    """Take note of how many engines are asked for, also while a trainer starts or the last validation runs."""
    looking = asyncio.create_task(scale_as_asked(run, fleet.check_engines, fleet.engines.scale, fleet.events.message))
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def _start(session: Session, fleet: Fleet, logger: RunLogger, death: PeerFailedError | None) -> None:
    """Start all roles, or the trainer alone after its death."""
    num_updates = session.preflight.num_updates
    for notice in session.notices:
        logger.message(notice)
    if death is not None:
        async with following(lambda: describe_start(fleet.places())):
            await fleet.restart_trainer(f"{death.peer} failed: {death.reason}", num_updates, session.folder)
        logger.message(f"the run continues from update {max(session.step, 0)}: what was trained since is trained again")
        return
    if session.preflight.lora_sync.why:
        logger.message(str(session.preflight.lora_sync))
    logger.message("starting trainer and rollout engines ...")
    async with following(lambda: describe_start(fleet.places())):
        await fleet.start_training(session.preflight.placement, num_updates, session.folder)
    session.run.keep()


async def _go_on(
    session: Session, fleet: Fleet, logger: RunLogger, early_end: EarlyEnd, interruption: Interruption
) -> LoopSummary:
    preflight, policy, turn = session.preflight, session.policy, TrainerTurn()
    backend = GrpoBackend(
        preflight.run,
        fleet,
        policy,
        stream=PromptStream(preflight.config, preflight.run.sources, session.known),
        folder=session.run,
        logger=logger,
        groups=session.groups,
        turn=turn,
        early_end=early_end,
    )
    gc.freeze()  # prompts and modules stay: to look through them again and again takes a tenth of the driver's time
    try:
        async with following(partial(backend.activity, preflight.num_updates)):
            return await _run_loop(session, backend, turn, logger, interruption)
    finally:
        await backend.close()


async def _run_loop(
    session: Session, backend: GrpoBackend, turn: TrainerTurn, logger: RunLogger, interruption: Interruption
) -> LoopSummary:
    """Run the loop, then validate and save what it leaves."""
    policy = session.policy

    async def save() -> None:
        async with turn.between_actions():
            await backend.checkpoint(policy.state())

    with interruption.finishing(backend.unsaved):
        summary = await run_loop(policy, backend, turn=turn, stop=interruption.asked)
        if interruption.asked.is_set():
            if policy.version > backend.saved_version:
                await save()
            raise asyncio.CancelledError("a signal has asked the run to end")
    if backend.why_ended_early:
        logger.message(f"ended early: {backend.why_ended_early}")
    try:
        await backend.validate_last()
        await backend.prepare("checkpoint")
    finally:  # the last validation may fail, or be interrupted: what was trained is kept
        if max(session.step, 0) < policy.version:  # without an update the model is the one that the run began with
            await save()
    await backend.finish()
    backend.raise_if_lost()
    return summary


def with_model(config: GrpoConfig, path: Path) -> GrpoConfig:
    return replace(config, model=replace(config.model, path=str(path)))


@contextlib.contextmanager
def watched_driver(config: LivenessConfig, log_folder: Path) -> Iterator[None]:
    """Watch this process, and the roles that it starts under their names, while the block lasts.

    A stalled process is named in `liveness.log`, and in the log of the role that finds it. No process is ended for
    that: the ranks of a trainer end themselves, and for the others there is a supervisor.
    """

    def write_down(verdict: liveness.Verdict) -> None:
        log_folder.mkdir(parents=True, exist_ok=True)
        with (log_folder / "liveness.log").open("a") as file:
            file.write(verdict.text + "\n")

    if liveness.current_monitor() is not None:  # the caller of the driver has its own
        yield
        return
    monitor = liveness.watch(config.stall_after_s, policy="report", name="driver", on_verdict=write_down)
    try:
        yield
    finally:
        monitor.close()
