"""The sources, validation sets, environments and judges that a configuration describes: resolved once, passed on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_async_app._config.mix import MixSourceConfig, PromptsConfig
from grpo_async_app._config.sections import EvalSetConfig, GrpoConfig
from offbeat_core import SamplingParams, as_written
from offbeat_data import DataConfig, EnvironmentConfig, Prompt, RewardConfig, RowCounts, TurnTemplate
from offbeat_run import HELD_OUT


@dataclass(frozen=True, kw_only=True)
class Environment:
    """An environment that answers the model, in a process of its own. Equal to another of the same table.

    Args:
        table: that holds the settings, such as "data.mix.sums"; empty for section `environment`.
        settings: without a name there is no environment.
    """

    table: str
    settings: EnvironmentConfig = field(compare=False)

    @property
    def is_set(self) -> bool:
        return bool(self.settings.name)


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A reward that scores completions. Equal to another of the same table.

    Args:
        table: that holds the settings, such as "eval.sets.aime"; empty for section `reward`.
        settings: without a name or weights there is no reward, as beside an environment that scores by itself.
        label: of its metrics and of its log of errors, such as "mix/sums"; empty for section `reward`.
        trains: it scores samples that are trained on; its metrics are logged.
    """

    table: str
    settings: RewardConfig = field(compare=False)
    label: str = field(default="", compare=False)
    trains: bool = field(default=True, compare=False)

    @property
    def is_set(self) -> bool:
        return self.settings.is_set


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of training prompts.

    Args:
        name: of its table in `data.mix`; empty for section `data`, which is then the only source.
        weight: share of the draws, over the sum of all weights.
        success_reward: lowest reward of a sample that succeeds.
        data: where its prompts are, and how they are rendered.
        environment: what answers the model.
        judge: what scores samples, unless the environment does.
        response_tokens: longest completion or episode, in tokens.
        prompts: at least one, once they are read.
        counts: rows read, kept and left out.
    """

    name: str
    weight: float
    success_reward: float
    data: DataConfig
    environment: Environment
    judge: Judge
    response_tokens: int
    prompts: tuple[Prompt, ...] = ()
    counts: RowCounts = RowCounts()


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """A set of prompts that a validation samples and scores.

    Args:
        name: such as "aime"; "held-out" for the prompts that section `data` holds out.
        data: where its items are.
        params: how they are sampled; the seed is that of the first item.
        num_samples: of each item.
        k: of pass@k and maj@k; empty: the number of samples.
        success_reward: lowest reward of a sample that is right.
        environment: what answers the model.
        judge: what scores samples, and finds the answer in a completion.
        prompts: its items, once they are read.
    """

    name: str
    data: DataConfig
    params: SamplingParams
    num_samples: int = 1
    k: tuple[int, ...] = ()
    success_reward: float
    environment: Environment
    judge: Judge
    prompts: tuple[Prompt, ...] = ()

    def describe(self) -> str:
        """Return a row of a plan."""
        how = "greedy" if not self.params.temperature else f"temperature {self.params.temperature:g}"
        samples = f"{self.num_samples} samples each, " if self.num_samples > 1 else ""
        text = f"{self.name}: {len(self.prompts)} prompts, {samples}{how}, at most {self.params.max_tokens} tokens"
        environment = self.environment
        name = as_written(environment.settings.name)
        return f"{text}, environment {name}" if environment.table and environment.is_set else text


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A configuration with everything looked up that its tables refer to.

    Args:
        config: as it was given, or with what the machine has chosen.
        sources: of training prompts, by name: files and overrides have any order, draws have one.
        sets: that a validation uses: `eval.sets`, and the held-out prompts of section `data` once they are read.
        held_out: set of those prompts, before they are read.
        environments: that answer the model, each in a process of its own.
        judges: rewards that score.
        templates: put the words of environments into tokens, once the tokenizer is loaded.
    """

    config: GrpoConfig
    sources: tuple[Source, ...]
    sets: tuple[ValidationSet, ...]
    held_out: ValidationSet
    environments: tuple[Environment, ...]
    judges: tuple[Judge, ...]
    templates: Mapping[Environment, TurnTemplate] = field(default_factory=dict)


def resolve(config: GrpoConfig) -> ResolvedRun:
    """Resolve a configuration. Pure: reads nothing and checks nothing."""
    environment = Environment(table="", settings=config.environment)
    judge = Judge(table="", settings=config.reward)
    mix = sorted(config.data.mix.items())
    sources = [_mix_source(config, name, own, environment, judge) for name, own in mix] or [
        Source(
            name="",
            weight=1.0,
            success_reward=config.curriculum.success_reward,
            data=config.data,
            environment=environment,
            judge=judge,
            response_tokens=config.response_tokens(config.environment),
        )
    ]
    own_sets = config.eval.sets if config.validates_every else {}
    sets = [_own_set(config, name, own, environment, judge) for name, own in own_sets.items()]
    users: list[Source | ValidationSet] = [*sources, *sets]
    return ResolvedRun(
        config=config,
        sources=tuple(sources),
        sets=tuple(sets),
        held_out=_held_out_set(config, environment, judge),
        environments=_distinct([environment, *(each.environment for each in users)]),
        judges=_distinct([judge, *(each.judge for each in users)]),
    )


def _distinct(found: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(each for each in found if each.is_set))


def _mix_source(config: GrpoConfig, name: str, own: MixSourceConfig, environment: Environment, judge: Judge) -> Source:
    table = f"data.mix.{name}"
    if own.environment is not None:
        environment = Environment(table=table, settings=own.environment)
    if own.reward is not None:
        judge = Judge(table=table, settings=own.reward, label=f"mix/{name}")
    elif environment.settings.judges:
        judge = _no_judge(table)
    return Source(
        name=name,
        weight=own.weight,
        success_reward=config.curriculum.success_reward if own.success_reward is None else own.success_reward,
        data=replace(_own_data(config.data, own), task_options=own.task_options or config.data.task_options),
        environment=environment,
        judge=judge,
        response_tokens=config.response_tokens(environment.settings),
    )


def _own_set(
    config: GrpoConfig, name: str, own: EvalSetConfig, environment: Environment, judge: Judge
) -> ValidationSet:
    table, rollout = f"eval.sets.{name}", config.rollout
    if own.environment is not None:
        environment = Environment(table=table, settings=own.environment)
    if own.reward is not None:
        judge = Judge(table=table, settings=own.reward, label=name, trains=False)
    elif own.environment is not None and environment.settings.judges:
        judge = _no_judge(table)
    return ValidationSet(
        name=name,
        data=_own_data(config.data, own),
        params=SamplingParams(
            max_tokens=own.max_tokens or rollout.max_tokens,
            temperature=own.temperature,
            top_p=own.top_p,
            top_k=own.top_k,
            min_p=own.min_p,
            stop=tuple(rollout.stop),
            seed=rollout.seed,
        ),
        num_samples=own.n,
        k=tuple(own.k),
        success_reward=own.success_reward,
        environment=environment,
        judge=judge,
    )


def _held_out_set(config: GrpoConfig, environment: Environment, judge: Judge) -> ValidationSet:
    rollout = config.rollout
    return ValidationSet(
        name=HELD_OUT,
        data=config.data,
        params=SamplingParams(
            max_tokens=rollout.max_tokens,
            temperature=config.eval.temperature,
            stop=tuple(rollout.stop),
            seed=rollout.seed,
        ),
        success_reward=config.eval.success_reward,
        environment=environment,
        judge=judge,
    )


def _no_judge(table: str) -> Judge:
    """Return the judge beside an environment that scores by itself: section `reward` is for others."""
    return Judge(table=table, settings=RewardConfig(), trains=False)


def _own_data(data: PromptsConfig, own: MixSourceConfig | EvalSetConfig) -> PromptsConfig:
    """Return section `data` with the rows of a table of its own, all of them, none held out."""
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
