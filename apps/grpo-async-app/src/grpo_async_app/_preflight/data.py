"""The data of a run: prompts of its sources and validation sets, and the templates of its environments."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from grpo_async_app._config.resolved import Environment, ResolvedRun, Source, ValidationSet
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.sources import check_set, naming
from offbeat_core import ConfigError, as_written
from offbeat_data import (
    DataConfig,
    Prompt,
    PromptSet,
    RowCounts,
    Tokenizer,
    TurnTemplate,
    build_reward,
    environment_tools,
    load_prompts,
)
from offbeat_run import HELD_OUT, doing

Data = TypeVar("Data", bound=DataConfig)

Tools = Mapping[Environment, list[dict[str, Any]]]
"""Descriptions of the tools that each environment offers, as chat templates take them."""


def read_data(run: ResolvedRun, tokenizer: Tokenizer) -> tuple[ResolvedRun, PromptSet]:
    """Read all prompts of a run.

    Returns:
        The run with its prompts, and the templates of its environments; and all training prompts one source after
        the other, with what section `data` holds out.

    Raises:
        DataError, ConfigError, ModelError, BackendError: as `load_prompts`, with the name of the source or set.
    """
    tools = ask_tools(run)
    templates = turn_templates(run, tokenizer, tools)
    prompts, sources = _read_sources(run, tokenizer, tools)
    sets = read_sets(run, tokenizer, tools)
    if prompts.eval:
        held_out = prompts.eval[: run.config.eval.max_prompts or None]
        sets = (replace(run.held_out, prompts=held_out), *sets)
    found = tools.get(run.held_out.environment, [])
    config = replace(run.config, data=with_tools(run.config.data, found))
    return replace(run, config=config, sources=sources, sets=sets, templates=templates), prompts


def ask_tools(run: ResolvedRun) -> Tools:
    """Ask every environment once which tools it has; raises DataError where one cannot say."""
    return {each: environment_tools(each.settings) for each in run.environments}


def with_tools(data: Data, tools: list[dict[str, Any]]) -> Data:
    """Describe in the prompts the tools that their environment has, where the configuration names none."""
    return replace(data, template_options={"tools": tools, **data.template_options}) if tools else data


def _read_sources(run: ResolvedRun, tokenizer: Tokenizer, tools: Tools) -> tuple[PromptSet, tuple[Source, ...]]:
    found: list[PromptSet] = []
    sources: list[Source] = []
    for source in run.sources:
        data = with_tools(source.data, tools.get(source.environment, []))
        doing("reading the data", as_written(data.path))
        with naming(source):
            prompts = load_prompts(data, tokenizer, needs_answer=source.judge.settings.needs_answer)
        found.append(prompts)
        sources.append(replace(source, prompts=prompts.train, counts=prompts.train_counts))
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


def read_sets(
    run: ResolvedRun, tokenizer: Tokenizer, tools: Tools, names: Sequence[str] | None = None
) -> tuple[ValidationSet, ...]:
    """Check and read the sets of `eval.sets`.

    Args:
        run: whose sets are not read yet.
        tokenizer: of the model.
        tools: of the environments.
        names: sets to read, in this order; None: all.

    Raises:
        DataError, ConfigError, BackendError: as `load_prompts`, with the name of the set.
    """
    by_name = {each.name: each for each in run.sets}
    sets: list[ValidationSet] = []
    for each in by_name.values() if names is None else [by_name[name] for name in names]:
        check_set(run.config, each)
        data = with_tools(each.data, tools.get(each.environment, []))
        prompts = load_prompts(data, tokenizer, needs_answer=each.judge.settings.needs_answer).train
        sets.append(replace(each, prompts=prompts))
    return tuple(sets)


def turn_templates(run: ResolvedRun, tokenizer: Tokenizer, tools: Tools) -> dict[Environment, TurnTemplate]:
    """Return what puts the words of each environment into tokens."""
    data = {source.environment: source.data for source in run.sources}
    return {
        each: _turn_template(each, with_tools(data.get(each, run.config.data), tools[each]), tokenizer)
        for each in run.environments
    }


def _turn_template(environment: Environment, data: DataConfig, tokenizer: Tokenizer) -> TurnTemplate:
    template = TurnTemplate(tokenizer, data)
    if environment.settings.name == "calculator":
        template.check(["tool"])  # others are checked when they first speak
    return template


def check_validated(run: ResolvedRun) -> None:
    """Refuse validations without prompts, and what has no effect without validations.

    Args:
        run: with its prompts.

    Raises:
        ConfigError: with what to set.
    """
    config = run.config
    if config.validates_every and not run.sets:
        raise ConfigError(
            "eval.every_updates needs held-out prompts: set data.eval_size, data.eval_path or a table "
            "[eval.sets.NAME], or set it to 0"
        )
    if config.eval.stop_at_accuracy and not config.validates_every:
        raise ConfigError(
            f"eval.stop_at_accuracy = {config.eval.stop_at_accuracy:g} has no effect without validations: set "
            "eval.every_updates, or leave it out"
        )


def set_notices(run: ResolvedRun, train: Sequence[Prompt]) -> list[str]:
    """Return notices of validation sets that measure something else than is probably meant."""
    own = [each for each in run.sets if each.name != HELD_OUT]
    return [
        *_shared_notices(own, train),
        *_held_out_notices(run.config, has_held_out=len(own) < len(run.sets)),
        *_alone_notices(run.sets),
    ]


def _shared_notices(sets: Sequence[ValidationSet], train: Sequence[Prompt]) -> list[str]:
    """Return notices of sets whose prompts are trained on."""
    trained = {prompt.ids.tobytes() for prompt in train} if sets else set()
    counts = {each.name: sum(prompt.ids.tobytes() in trained for prompt in each.prompts) for each in sets}
    return [
        f"{count} prompts of eval.sets.{name} are also training prompts: on these it measures memory"
        for name, count in counts.items()
        if count
    ]


def _held_out_notices(config: GrpoConfig, *, has_held_out: bool) -> list[str]:
    """Return a notice of settings of held-out prompts, where there are none."""
    defaults = {"temperature": 0.0, "max_prompts": 0, "success_reward": 0.99}
    given = [f"eval.{name}" for name, default in defaults.items() if getattr(config.eval, name) != default]
    if not given or not config.validates_every or has_held_out:
        return []
    return [f"{', '.join(given)}: of held-out prompts alone, and there are none; each of eval.sets has its own"]


def _alone_notices(sets: Sequence[ValidationSet]) -> list[str]:
    """Return notices about sets in which a reward that compares has nothing to compare with."""
    return [
        f"reward {', '.join(comparing)} compares the completions of a prompt, and validation set {each.name} samples "
        "one: its reward there says nothing; give a table of eval.sets n above 1, or a reward of its own"
        for each in sets
        if each.num_samples == 1 and each.judge.is_set and (comparing := build_reward(each.judge.settings).comparing)
    ]


def mark_of(prompts: Sequence[Prompt]) -> dict[str, int | str]:
    """Return how many prompts there are, and which: with the settings, the order of training is a function of these."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(len(prompt.ids).to_bytes(8, "little") + prompt.ids.tobytes())
    return {"number": len(prompts), "sha256": digest.hexdigest()}
