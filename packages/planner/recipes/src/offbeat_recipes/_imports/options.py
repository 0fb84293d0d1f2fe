"""Options of another framework from a file or from the commands of a script: flat names, plain values."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

import yaml

from offbeat_core import ConfigError
from offbeat_recipes._imports.exports import describe_defaults, describe_exports
from offbeat_recipes._imports.shell.reading import ANOTHER_SCRIPT, ShellReading, read_shell

_OVERRIDE: Final = re.compile(r"[+~]{0,2}(?P<name>[A-Za-z_][\w@/.-]*)=(?P<value>.*)", re.DOTALL)
_CONFIG_NAMES: Final = ("--config-name", "-cn")


@dataclass(frozen=True)
class Program:
    """Program that a command starts.

    Args:
        name: module or file, such as "verl.trainer.main_ppo"; "" where it is not known.
        config: of hydra, by `--config-name`, without its ending.
        options: overrides by name, as text, the last of each.
        others: words that are neither.
    """

    name: str = ""
    config: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()


def read_program(words: Sequence[str]) -> Program:
    """Take the words of a command apart."""
    name, rest = "", list(words[1:])
    for position, word in enumerate(words[:-1]):
        if word == "-m":
            name, rest = words[position + 1], list(words[position + 2 :])
            break
    else:
        files = [position for position, word in enumerate(words) if word.endswith(".py")]
        if files:
            name, rest = words[files[0]], list(words[files[0] + 1 :])
    if rest and rest[0].startswith("verl."):  # a launcher of its own
        name = rest.pop(0)
    options, others, config = {}, [], ""
    while rest:
        word = rest.pop(0)
        flag, _, value = word.partition("=")
        if flag in _CONFIG_NAMES:
            config = value or (rest.pop(0) if rest else "")
        elif flag in ("--config-path", "--config-dir", "-cp", "-cd"):
            rest = rest if value else rest[1:]
        elif found := _OVERRIDE.fullmatch(word):
            options[found["name"]] = found["value"]
        elif word.strip() and not word.startswith("~"):
            others.append(word)
    return Program(name, re.sub(r"\.ya?ml$", "", config.strip("'\"")), options, tuple(others))


def read_flags(words: Sequence[str]) -> Program:
    """Take the words of a command of OpenRLHF apart: `--name`, `--name value`, `--name value value`."""
    position = next((at for at, word in enumerate(words) if word.startswith("openrlhf.")), 0)
    found: dict[str, list[str]] = {}
    others, name = [], ""
    for word in words[position + 1 :]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word)
        else:
            others.append(word)
    options = {name: _joined(values) for name, values in found.items()}
    return Program(words[position], "", options, tuple(others))


def _joined(values: list[str]) -> str:
    """Read an option. A name alone is a switch; with an empty text after it, it is not set: `--use_wandb "$KEY"`."""
    return f"[{','.join(values)}]" if len(values) > 1 else values[0] if values else "true"


_NUMBER: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_ENVIRONMENT: Final = re.compile(r"\$\{oc\.env:(?P<name>\w+)(?:,\s*(?P<default>[^}]*))?\}")
_OTHER_OPTION: Final = re.compile(r"\$\{(?:oc\.select:)?(?P<name>[\w.]+)(?:,\s*(?P<default>[^}]*))?\}")
_MAX_REFERENCES: Final = 8
"""An option may refer to one that refers to another; two that refer to each other never end."""
_WORDS: Final[dict[str, Any]] = {"true": True, "false": False, "null": None, "none": None, "": None}
_READERS: Final[Mapping[str, Callable[[str], Any]]] = {".json": json.loads, ".toml": tomllib.loads}
_MAX_BYTES: Final = 2**20
"""Largest file of options: real ones have less than a twentieth of that."""
_MAX_VALUES: Final = 100_000
"""Most values in a file: YAML may name a list in another, and that in another, and so on."""
_MAX_DEFAULTS: Final = 8
"""Files that name one another as what they begin with."""
_OF_FRAMEWORK: Final = re.compile(r"_trainer$|^(override )?hydra")
"""Files of a framework itself: its defaults stand anyway."""
_MAX_LEVELS: Final = 64
"""Deepest nesting of tables and lists; a configuration has less than 10 levels."""
_MAX_DIGITS: Final = 400
"""Longest number; more digits are a text. A float has at most 309 before its point."""
_STRUCTURED: Final = (".yaml", ".yml", ".json", ".toml")
_PROBE: Final = "\1"
"""A character that no script has."""


@dataclass(frozen=True)
class Source:
    """Contents of a file.

    Args:
        options: by their full name, such as "data.max_prompt_length".
        program: of a script, that they are given to.
        undecided: conditions of a script that only the machine decides, and what is assumed.
        not_understood: words and lines of a script that were not read.
        variables: by option, of a path that begins with a variable of the environment: its name, and the default that
            the script gives it; of a list, its first.
        exports: variables that a script gives to what it starts, each with what to do about it.
    """

    options: dict[str, Any]
    program: Program = field(default_factory=Program)
    undecided: tuple[str, ...] = ()
    not_understood: tuple[str, ...] = ()
    variables: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    exports: tuple[str, ...] = ()


def read_options(path: Path, *, is_hydra: bool, given: Mapping[str, str] | None = None) -> Source:
    """Read the options of a file.

    Args:
        path: a YAML or JSON file, or with hydra a shell script.
        is_hydra: options are nested, refer to each other, and may stand in a script that calls the program.
        given: variables of the environment that a script may use.

    Raises:
        ConfigError: no such file, or nothing in it.
    """
    text = _read_text(path)
    if path.suffix in _STRUCTURED:
        held = _parse(path, text)
        messages: list[str] = []
        if is_hydra:
            options = _resolved(_with_defaults(path, held, messages.append))
        elif path.suffix == ".toml":
            options = dict(_flat(held))
        else:
            options = {name: _plain(value) for name, value in held.items()}
        source = Source(options, not_understood=tuple(messages))
    elif is_hydra:
        source = _read_script(path, text, given)
    else:
        raise ConfigError(f"{path}: give the options as {', '.join(_STRUCTURED)}")
    if not source.options:
        others = [f"; {line}" for line in source.not_understood if line.endswith(ANOTHER_SCRIPT)]
        what = "a script with words such as data.max_prompt_length=1024, or YAML"
        raise ConfigError(f"{path} holds no options: {what}{''.join(others[:1])}")
    return source


def read_command_line(path: Path, given: Mapping[str, str] | None = None) -> Source:
    """Read the flags that a script gives to OpenRLHF.

    Args:
        path: of the script.
        given: variables of the environment that it may use.

    Raises:
        ConfigError: no such file, or nothing in it.
    """
    text = _read_text(path)
    reading = read_shell(text, given, str(path))
    programs = [read_flags(words) for words in reading.commands if any(word.startswith("openrlhf.") for word in words)]
    if not programs:
        raise ConfigError(f"{path} starts nothing of openrlhf.cli: give a script that does")
    chosen, *others = sorted(programs, key=lambda each: not each.name.endswith(".train_ppo_ray"))
    messages = [*reading.not_understood, *map(_unread_word, chosen.others)]
    messages += [f"{each.name}: another command, not read" for each in others]
    options = {name: read_value(value) for name, value in chosen.options.items()}
    undecided = (*reading.undecided, *describe_defaults(reading, options))
    exports = tuple(describe_exports(reading, text))
    return Source(options, chosen, undecided, tuple(messages), exports=exports)


def _unread_word(word: str) -> str:
    return f"{word}: unknown here, and so are the options it holds" if is_open(word) else f"{word}: no option"


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            held = file.read(_MAX_BYTES + 1)
        if len(held) > _MAX_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_BYTES >> 10} KiB: give a file that has options alone")
        return held.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give a file of options") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be UTF-8 text: byte {error.start} is not; save it as UTF-8") from error


def _read_script(path: Path, text: str, given: Mapping[str, str] | None) -> Source:
    reading = read_shell(text, given, str(path))
    chosen, others = _choose_program(reading)
    messages = [*reading.not_understood, *map(_unread_word, chosen.others)]
    messages += [f"{each.name or 'a command'}: another command, not read" for each in others]
    options = _read_overrides(chosen)
    return Source(
        options,
        chosen,
        (*reading.undecided, *describe_defaults(reading, options)),
        tuple(dict.fromkeys(messages)),
        _find_variables(path, text, given, reading.defaults, options),
        tuple(describe_exports(reading, text)),
    )


def _choose_program(reading: ShellReading) -> tuple[Program, list[Program]]:
    """Return the first command of a script that trains by RL, or the first that has options.

    And the others that have some.
    """
    programs = [found for words in reading.commands if (found := read_program(words)).options]
    trains = [each for each in programs if any(name.startswith("actor_rollout_ref.") for name in each.options)]
    chosen = (trains or programs or [Program()])[0]
    return chosen, [each for each in programs if each is not chosen]


def _read_overrides(program: Program) -> dict[str, Any]:
    return _resolved({name: read_value(value) for name, value in program.options.items()})


def _find_variables(
    script: Path, text: str, given: Mapping[str, str] | None, defaults: Mapping[str, str], options: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    """Find the options whose paths begin with a variable, by reading the script again with all of them set.

    Equal paths do not show where they come from: an option refers to a variable, be it by way of
    others, where it begins with what that was set to.
    """
    paths = {name: f"/{_PROBE}{name}{_PROBE}" for name, default in defaults.items() if "/" in default}
    if not paths:
        return {}
    program, _ = _choose_program(read_shell(text, {**(given or {}), **paths}, str(script)))
    found = {}
    for option, value in _read_overrides(program).items():
        probed, usual = _first_text(value), _first_text(options.get(option))
        for name, path in paths.items():
            rest = probed.removeprefix(path)
            if probed.startswith(path) and _PROBE not in rest and usual and usual.endswith(rest):
                found[option] = (name, usual.removesuffix(rest))
    return found


def _first_text(value: Any) -> str:
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, str) else ""


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        held = _simple(_READERS.get(path.suffix, yaml.safe_load)(text), count())
    except OverflowError:
        raise ConfigError(f"{path} cannot be read: at most {_MAX_VALUES} values are read") from None
    except RecursionError:
        raise ConfigError(f"{path} cannot be read: at most {_MAX_LEVELS} levels of tables and lists are read") from None
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if held is None:  # an empty YAML file, or one of comments
        return {}
    if not isinstance(held, dict):
        raise ConfigError(f"{path} must hold options by name, got {type(held).__name__}")
    return held


def _simple(value: Any, seen: Iterator[int], level: int = 0) -> Any:
    """Return a value as JSON would have it: names are texts, and so are dates, which YAML and TOML have too."""
    if level > _MAX_LEVELS:
        raise RecursionError
    if next(seen) > _MAX_VALUES:
        raise OverflowError
    if isinstance(value, dict):
        return {str(name): _simple(inner, seen, level + 1) for name, inner in value.items()}
    if isinstance(value, list):
        return [_simple(inner, seen, level + 1) for inner in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _with_defaults(
    path: Path, held: Mapping[str, Any], notify: Callable[[str], None], depth: int = 0
) -> dict[str, Any]:
    """Return the options of a file of hydra, over those of the files that its list `defaults` names beside it.

    Source: hydra 1.3: files of the list come first, but for those after `_self_`; of `group: name` in the folder group.
    """
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    listed, is_after = held.get("defaults"), False
    for entry in listed if isinstance(listed, list) else []:
        names = [f"{group}/{name}" for group, name in entry.items()] if isinstance(entry, dict) else [str(entry)]
        for name in names:
            is_after = is_after or name == "_self_"
            if name == "_self_" or _OF_FRAMEWORK.search(name):
                continue
            file = path.parent / f"{name}.yaml"
            if depth < _MAX_DEFAULTS and re.fullmatch(r"[\w./-]+", name) and file.is_file():
                found = _with_defaults(file, _parse(file, _read_text(file)), notify, depth + 1)
                (after if is_after else before).update(found)
            else:
                notify(f"defaults: {name}: there is no {file.name} beside {path.name}, and what it sets is not read")
    return {**before, **dict(_flat(held)), **after}


def _flat(held: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in held.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif prefix or name != "defaults":  # hydra's list of files to begin with
            yield f"{prefix}{name}", _plain(value)


def _plain(value: Any) -> Any:
    """YAML reads 1e-6 as a text."""
    return read_value(value) if isinstance(value, str) else value


def _resolved(options: dict[str, Any]) -> dict[str, Any]:
    """Put in what values refer to: other options of the file, and variables of the environment as ours are written."""

    def look_up(found: re.Match[str]) -> str:
        value = options.get(found["name"], found["default"])
        return found[0] if value is None else str(value)

    def put_in(text: str) -> Any:
        text = _ENVIRONMENT.sub(
            lambda found: f"${{{found['name']}:-{found['default']}}}" if found["default"] else f"${{{found['name']}}}",
            text,
        )
        for _ in range(_MAX_REFERENCES):
            before, text = text, _OTHER_OPTION.sub(look_up, text)
            if text == before:
                break
        return read_value(text)

    return {
        name: put_in(value) if isinstance(value, str) and "${" in value else value for name, value in options.items()
    }


def read_value(text: str) -> Any:
    """Return a value as hydra reads it: numbers, true and false, null, lists in brackets, quotes taken off."""
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if len(text) <= _MAX_DIGITS and _NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    if text.startswith("[") and text.endswith("]"):
        return [read_value(item) for item in text[1:-1].split(",") if item.strip()]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def is_open(value: Any) -> bool:
    """Return whether a value still refers to something that is not known here."""
    return isinstance(value, str) and "$" in value
