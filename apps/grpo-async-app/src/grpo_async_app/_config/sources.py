"""Sources of training prompts, and what answers and judges the model: section `data`, or its mix."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from grpo_async_app._config.mix import MixSourceConfig, PromptsConfig
from grpo_async_app._config.sections import EvalSetConfig, GrpoConfig
from offbeat_core import BackendError, ConfigError, DataError
from offbeat_data import (
    DataConfig,
    EnvironmentConfig,
    Prompt,
    PromptSet,
    Reward,
    RewardConfig,
    RowCounts,
    Tokenizer,
    TurnTemplate,
    environment_tools,
    load_prompts,
)
from offbeat_run import doing

OWN_DATA: Final = {"reasoning_gym": "reasoning-gym:", "verifiers": "verifiers:"}
"""Environments that judge by themselves, prompts of their own only; and how the path of those begins."""

_OF_THE_GROUP: Final = ("grpo", "gdpo", "grpo_passk", "pass_at_k", "none")
"""Advantages in which the scale of a reward does not show."""

Data = TypeVar("Data", bound=DataConfig)

Tools = Mapping[str, list[dict[str, Any]]]
"""That the model is told of, by the key of the environment that has them."""


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """Settings of a source: its own, and else those of the sections.

    Args:
        name: of its table in `data.mix`; empty: it is section `data`, and the only one.
        weight: of its draws.
        success_reward: from which on a sample succeeds.
        data: where its prompts are, and how they are rendered.
        environment: that answers the model; one without a name is none.
        environment_key: of it in `GrpoConfig.environments`.
        reward: that judges, unless the environment does.
        judge: under which `Fleet.score` knows that reward.
    """

    name: str
    weight: float
    success_reward: float
    data: DataConfig
    environment: EnvironmentConfig
    environment_key: str
    reward: RewardConfig
    judge: str


@dataclass(frozen=True, kw_only=True)
class TrainingSource:
    """A source with its prompts, of which at least one was short enough, and what became of its rows."""

    settings: SourceSettings
    prompts: tuple[Prompt, ...]
    counts: RowCounts


def judge_of(source: str) -> str:
    """Under which the reward of a source's own is known: no validation set has such a name."""
    return f"mix/{source}"


def source_settings(config: GrpoConfig) -> list[SourceSettings]:
    """Return the sources of a run as draws count them: by name, since files and overrides have any order."""
    if config.data.mix:
        return [_own_settings(config, name, own) for name, own in sorted(config.data.mix.items())]
    return [
        SourceSettings(
            name="",
            weight=1.0,
            success_reward=config.curriculum.success_reward,
            data=config.data,
            environment=config.environment,
            environment_key="",
            reward=config.reward,
            judge="",
        )
    ]


def _own_settings(config: GrpoConfig, name: str, own: MixSourceConfig) -> SourceSettings:
    data, environment = config.data, own.environment or config.environment
    return SourceSettings(
        name=name,
        weight=own.weight,
        success_reward=config.curriculum.success_reward if own.success_reward is None else own.success_reward,
        data=replace(own_data(data, own), task_options=own.task_options or data.task_options),
        environment=environment,
        environment_key="" if own.environment is None else name,
        reward=own.reward or reward_beside(environment, config.reward),
        judge="" if own.reward is None else judge_of(name),
    )


def own_data(data: PromptsConfig, own: MixSourceConfig | EvalSetConfig) -> PromptsConfig:
    """Section `data` with the rows of a table of its own, all of them, none held out."""
    return replace(
        data,
        mix={},
        path=own.path,
        split=own.split,
        num_items=own.max_prompts,
        eval_path="",
        eval_split="",
        eval_size=0,
        prompt_column=own.prompt_column or data.prompt_column,
        answer_column=own.answer_column or data.answer_column,
        system_prompt=own.system_prompt or data.system_prompt,
    )


def reward_beside(environment: EnvironmentConfig, section: RewardConfig) -> RewardConfig:
    """Return the section's reward, which is for others where this environment judges by itself."""
    return RewardConfig() if environment.judges else section


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


def scored_alone(config: GrpoConfig, environment: EnvironmentConfig) -> str:
    """Return why episodes are scored one at a time; empty where there are only completions of groups."""
    where = f"environment.name = {environment.name!r}" if environment.name else "section agent"
    has_episodes = environment.name or config.agent.is_set
    return f"episodes of {where} are scored one by one, each when it ends" if has_episodes else ""


def trained_alone(config: GrpoConfig, environment: EnvironmentConfig) -> str:
    """Return why a completion for training is scored without the others of its group; empty where none is."""
    if alone := scored_alone(config, environment):
        return alone
    if config.algorithm.needs_greedy_reward:
        return f"algorithm.advantage = {config.algorithm.advantage} has the greedy completion scored by itself"
    if config.rollout.samples_per_prompt == 1:
        return "rollout.samples_per_prompt = 1 makes groups of one"
    return ""


@contextmanager
def naming(source: SourceSettings) -> Iterator[None]:
    """Say of a mistake in which source of a mix it is."""
    try:
        yield
    except (ConfigError, DataError, BackendError) as error:
        if not source.name:
            raise
        raise type(error)(f"data.mix.{source.name}: {error}") from error


def check_sources(config: GrpoConfig) -> list[str]:
    """Check what settings alone tell of the sources.

    Returns:
        Choices that work and are probably not meant.

    Raises:
        ConfigError: an environment or a reward that does not go with a source, or no room for what is said to it.
    """
    sources = source_settings(config)
    if config.data.mix:  # it may be that of no source, and of validation sets alone
        config.environment.check(has_reward=not config.environment.judges)
    for source in sources:
        with naming(source):
            source.environment.check(has_reward=source.reward.is_set)
    _check_rewards_apart(config, sources)
    return _scale_notice(config, sources)


def check_lengths(config: GrpoConfig) -> None:
    """Refuse a longest prompt with a longest response that the engines have no room for."""
    for source in source_settings(config):
        longest = config.data.max_prompt_tokens + config.response_tokens(source.environment)
        limit = "environment.max_tokens" if source.environment.name else "rollout.max_tokens"
        if longest > config.rollout.max_model_len:
            with naming(source):
                raise ConfigError(
                    f"data.max_prompt_tokens + {limit} = {longest} is more than rollout.max_model_len = "
                    f"{config.rollout.max_model_len}: raise the last or lower one of the others"
                )


def _check_rewards_apart(config: GrpoConfig, sources: Sequence[SourceSettings]) -> None:
    """GDPO looks at each reward by its name."""
    if config.algorithm.advantage != "gdpo":
        return
    for source in sources:
        with naming(source):
            if not source.reward.is_set or len(source.reward.all_weights) < 2:
                raise ConfigError(
                    "algorithm.advantage = gdpo normalises each of several rewards by itself: name at least two in "
                    "reward.weights, or take grpo"
                )
            if source.reward.all_weights != config.reward.all_weights:
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


def _scale_notice(config: GrpoConfig, sources: Sequence[SourceSettings]) -> list[str]:
    advantage = config.algorithm.advantage
    if advantage in _OF_THE_GROUP or ":" in advantage or len({source.judge for source in sources}) < 2:
        return []
    return [
        f"the sources of data.mix have several rewards, and algorithm.advantage = {advantage} keeps the scale of each: "
        "what has larger rewards weighs more; let all be of one scale, such as 0 to 1"
    ]


def tools_of(config: GrpoConfig) -> Tools:
    """Ask every environment once what the model is to be told of; raises DataError where one cannot say."""
    return {key: environment_tools(environment) for key, environment in config.environments.items()}


def with_tools(data: Data, tools: list[dict[str, Any]]) -> Data:
    """Tell the model in its prompts of the tools that its environment has, where the configuration names none."""
    return replace(data, template_options={"tools": tools, **data.template_options}) if tools else data


def load_sources(
    config: GrpoConfig, tokenizer: Tokenizer, tools: Tools
) -> tuple[PromptSet, tuple[TrainingSource, ...]]:
    """Read the prompts of every source.

    Returns:
        All of them one after the other, with what section `data` holds out; and source by source.

    Raises:
        DataError, ConfigError, ModelError, BackendError: as `load_prompts`, with the name of the source.
    """
    found: list[PromptSet] = []
    sources: list[TrainingSource] = []
    for settings in source_settings(config):
        data = with_tools(settings.data, tools.get(settings.environment_key, []))
        doing("reading the data", data.path)
        with naming(settings):
            prompts = load_prompts(data, tokenizer, needs_answer=settings.reward.needs_answer)
        found.append(prompts)
        sources.append(TrainingSource(settings=settings, prompts=prompts.train, counts=prompts.train_counts))
    return found[0] if len(found) == 1 else _joined(found), tuple(sources)


def _joined(found: Sequence[PromptSet]) -> PromptSet:
    counts = [each.train_counts for each in found]
    return PromptSet(
        train=tuple(prompt for each in found for prompt in each.train),
        eval=(),
        train_counts=RowCounts(
            read=sum(each.read for each in counts),
            held_out=sum(each.held_out for each in counts),
            too_long=sum(each.too_long for each in counts),
            kept=sum(each.kept for each in counts),
            longest=max(each.longest for each in counts),
        ),
        eval_counts=RowCounts(),
        notices=tuple(notice for each in found for notice in each.notices),
        template=found[0].template,
    )


def turn_templates(config: GrpoConfig, tokenizer: Tokenizer, tools: Tools) -> dict[str, TurnTemplate]:
    """Return what puts the words of each environment into tokens, by its key in `GrpoConfig.environments`."""
    own = {each.environment_key: each.data for each in source_settings(config)}
    return {
        key: _turn_template(environment, with_tools(own.get(key, config.data), tools.get(key, [])), tokenizer)
        for key, environment in config.environments.items()
    }


def _turn_template(environment: EnvironmentConfig, data: DataConfig, tokenizer: Tokenizer) -> TurnTemplate:
    template = TurnTemplate(tokenizer, data)
    if environment.name == "calculator":
        template.check(["tool"])  # others are checked when they first speak
    return template
