"""`grpo-async-app import verl|trl|openrlhf|prime-rl FILE`: writes our TOML, and tells what did not come along."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from grpo_async_app._config import GrpoConfig
from grpo_async_app._imports.kinds import check_openrlhf, check_trl, check_verl
from grpo_async_app._imports.openrlhf import import_openrlhf
from grpo_async_app._imports.prime_rl import import_prime_rl
from grpo_async_app._imports.trl import import_trl
from grpo_async_app._imports.verl import import_verl
from grpo_async_app._preflight import check_settings
from offbeat_recipes import Draft, Framework, Source, import_recipe, read_command_line, read_options
from offbeat_run import CommandWords, parse_config


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
    "verl": Framework(lambda path, given: read_options(path, is_hydra=True, given=given), _from_verl),
    "trl": Framework(lambda path, _: read_options(path, is_hydra=False), _from_trl),
    "openrlhf": Framework(read_command_line, _from_openrlhf),
    "prime-rl": Framework(lambda path, _: read_options(path, is_hydra=False), _from_prime_rl),
}


def import_command(words: CommandWords, framework: str, file: str) -> int:
    """`import verl|trl|openrlhf|prime-rl FILE [--out NEW_FILE] [--set NAME=VALUE,…]`."""
    return import_recipe(words, framework, file, program="grpo-async-app", frameworks=_FRAMEWORKS, check=problems_of)


def problems_of(text: str, target: Path) -> Sequence[str]:
    """What the preflight says of a configuration.

    Raises:
        ConfigError: what is wrong with it.
    """
    return check_settings(parse_config(text, GrpoConfig, name=str(target)))
