"""`grpo-async-app import verl|trl|openrlhf|prime-rl FILE`: writes our TOML, and tells what did not come along."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from grpo_async_app._config import GrpoConfig
from grpo_async_app._imports.draft import Draft
from grpo_async_app._imports.openrlhf import import_openrlhf
from grpo_async_app._imports.options import Source, read_command_line, read_options
from grpo_async_app._imports.prime_rl import import_prime_rl
from grpo_async_app._imports.programs import check_openrlhf, check_trl, check_verl
from grpo_async_app._imports.trl import import_trl
from grpo_async_app._imports.verl import import_verl
from grpo_async_app._preflight import check_settings
from offbeat_run import CommandWords, parse_config, write_new_file
from offbeat_types import ConfigError


@dataclass(frozen=True)
class _Framework:
    """Where options come from.

    Args:
        read: a file, and the variables that its script may use.
        translate: what it holds; what is no RL run is refused, what is not known of one is told.
    """

    read: Callable[[Path, Mapping[str, str]], Source]
    translate: Callable[[Source, Path], tuple[Draft, list[str]]]


def _from_verl(source: Source, file: Path) -> tuple[Draft, list[str]]:
    told = check_verl(source.program, source.options, file)
    return import_verl(source.options, source.program), told


def _from_trl(source: Source, file: Path) -> tuple[Draft, list[str]]:
    check_trl(source.options, file)
    return import_trl(source.options), []


def _from_openrlhf(source: Source, file: Path) -> tuple[Draft, list[str]]:
    check_openrlhf(source.program, source.options, file)
    return import_openrlhf(source.options), []


def _from_prime_rl(source: Source, file: Path) -> tuple[Draft, list[str]]:
    return import_prime_rl(source.options, file), []


_FRAMEWORKS: Final = {
    "verl": _Framework(lambda path, given: read_options(path, is_hydra=True, given=given), _from_verl),
    "trl": _Framework(lambda path, _: read_options(path, is_hydra=False), _from_trl),
    "openrlhf": _Framework(read_command_line, _from_openrlhf),
    "prime-rl": _Framework(lambda path, _: read_options(path, is_hydra=False), _from_prime_rl),
}


def import_command(words: CommandWords, framework: str, file: str) -> int:
    """`import verl|trl|openrlhf|prime-rl FILE [--out NEW_FILE] [--set NAME=VALUE,…]`.

    Raises:
        ConfigError: no such framework, a file without options, or one that is no RL run.
        RunFolderError: the new file is there already, or cannot be written.
    """
    if framework not in _FRAMEWORKS:
        raise ConfigError(f"import knows {', '.join(_FRAMEWORKS)}: got {framework!r}")
    path, found = Path(file), _FRAMEWORKS[framework]
    target = Path(words.options.get("out") or f"{path.stem}.toml")
    source = found.read(path, _variables(words.options.get("set", "")))
    draft, told = found.translate(source, path)
    draft.not_decided = source.undecided
    draft.not_understood = (*told, *source.not_understood)
    text = draft.as_toml(
        f"Written by `grpo-async-app import {framework}` from {path.name}.\nBehind each key: its source."
    )
    write_new_file(target, text, "--out")
    _tell(draft)
    problems = _problems(text, target)
    print(f"written to {target}" + (", with something to put right:" if problems else ""))
    for problem in problems:
        print(f"  {problem}")
    return 0


def _variables(text: str) -> dict[str, str]:
    """What `--set` gives a script to know.

    Raises:
        ConfigError: a part of it is not NAME=VALUE.
    """
    parts = [part.partition("=") for part in text.split(",") if part]
    if any(not name or not equals for name, equals, _ in parts):
        raise ConfigError(f"--set takes variables of the script, as in DEVICE=gpu,NNODES=2: got {text!r}")
    return {name: value for name, _, value in parts}


def _tell(draft: Draft) -> None:
    if draft.not_decided:
        print("not decided (a variable can be given: --set NAME=VALUE):")
    for line in draft.not_decided:
        print(f"  {line}")
    if draft.not_understood:
        print("not understood:")
    for line in draft.not_understood:
        print(f"  {line}")
    for title, found in (
        ("means something else here", draft.changed),
        ("always so here", draft.always),
        ("has no counterpart", draft.missing),
    ):
        if found:
            print(f"{title}:")
            for name, text in found.items():
                print(f"  {draft.value(name)}: {text}")
    print(f"{len(draft.entries)} keys taken over")


def _problems(text: str, target: Path) -> list[str]:
    """What the configuration itself says of what was written: errors, and choices that are probably not meant."""
    try:
        return list(check_settings(parse_config(text, GrpoConfig, name=str(target))))
    except ConfigError as error:
        return [line.strip() for line in str(error).splitlines()]
