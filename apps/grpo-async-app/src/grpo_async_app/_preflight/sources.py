"""Checks of the sources of training prompts, and of the environments and rewards of a run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from grpo_async_app._config.resolved import Environment, ResolvedRun, Source, ValidationSet
from grpo_async_app._config.reward_model import check_one_reward_model, reward_model_of
from grpo_async_app._config.sections import GrpoConfig
from offbeat_core import BackendError, ConfigError, DataError, as_written
from offbeat_data import EnvironmentConfig, Reward, build_environment, build_reward

OWN_DATA: Final = {"reasoning_gym": "reasoning-gym:", "verifiers": "verifiers:"}
"""Environments that judge by themselves, prompts of their own only; and how the path of those begins."""

_OF_THE_GROUP: Final = ("grpo", "gdpo", "grpo_passk", "pass_at_k", "none")
"""Advantages in which the scale of a reward does not show."""


def check_own_data(environment: EnvironmentConfig, path: str, key: str) -> None:
    """Refuse prompts at `path`, which stands under `key`, that an environment cannot judge."""
    name = environment.name
    if path and not path.startswith(OWN_DATA.get(name, "")):
        raise ConfigError(f'environment.name = {name!r} needs {key} = "{OWN_DATA[name]}NAME", got {path!r}')


def check_comparing(reward: Reward, alone: str) -> None:
    """Refuse a reward that compares the completions of a group where it is `alone`, in words, with one of them."""
    if reward.comparing and alone:
        raise ConfigError(
            f"reward {', '.join(reward.comparing)} compares the completions of a group, and {alone}: it would have "
            "nothing to compare; take a reward of one completion, f(prompt, completion), or set that otherwise"
        )


def scored_alone(config: GrpoConfig, environment: Environment) -> str:
    """Return why episodes are scored one at a time; empty where there are only completions of groups."""
    if not (environment.is_set or config.agent.is_set):
        return ""
    where = f"environment.name = {environment.settings.name!r}" if environment.is_set else "section agent"
    return f"episodes of {where} are scored one by one, each when it ends"


def trained_alone(config: GrpoConfig, environment: Environment) -> str:
    """Return why a completion for training is scored without the others of its group; empty where none is."""
    if alone := scored_alone(config, environment):
        return alone
    if config.algorithm.needs_greedy_reward:
        return f"algorithm.advantage = {config.algorithm.advantage} has the greedy completion scored by itself"
    if config.rollout.samples_per_prompt == 1:
        return "rollout.samples_per_prompt = 1 makes groups of one"
    return ""


@contextmanager
def naming(source: Source) -> Iterator[None]:
    """Say of a mistake in which source of a mix it is."""
    try:
        yield
    except (ConfigError, DataError, BackendError) as error:
        if not source.name:
            raise
        raise type(error)(f"data.mix.{source.name}: {error}") from error


def check_sources(run: ResolvedRun) -> list[str]:
    """Check what settings alone tell of the sources.

    Returns:
        Choices that work and are probably not meant.

    Raises:
        ConfigError: an environment or a reward that does not go with a source, or no room for what is said to it.
    """
    config = run.config
    if config.data.mix:  # it may be that of no source, and of validation sets alone
        config.environment.check(has_reward=not config.environment.judges)
    for source in run.sources:
        with naming(source):
            source.environment.settings.check(has_reward=source.judge.is_set)
    _check_rewards_apart(config, run.sources)
    return _scale_notice(config, run.sources)


def check_lengths(run: ResolvedRun) -> None:
    """Refuse a longest prompt with a longest response that the engines have no room for."""
    for source in run.sources:
        with naming(source):
            limit = "environment.max_tokens" if source.environment.is_set else "rollout.max_tokens"
            check_length(run.config, limit, source.response_tokens)


def check_length(config: GrpoConfig, limit: str, response_tokens: int) -> None:
    """Refuse responses of so many tokens, as the key `limit` allows them, after the longest prompt."""
    longest, room = config.data.max_prompt_tokens + response_tokens, config.rollout.max_model_len
    if longest > room:
        raise ConfigError(
            f"data.max_prompt_tokens + {limit} = {longest} is more than rollout.max_model_len = {room}: raise the last "
            "or lower one of the others"
        )


def _check_rewards_apart(config: GrpoConfig, sources: Sequence[Source]) -> None:
    """GDPO looks at each reward by its name."""
    if config.algorithm.advantage != "gdpo":
        return
    for source in sources:
        with naming(source):
            reward = source.judge.settings
            if not reward.is_set or len(reward.all_weights) < 2:
                raise ConfigError(
                    "algorithm.advantage = gdpo normalises each of several rewards by itself: name at least two in "
                    "reward.weights, or take grpo"
                )
            if reward.all_weights != config.reward.all_weights:
                raise ConfigError(
                    "algorithm.advantage = gdpo weighs each reward by its name in section reward, and this source has "
                    "others: let all have those, or take grpo"
                )


def check_end(config: GrpoConfig) -> None:
    """Refuse a run that nothing ends, and passes over data that is drawn without end."""
    data, draws = config.data, "data.mix" if config.data.mix else "curriculum" if config.curriculum.is_set else ""
    if draws and data.epochs > 1:
        raise ConfigError(
            f"data.epochs = {data.epochs} has no effect: {draws} draws prompts without end; leave it out, and say with "
            "engine.max_updates when the run ends"
        )
    if draws and not config.engine.max_updates:
        raise ConfigError(f"the run would never end: {draws} draws prompts without end; set engine.max_updates above 0")
    if not data.epochs and not config.engine.max_updates:
        raise ConfigError("the run would never end: set data.epochs or engine.max_updates above 0")


def _scale_notice(config: GrpoConfig, sources: Sequence[Source]) -> list[str]:
    advantage = config.algorithm.advantage
    if advantage in _OF_THE_GROUP or ":" in advantage or len({source.judge for source in sources}) < 2:
        return []
    return [
        f"the sources of data.mix have several rewards, and algorithm.advantage = {advantage} keeps the scale of each: "
        "what has larger rewards weighs more; let all be of one scale, such as 0 to 1"
    ]


def check_rewards(run: ResolvedRun, *, trains: bool = True) -> tuple[str, ...]:
    """Refuse a run in which nothing scores samples, or an environment that cannot score its prompts.

    Args:
        run: whose sources are looked at.
        trains: groups that are trained on are scored, not validation sets alone.

    Returns:
        How functions of the user's own are called, and programs of the model run, in words.
    """
    notes: dict[str, None] = {}
    for source in run.sources:
        with naming(source):
            notes |= dict.fromkeys(_check_judge(run.config, source, trains))
    if (model := reward_model_of(run.config.reward)) is not None:
        notes[f"reward_model: {model.num_replicas} x {as_written(model.path)}, in processes of its own"] = None
    return tuple(notes)


def _check_judge(config: GrpoConfig, source: Source, trains: bool) -> Sequence[str]:
    """Check the reward and the environment of one source; return how its functions are called, in words."""
    reward, environment = source.judge.settings, source.environment
    is_judged = reward.is_set or environment.is_set or config.agent.is_set
    notes: Sequence[str] = ()
    if reward.is_set or (config.algorithm.needs_reward and not is_judged):
        built = build_reward(reward)
        notes = built.notes
        check_comparing(built, (trained_alone if trains else scored_alone)(config, environment))
    if source.judge.table:
        check_one_reward_model(config.reward, reward)
    if environment.is_set:
        build_environment(environment.settings)
    check_own_data(environment.settings, source.data.path, "path" if source.name else "data.path")
    return notes


def check_set(config: GrpoConfig, each: ValidationSet) -> None:
    """Refuse a validation set that nothing scores, or that its environment, its reward or its lengths do not fit.

    Raises:
        ConfigError, BackendError: with the table of the set.
    """
    table, reward, environment = f"eval.sets.{each.name}", each.judge.settings, each.environment
    if not reward.is_set and not environment.is_set:
        raise ConfigError(f"{table} needs something that judges: set reward.name, or {table}.reward")
    try:
        if environment.table:
            environment.settings.check(has_reward=reward.is_set)
            check_own_data(environment.settings, each.data.path, "path")
        if reward.is_set:
            check_comparing(build_reward(reward), scored_alone(config, environment))
    except ConfigError as error:
        raise ConfigError(f"{table}: {error}") from error
    if environment.table and environment.is_set:
        build_environment(environment.settings)
    check_one_reward_model(config.reward, reward, f"{table}.reward")
    if environment.is_set:
        check_length(config, f"{table}.environment.max_tokens", environment.settings.max_tokens)
    else:
        check_length(config, f"{table}.max_tokens", each.params.max_tokens)
