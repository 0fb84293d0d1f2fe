"""prime-rl's environments, for training and validation, in our words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from grpo_async_app._imports.table_names import table_names
from offbeat_recipes import RecipeBuilder, is_number

_TRAIN: Final = "orchestrator.train.source"
_EVAL: Final = "orchestrator.eval.source"
_RATIOS: Final = "orchestrator.buffer.env_ratios"
_HELD_OUT: Final = 64
_SERVERS: Final = 1.0
"""Temperature of vLLM's server where a request names none, unless the model's folder has another."""
_OF_SERVER: Final = "the server's default there, which generation_config.json of the model may change; here 1"
_IDS: Final = ("env.taskset.id", "taskset.id", "legacy.id", "env.id", "id")
_ARGUMENTS: Final = ("env.taskset.", "taskset.", "legacy.args.", "env.args.", "args.")
"""Options that name an environment of verifiers and set its arguments, the current ones first."""
_HARNESSES: Final = ("harness.", "env.harness.", "env.agent.harness.")


@dataclass
class _Source:
    """An environment of verifiers.

    Args:
        path: as data.path has it.
        name: it goes by in a report.
        options: arguments of the environment.
        names: options that it is made of.
        others: what is set beside them, by the end of its name.
    """

    path: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    others: dict[str, str] = field(default_factory=dict)


def write_sources(draft: RecipeBuilder) -> None:
    """Write where prompts come from: one environment as data.path, several as tables data.mix."""
    sources = _read_sources(draft, _TRAIN)
    for source in sources:
        _take_what_is_shared(draft, source)
    draft.put("environment.name", "verifiers", *(name for source in sources for name in source.names[:1]), _TRAIN)
    draft.change(_TRAIN, "environments of verifiers up to 0.3.1; agents that are separate programs are not imported")
    if not sources:
        draft.lose(_TRAIN, "no environment is named: set data.path")
        draft.put("data.path", "verifiers:", _TRAIN)
    elif len(sources) == 1:
        only = sources[0]
        draft.put("data.path", only.path, *only.names)
        if only.options:
            draft.put("data.task_options", only.options, *only.names)
    else:
        shares = draft.take(_RATIOS, default=[])
        filled = _filled(shares, sources)
        mix = {each.name: _mixed(draft, each, share) for each, share in zip(sources, filled, strict=True)}
        draft.put("data.mix", mix, *(name for source in sources for name in source.names), _RATIOS)


def _take_what_is_shared(draft: RecipeBuilder, source: _Source) -> None:
    """Read sampling and group size of one environment where they equal those of all."""
    for end, name in source.others.items():
        shared = f"orchestrator.{'train.' * end.startswith('sampling.')}{end}"
        if draft.given(name) is not None and draft.given(name) == draft.given(shared):
            draft.take(name)
            draft.ignore(name, f"the same as {shared}")


def _filled(found: Any, sources: list[_Source]) -> list[float]:
    given = found if isinstance(found, list) else []
    shares = [float(share) if is_number(share) else 1.0 for share in given]
    return [*shares, *[1.0] * len(sources)][: len(sources)]


def _mixed(draft: RecipeBuilder, source: _Source, share: float) -> dict[str, Any]:
    weight = share
    if ratio := source.others.get("ratio"):
        weight = draft.number(ratio, default=share)
        source.names.append(ratio)
    return {"path": source.path, "weight": float(weight)} | ({"task_options": source.options} if source.options else {})


def _read_sources(draft: RecipeBuilder, prefix: str) -> list[_Source]:
    numbers = sorted({name.split(".")[prefix.count(".") + 1] for name in draft.left if name.startswith(f"{prefix}.")})
    found = [_read_source(draft, f"{prefix}.{number}.") for number in numbers if number.isdigit()]
    named = [source for source in found if source is not None]
    for source, name in zip(named, table_names([source.name for source in named]), strict=True):
        source.name = name
    return named


def _read_source(draft: RecipeBuilder, prefix: str) -> _Source | None:
    held = {name.removeprefix(prefix): name for name in draft.left if name.startswith(prefix)}
    identifier = next((held[end] for end in _IDS if end in held), "")
    if not identifier:
        draft.lose(f"{prefix}name" if "name" in held else prefix.rstrip("."), "names no environment: give its path")
        return None
    path = str(draft.take(identifier))
    _read_harness(draft, held)
    name = f"{prefix}name"
    called = str(draft.take(name, default=path))
    source = _Source(f"verifiers:{path}", called, names=[identifier, *([name] if draft.has(name) else [])])
    for end, option in held.items():
        arguments = next((each for each in _ARGUMENTS if end.startswith(each)), None)
        if option == identifier or end == "name":
            continue
        if arguments and (value := draft.take(option)) is not None:
            _set(source.options, end.removeprefix(arguments), value)
            source.names.append(option)
        elif not arguments:
            source.others[end] = option
    return source


def _read_harness(draft: RecipeBuilder, held: dict[str, str]) -> None:
    """Read what runs the turns of an episode: only the model if it is "null", otherwise a program of its own."""
    for part in _HARNESSES:
        name = held.get(f"{part}id")
        for each in [option for end, option in held.items() if name and end.startswith(part) and option != name]:
            draft.ignore(each, f"belongs to {part}id")
            draft.take(each)
        if name and draft.take(name) == "null":
            draft.ignore(name, "here, too, only the model answers")
        elif name:
            draft.lose(name, "agents that are separate programs are not imported: see section agent")
        for end in [end for end in held if name and end.startswith(part)]:
            del held[end]


def _set(options: dict[str, Any], path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for each in outer:
        options = options.setdefault(each, {})
    options[last] = value


def write_eval_sets(draft: RecipeBuilder) -> None:
    """Write a validation set for each environment, with the sampling of all."""
    sources = _read_sources(draft, _EVAL)
    temperature = "orchestrator.eval.sampling.temperature"
    held_out = (temperature, "orchestrator.eval.interval", "orchestrator.eval.num_examples")
    if not sources and not any(map(draft.has, held_out)):
        return
    draft.copy("eval.every_updates", "orchestrator.eval.interval", default=100)
    if not sources:
        draft.put("eval.temperature", draft.number(temperature, default=_SERVERS), temperature)
        if not draft.has(temperature):
            draft.change(temperature, _OF_SERVER)
        draft.copy("data.eval_size", "orchestrator.eval.num_examples", default=_HELD_OUT, convert=_some)
        return
    names = [f"orchestrator.eval.{end}" for end in (*_OF_SETS, *_SAMPLED)]
    sampling = _read_settings(draft, "orchestrator.eval.sampling.", _OF_SAMPLING)
    common = _read_settings(draft, "orchestrator.eval.", _OF_SETS) | sampling
    task = draft.entries.get("data.task_options")
    shared = task.value if task else {}
    sets = {}
    for source in sources:
        own = {end: draft.take(name) for end, name in source.others.items() if end in (*_OF_SETS, *_SAMPLED)}
        names += [source.others[end] for end in own]
        values = {_OF_SETS.get(end, "") or _SAMPLED[end]: value for end, value in own.items() if value is not None}
        sets[source.name] = {"path": source.path} | _positive({"temperature": _SERVERS} | common | values)
        if "temperature" not in common | values:
            draft.change(temperature, _OF_SERVER)
        if source.options and source.options != shared:
            draft.lose(source.names[-1], "a validation set has the arguments of data.task_options")
    draft.put("eval.sets", sets, *(name for source in sources for name in source.names), *names)


_OF_SETS: Final[Mapping[str, str]] = {"num_examples": "max_prompts", "group_size": "n", "rollouts_per_example": "n"}
_OF_SAMPLING: Final[Mapping[str, str]] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_completion_tokens": "max_tokens",
    "max_tokens": "max_tokens",
}
_SAMPLED: Final[Mapping[str, str]] = {f"sampling.{end}": key for end, key in _OF_SAMPLING.items()}


def _read_settings(draft: RecipeBuilder, prefix: str, keys: Mapping[str, str]) -> dict[str, Any]:
    found = {key: draft.take(f"{prefix}{end}") for end, key in keys.items() if draft.has(f"{prefix}{end}")}
    return {key: value for key, value in found.items() if value is not None}


def _positive(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is less than none: -1 is all there."""
    return {key: value for key, value in values.items() if not (isinstance(value, int | float) and value < 0)}


def _some(number: int) -> int:
    return number if number > 0 else _HELD_OUT
