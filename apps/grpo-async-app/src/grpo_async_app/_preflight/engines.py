"""Engines that a run names: installed, able to do what is asked, and fit for the models that they serve."""

from pathlib import Path
from typing import Any

from grpo_async_app._config.critic import load_critic_backend
from grpo_async_app._config.sections import AUTO, GrpoConfig, RolloutConfig
from offbeat_core import (
    BackendError,
    ConfigError,
    HeldBytes,
    RolloutEngineSettings,
    SleepingTrainEngine,
    TrainBackend,
    installed_backends,
    load_backend,
    require_backend,
)
from offbeat_data import Tokenizer, load_tokenizer
from offbeat_run import ExaminedModel, Problems, check_model, inspect_model


def check_backends(config: GrpoConfig) -> None:
    """Refuse backends that are not here, before anything takes time. For "auto" one that is here is taken.

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
    for kind, name, settings in (each for each in wanted if each[1] != AUTO):
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


def backend_can(group: str, backend: str, what: str) -> bool:
    """Return whether the class of a backend says that it can; not where it is not installed."""
    try:
        return bool(getattr(load_backend(group, backend), what, False))
    except BackendError:
        return False


def check_numerics(config: GrpoConfig) -> None:
    """Refuse exact numerics where trainer and engines cannot compute the same bits.

    Args:
        config: with engines and formats chosen.
    """
    if not config.is_exact:
        return
    engine, rollout = config.engine, config.rollout
    trains = backend_can("offbeat.engine", engine.backend, "computes_exactly")
    samples = backend_can("offbeat.rollout", rollout.backend, "computes_exactly")
    problems = {
        f'engine.backend = "{engine.backend}": set it to torch': not trains,
        f'rollout.backend = "{rollout.backend}": set it to torch': not samples,
        f"rollout.dtype = {rollout.dtype} and engine.dtype = {engine.dtype}: set both to one": (
            rollout.dtype != engine.dtype
        ),
        f"rollout.weight_format = {rollout.weight_format}: set it to dtype": rollout.weight_format != "dtype",
    }
    if found := [problem for problem, is_there in problems.items() if is_there]:
        raise ConfigError(
            'engine.options.numerics = "exact" needs the torch trainer and the embedded engine, in one number format; '
            f"got {'; '.join(found)}"
        )


def check_turns(config: GrpoConfig) -> None:
    """Refuse turns on the same devices where the trainer cannot give its memory back."""
    backend: TrainBackend = load_backend("offbeat.engine", config.engine.backend)
    sleeps = config.cluster.colocate and config.cluster.sleep_level != 0
    if sleeps and (not isinstance(backend, type) or not issubclass(backend, SleepingTrainEngine)):
        raise ConfigError(
            f"engine.backend = {config.engine.backend!r} cannot give its memory back between updates, which "
            "cluster.colocate = true needs: take another, or set cluster.sleep_level = 0 where a device holds both, "
            "or cluster.colocate = false"
        )


def held_bytes(backend: str, settings: RolloutEngineSettings) -> HeldBytes:
    """Return what a backend holds in FP8; of one that is not installed or does not say, the formats of `dtype`."""
    if backend not in installed_backends("offbeat.rollout"):
        return HeldBytes()
    ask: Any = getattr(load_backend("offbeat.rollout", backend), "held_bytes", None)
    held: HeldBytes = ask(settings) if ask else HeldBytes()
    return held


def rounding_reason(rollout: RolloutConfig) -> str:
    """Return why engines compute with coarser numbers than those of `rollout.dtype`; empty where they do not.

    `weight_format` rounds weights on their way, also of an engine that then holds them in `dtype`.
    """
    if rollout.weight_format != "dtype":
        return f"rollout.weight_format = {rollout.weight_format}: the engines sample with rounded weights"
    held = held_bytes(rollout.backend, rollout)
    if not (held.matrices or held.cache):
        return ""
    rounded = ("weights, keys and values" if held.cache else "weights") if held.matrices else "keys and values"
    return f"rollout.options: the engines hold {rounded} in FP8"


def check_positions(config: GrpoConfig, model: ExaminedModel, role: str = "") -> None:
    """Refuse prompts and completions that are longer than a model's positions."""
    if model.max_positions and config.rollout.max_model_len > model.max_positions:
        raise ConfigError(
            f"rollout.max_model_len = {config.rollout.max_model_len} is more than the {model.max_positions} positions "
            f"of {role}{model.path}: lower it"
        )


def check_engine_model(backend: str, model: ExaminedModel) -> None:
    """Refuse a model that engines of this backend would refuse once they are started."""
    if check := getattr(load_backend("offbeat.rollout", backend), "check_model", None):
        check(Path(model.path))


def check_teacher(config: GrpoConfig, tokenizer: Tokenizer) -> None:
    """Refuse a teacher that is not there, cannot be served, or means something else by a token."""
    teacher = config.teacher
    if not teacher.is_set:
        return
    folder = inspect_model(teacher.path, "teacher.path")
    check_model(folder.path)
    check_engine_model(teacher.backend, folder)
    check_positions(config, folder, "the teacher ")
    difference = tokenizer.first_difference(load_tokenizer(folder.path, config.model.trust_remote_code))
    if difference:
        raise ConfigError(
            f"the teacher {folder.path} has another tokenizer than {config.model.path} ({difference}), so its "
            "log-probabilities are of other texts: take a teacher of the same family"
        )
