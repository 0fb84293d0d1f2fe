"""Checks of the settings of a run, wherever it will be: sections that contradict each other."""

import importlib.util
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Final

from grpo_async_app._config.agent import program_words
from grpo_async_app._config.critic import check_critic
from grpo_async_app._config.resolved import ResolvedRun
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.backends import check_open_backends
from grpo_async_app._preflight.engines import check_backends, rounding_reason
from grpo_async_app._preflight.sources import check_lengths, check_sources, naming
from offbeat_core import BackendError, ConfigError, installed_backends, load_backend
from offbeat_data import build_reward, check_data_paths
from offbeat_objectives import check_algorithm
from offbeat_run import Problems, find_model_problems


def find_problems(sections: Mapping[str, Any], failed: Collection[str]) -> list[str]:
    """Return what is wrong with a configuration besides what its loader says; see `offbeat_core.load_config`.

    What a value that does not fit might have changed is left out: it may be no mistake at all.

    Args:
        sections: with the values that fit, by the fields of `GrpoConfig`.
        failed: names of the sections that have others.
    """
    problems = Problems()
    models = {name: sections[name] for name in ("model", "teacher", "critic") if name in sections}
    if "data" in sections:
        with problems.collected():
            check_data_paths(sections["data"])
    if "reward" in sections and "reward" not in failed and sections["reward"].is_set:
        with problems.collected():
            build_reward(sections["reward"])
    if all(field.name in sections for field in fields(GrpoConfig)):
        config = GrpoConfig(**sections)
        with problems.collected():
            check_backends(config)
        collect_contradictions(config, problems, failed)
    return [*find_model_problems(models), *problems.texts]


def check_settings(run: ResolvedRun) -> tuple[str, ...]:
    """Check what settings alone tell, wherever the run will be: choices that work and are probably not meant."""
    problems = Problems()
    notices = check_choices(run, problems)
    problems.raise_all()
    return (*notices, *engine_notices(run.config))


def check_choices(run: ResolvedRun, problems: Problems) -> tuple[str, ...]:
    """Do what `check_settings` does without asking the adapters of the engines, some of which import torch.

    Args:
        run: to check.
        problems: collects what is wrong.
    """
    config, notices = run.config, list[str]()
    with problems.collected():
        notices += _check_objective(run)
    with problems.collected():
        notices += check_sources(run)
    for check in (_check_agent, check_lengths):
        with problems.collected():
            check(run)
    collect_contradictions(config, problems)
    for check_config in (_check_engine_options, check_open_backends, _check_judged):
        with problems.collected():
            check_config(config)
    return (*notices, *_fp8_notice(config))


def collect_contradictions(config: GrpoConfig, problems: Problems, failed: Collection[str] = ()) -> None:
    """Collect contradictions between two sections.

    Args:
        config: to check.
        problems: collects what is wrong.
        failed: sections with other problems, whose values are not known: they contradict nothing.
    """
    for sections, check in _OF_TWO_SECTIONS:
        if failed and not {"", *sections}.isdisjoint(failed):
            continue
        with problems.collected():
            check(config)


def _check_critic(config: GrpoConfig) -> None:
    algorithm = config.algorithm
    check_critic(config.critic, is_asked=algorithm.needs_critic, masks_truncated=algorithm.mask_truncated)


def _check_judged(config: GrpoConfig) -> None:
    if config.validates_every and not (config.is_judged or config.eval.sets):
        raise ConfigError("eval.every_updates needs something that judges: set reward.name, or eval.every_updates = 0")


def check_correction(run: ResolvedRun, known: Sequence[str]) -> list[str]:
    """Check what depends on the choice of the correction; return notices that are not `known`."""
    return [notice for notice in _check_objective(run) if notice not in known]


def _check_objective(run: ResolvedRun) -> tuple[str, ...]:
    """Check section algorithm; its overlong buffer against the source of the shortest responses, which is named."""
    config = run.config
    check = partial(check_algorithm, config.algorithm, samples_per_prompt=config.rollout.samples_per_prompt)
    shortest = min(run.sources, key=lambda source: source.response_tokens)
    if shortest.name:
        check()  # what is wrong for every source names none
    with naming(shortest):
        return check(max_tokens=shortest.response_tokens)


def _check_agent(run: ResolvedRun) -> None:
    """Refuse what an agent does not go together with."""
    config, agent = run.config, run.config.agent
    agent.check()
    if not agent.is_set:
        return
    if run.environments:
        raise ConfigError("environment.name and section agent both answer the model: set one of them")
    if config.teacher.is_set:
        raise ConfigError("section teacher: it scores what follows the data's prompts, and an agent writes its own")
    if config.algorithm.overlong_buffer_tokens:
        raise ConfigError("algorithm.overlong_buffer_tokens: episodes of an agent have no length to come near to")
    if config.cluster.launcher != "local":
        raise ConfigError(
            f'cluster.launcher = "{config.cluster.launcher}": agents reach the engines over loopback, so all are on '
            'one machine; set it to "local"'
        )
    if agent.may_post_reward is False and not config.reward.is_set and not config.data.mix:
        raise ConfigError("agent.may_post_reward = false leaves the reward to section reward: give reward.name")
    if agent.is_outside and config.rollout.serve_port is None:
        raise ConfigError("agent.is_outside = true: set rollout.serve_port, where agents ask for what to do")
    if importlib.util.find_spec("offbeat_serve") is None:
        raise BackendError('section agent needs offbeat-serve; install it with: pip install "grpo-async-app[serve]"')
    if agent.command and not agent.preload and shutil.which(program_words(agent.command)[0]) is None:
        raise ConfigError(f"agent.command: there is no program {agent.command[0]!r}, or it cannot be executed")


def engine_notices(config: GrpoConfig) -> list[str]:
    """Return what the adapters of the engines know against their settings, on devices that need not be here."""
    teacher = [(config.teacher.backend, config.teacher_engine(0))] if config.teacher.is_set else []
    notices: dict[str, None] = {}
    for backend, settings in [(config.rollout.backend, config.rollout), *teacher]:
        if backend in installed_backends("offbeat.rollout"):
            notify = getattr(load_backend("offbeat.rollout", backend), "notices_of", None)
            notices |= dict.fromkeys(notify(settings) if notify else ())
    return list(notices)


def _fp8_notice(config: GrpoConfig) -> list[str]:
    rounding = rounding_reason(config.rollout)
    if not rounding or config.algorithm.correction != "none":
        return []
    return [f"{rounding}, and algorithm.correction = none leaves it at that; token_tis is usual"]


def _check_mode(config: GrpoConfig) -> None:
    if config.cluster.colocate and config.async_.mode != "on-policy pipeline":
        raise ConfigError(
            "cluster.colocate = true: trainer and engines take turns, so nothing can be generated while it trains; "
            f"async is {config.async_.mode} (staleness_threshold = {config.async_.staleness_threshold:g}, "
            f"trigger_parameter_sync_step = {config.async_.trigger_parameter_sync_step}): set them to 0 and 1, with "
            "more steps in one update by async.require_batches; or cluster.colocate = false"
        )


_OF_TWO_SECTIONS: Final[Sequence[tuple[tuple[str, str], Callable[[GrpoConfig], object]]]] = (
    (("algorithm", "critic"), _check_critic),
    (("algorithm", "teacher"), lambda config: config.teacher.check(is_learned_from=config.algorithm.needs_teacher)),
    (("async", "cluster"), _check_mode),
)


def check_same_data(begun: GrpoConfig, now: GrpoConfig) -> None:
    """Refuse to go on with other prompts than a run was begun with; more or fewer epochs are welcome."""
    before, after = _data_settings(begun), _data_settings(now)
    for key in [*before, *(key for key in after if key not in before)]:
        if before.get(key) != after.get(key):
            raise ConfigError(
                f"{key} was {before.get(key)!r} when the run began and would be {after.get(key)!r}: some prompts would "
                "be trained twice and others never; resume with the data it was begun with, or start a new run"
            )


def _data_settings(config: GrpoConfig) -> dict[str, object]:
    """Return all that decides which prompt is trained when, by its key."""
    data = config.data
    own = {f"data.{each.name}": getattr(data, each.name) for each in fields(data) if each.name not in ("epochs", "mix")}
    of_mix = {
        f"data.mix.{name}.{each.name}": getattr(source, each.name)
        for name, source in data.mix.items()
        for each in fields(source)
        if each.name not in ("success_reward", "environment", "reward")
    }
    return own | of_mix


_DECIDED: Final = {
    "temperature": "rollout.temperature: the trainer scores at the sampler's",
    "entropy_gradient": "algorithm.entropy_coefficient: the entropy has a gradient where it is above 0",
    "replay_routes": "rollout.replay_routes",
}
"""Options of training engines that a key of another section decides."""


def _check_engine_options(config: GrpoConfig) -> None:
    """Refuse options of the trainer, the critic and the sampler that say again what another key decides.

    Raises:
        ConfigError: all of them, a line each.
    """
    found = [f"engine.options.{name} is decided by {by}; leave it out" for name, by in _DECIDED.items()]
    of_critic = {
        name: f"critic.options.{name} has no effect: a critic gives values; leave it out"
        for name in (*_DECIDED, "head_dtype")
    }
    given = [line for name, line in zip(_DECIDED, found, strict=True) if name in config.engine.options]
    if "numerics" in config.rollout.options:
        given.append("rollout.options.numerics is decided by engine.options.numerics; leave it out")
    given += [line for name, line in of_critic.items() if name in config.critic.options]
    if given:
        raise ConfigError("\n".join(given))
