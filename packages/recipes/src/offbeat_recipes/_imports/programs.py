"""What a command of a script starts, and the options that it is given."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

_OVERRIDE: Final = re.compile(r"[+~]{0,2}(?P<name>[A-Za-z_][\w@/.-]*)=(?P<value>.*)", re.DOTALL)
_CONFIG_NAMES: Final = ("--config-name", "-cn")


@dataclass(frozen=True)
class Program:
    """What a command starts.

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
    options: dict[str, str] = {}
    others, name = [], ""
    for word in words[position + 1 :]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options[name] = value if equals else ""
        elif name:
            options[name] = f"[{options[name].strip('[]')},{word}]" if options[name] else word
        else:
            others.append(word)
    switches = {name: value or "true" for name, value in options.items()}
    return Program(words[position], "", switches, tuple(others))
