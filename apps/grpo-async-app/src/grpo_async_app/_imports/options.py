"""Options of another framework from a file: flat names, plain values."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from grpo_async_app._imports.shell import read_shell
from offbeat_types import ConfigError

_NUMBER: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_ENVIRONMENT: Final = re.compile(r"\$\{oc\.env:(?P<name>\w+)(?:,\s*(?P<default>[^}]*))?\}")
_OTHER_OPTION: Final = re.compile(r"\$\{(?:oc\.select:)?(?P<name>[\w.]+)(?:,\s*(?P<default>[^}]*))?\}")
_MAX_REFERENCES: Final = 8
"""An option may refer to one that refers to another; two that refer to each other never end."""
_WORDS: Final[dict[str, Any]] = {"true": True, "false": False, "null": None, "none": None, "": None}
_READERS: Final[Mapping[str, Callable[[str], Any]]] = {".json": json.loads, ".toml": tomllib.loads}
_STRUCTURED: Final = (".yaml", ".yml", ".json", ".toml")


def read_options(path: Path, *, is_hydra: bool) -> dict[str, Any]:
    """Options by their full name, such as "data.max_prompt_length".

    Args:
        path: a YAML or JSON file, or with hydra a shell script.
        is_hydra: options are nested, refer to each other, and may stand in a script that calls the program.

    Raises:
        ConfigError: no such file, or nothing in it.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give a file of options") from error
    if path.suffix in _STRUCTURED:
        held = _parse(path, text)
        if is_hydra:
            options = _resolved(dict(_flat(held)))
        elif path.suffix == ".toml":
            options = dict(_flat(held))
        else:
            options = {name: _plain(value) for name, value in held.items()}
    elif is_hydra:
        options = {name: read_value(value) for name, value in read_shell(text).items()}
    else:
        raise ConfigError(f"{path}: give the options as {', '.join(_STRUCTURED)}")
    if not options:
        raise ConfigError(f"{path} holds no options: a script with words such as data.max_prompt_length=1024, or YAML")
    return options


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        held = _READERS.get(path.suffix, yaml.safe_load)(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if held is None:  # an empty YAML file, or one of comments
        return {}
    if not isinstance(held, dict):
        raise ConfigError(f"{path} must hold options by name, got {type(held).__name__}")
    return held


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
    """A value as hydra reads it: numbers, true and false, null, lists in brackets, quotes taken off."""
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    if text.startswith("[") and text.endswith("]"):
        return [read_value(item) for item in text[1:-1].split(",") if item.strip()]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def is_open(value: Any) -> bool:
    """Whether a value still refers to something that is not known here."""
    return isinstance(value, str) and "$" in value
