"""`sft-app import verl|trl FILE`: writes our TOML, and tells what did not come along."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from offbeat_recipes import Draft, Framework, Source, import_recipe, read_options
from offbeat_run import CommandWords, parse_config
from offbeat_types import ConfigError
from sft_app._config import SftConfig
from sft_app._import_trl import import_trl
from sft_app._import_verl import import_verl

_OF_RL: Final = ("actor_rollout_ref.", "algorithm.", "reward_funcs", "num_generations")
_OF_PREFERENCES: Final = ("beta", "desirable_weight", "rpo_alpha", "precompute_ref_log_probs", "reference_free")


def _check_kind(options: Mapping[str, Any], file: Path) -> None:
    """Refuse what is no supervised fine-tuning."""
    if found := [name for name in options if name.startswith(_OF_RL)]:
        raise ConfigError(f"{file} is of reinforcement learning ({found[0]}): import it with grpo-async-app")
    if found := [name for name in options if name in _OF_PREFERENCES]:
        raise ConfigError(
            f"{file} learns from preferences ({found[0]}), as DPO and KTO do: there is no such trainer here"
        )


def _from_verl(source: Source, file: Path) -> tuple[Draft, list[str]]:
    _check_kind(source.options, file)
    return import_verl(source.options), []


def _from_trl(source: Source, file: Path) -> tuple[Draft, list[str]]:
    _check_kind(source.options, file)
    return import_trl(source.options), []


_FRAMEWORKS: Final = {
    "verl": Framework(lambda path, given: read_options(path, is_hydra=True, given=given), _from_verl),
    "trl": Framework(lambda path, _: read_options(path, is_hydra=False), _from_trl),
}


def import_command(words: CommandWords, framework: str, file: str) -> int:
    return import_recipe(words, framework, file, program="sft-app", frameworks=_FRAMEWORKS, check=_check)


def _check(text: str, target: Path) -> Sequence[str]:
    parse_config(text, SftConfig, name=str(target))
    return ()
