"""`grpo-async-app import verl|trl|prime-rl FILE`: writes our TOML, and tells what did not come along."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from grpo_async_app._config import GrpoConfig
from grpo_async_app._imports.draft import Draft
from grpo_async_app._imports.options import read_options
from grpo_async_app._imports.prime_rl import import_prime_rl
from grpo_async_app._imports.trl import import_trl
from grpo_async_app._imports.verl import import_verl
from grpo_async_app._preflight import check_settings
from offbeat_run import CommandWords, parse_config, write_new_file
from offbeat_types import ConfigError


@dataclass(frozen=True)
class _Framework:
    """Where options come from.

    Args:
        translate: from flat options.
        is_hydra: they are read as hydra reads them, from a script too.
    """

    translate: Callable[[Mapping[str, Any]], Draft]
    is_hydra: bool


_FRAMEWORKS: Final = {
    "verl": _Framework(import_verl, is_hydra=True),
    "trl": _Framework(import_trl, is_hydra=False),
    "prime-rl": _Framework(import_prime_rl, is_hydra=False),
}


def import_command(words: CommandWords, framework: str, file: str) -> int:
    """`import verl|trl|prime-rl FILE [--out NEW_FILE]`.

    Raises:
        ConfigError: no such framework, or a file without options.
        RunFolderError: the new file is there already, or cannot be written.
    """
    if framework not in _FRAMEWORKS:
        raise ConfigError(f"import knows {' and '.join(_FRAMEWORKS)}: got {framework!r}")
    source, found = Path(file), _FRAMEWORKS[framework]
    target = Path(words.options.get("out") or f"{source.stem}.toml")
    draft = found.translate(read_options(source, is_hydra=found.is_hydra))
    text = draft.as_toml(
        f"Written by `grpo-async-app import {framework}` from {source.name}.\nBehind each key: its source."
    )
    write_new_file(target, text, "--out")
    _tell(draft)
    problems = _problems(text, target)
    print(f"written to {target}" + (", with something to put right:" if problems else ""))
    for problem in problems:
        print(f"  {problem}")
    return 0


def _tell(draft: Draft) -> None:
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
