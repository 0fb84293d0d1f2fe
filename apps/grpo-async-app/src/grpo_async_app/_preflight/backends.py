"""The backends that a run names: installed, with the engines that they adapt, and able to do what is asked."""

from grpo_async_app._config.critic import load_critic_backend
from grpo_async_app._config.sections import GrpoConfig
from offbeat_core import (
    ConfigError,
    RolloutEngineSettings,
    SleepingTrainEngine,
    TrainBackend,
    load_backend,
    require_backend,
)
from offbeat_run import Problems


def check_backends(config: GrpoConfig) -> None:
    """Refuse backends that are not here, before anything takes time.

    Of a launcher that reserves nodes of a cluster only the adapters are asked for: the engines run on the nodes.

    Raises:
        UserError: with the line that installs what is missing.
    """
    launcher = require_backend("offbeat.launcher", config.cluster.launcher)
    wanted: list[tuple[str, str, RolloutEngineSettings | None]]
    wanted = [("offbeat.engine", config.engine.backend, None)]
    wanted.append(("offbeat.rollout", config.rollout.backend, config.rollout))
    if config.teacher.is_set:
        wanted.append(("offbeat.rollout", config.teacher.backend, config.teacher_engine(0)))
    problems = Problems()
    for kind, name, settings in wanted:
        with problems.collected():
            if launcher.reserves:
                load_backend(kind, name)
            else:
                require_backend(kind, name, settings)
    if config.algorithm.needs_critic:
        with problems.collected():
            load_critic_backend(config.critic.backend)
    problems.raise_all()


def check_cut(config: GrpoConfig) -> None:
    """Refuse a truncated distribution where the engine reports other log-probabilities than the trainer scores."""
    rollout = config.rollout
    engine = load_backend("offbeat.rollout", rollout.backend)
    if rollout.sampling(rollout.seed).is_cut and not getattr(engine, "whole_logprobs", False):
        raise ConfigError(
            f"rollout.top_p = {rollout.top_p:g}, top_k = {rollout.top_k}, min_p = {rollout.min_p:g} cut the sampled "
            f"distribution, rollout.backend = {rollout.backend!r} reports log-probabilities of what is left and the "
            'trainer scores the whole: set them to 1, 0 and 0, or rollout.backend = "torch"'
        )


def check_turns(config: GrpoConfig) -> None:
    """Refuse turns on the same devices where the trainer cannot give its memory back."""
    backend: TrainBackend = load_backend("offbeat.engine", config.engine.backend)
    if config.cluster.colocate and (not isinstance(backend, type) or not issubclass(backend, SleepingTrainEngine)):
        raise ConfigError(
            f"engine.backend = {config.engine.backend!r} cannot give its memory back between updates, which "
            "cluster.colocate = true needs: take another, or cluster.colocate = false"
        )
