"""Every option of TRL's and verl's supervised trainers has its line in a table, and none crashes an import."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offbeat_core import ConfigError
from offbeat_recipes import TRAINING_ARGUMENTS, OptionTable, OptionVerdict, RecipeBuilder, Source, read_option_table
from sft_app._imports.command import import_verl
from sft_app._imports.trl import import_preferences, import_supervised

LISTS = Path(__file__).parent / "import_options"
SUPERVISED = read_option_table("sft_app._imports", "trl").beside(TRAINING_ARGUMENTS)
PREFERENCES = read_option_table("sft_app._imports", "preferences").beside(SUPERVISED)


@dataclass(frozen=True)
class Trainer:
    """What imports the options of a trainer, and options with which the others have an effect."""

    translate: Callable[[Source], RecipeBuilder]
    table: OptionTable
    settings: tuple[Mapping[str, Any], ...]


TRAINERS = {
    "verl": Trainer(
        import_verl,
        read_option_table("sft_app._imports", "verl"),
        ({}, {"data.val_files": "v", "model.lora_rank": 4, "trainer.logger": ["wandb"]}),
    ),
    "trl_sft": Trainer(import_supervised, SUPERVISED, ({"use_peft": True},)),
    **{
        f"trl_{name}": Trainer(
            partial(import_preferences, name),
            PREFERENCES,
            ({"use_peft": True, "loss_type": "simpo"}, {"use_peft": True}),
        )
        for name in ("dpo", "kto", "orpo", "cpo", "reward")
    },
}
OF_TYPE: Mapping[type, tuple[Any, ...]] = {
    bool: (True, False),
    int: (4, 0),
    float: (0.25, 2.0),
    str: ("name",),
    list: ([1, 2], ["a"]),
    dict: (),
    type(None): (True, 4, "name", ["a"]),
}
"""Values that an option may have, by the type of its default."""


def options_of(name: str) -> Iterator[tuple[str, Any]]:
    """Options of a list, and the default of each."""
    for line in (LISTS / f"{name}.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            option, _, text = line.partition(" = ")
            default = json.loads(text) if text else None
            yield option, {} if isinstance(default, dict) else default


def translated(trainer: Trainer, options: Mapping[str, Any]) -> RecipeBuilder | None:
    """None: an option was read, and refused in one line."""
    try:
        return trainer.translate(Source(options=dict(options)))
    except ConfigError:
        return None


@pytest.mark.parametrize("name", TRAINERS)
def test_every_option_of_a_trainer_has_a_line_and_gets_a_verdict(name: str) -> None:
    trainer = TRAINERS[name]
    for option, default in options_of(name):
        row = trainer.table.row(option)
        assert row is not None, option
        for value in (default, *OF_TYPE[type(default)]):
            draft = translated(trainer, {**trainer.settings[0], option: value})
            if draft is None or value in (None, [], {}):
                continue
            is_mentioned = any(option in found for found in draft.messages().values())
            assert is_mentioned or option not in draft.left, f"{option} = {value}"
            assert is_mentioned or row.verdict in (OptionVerdict.OURS, OptionVerdict.ALWAYS), f"{option} = {value}"


@pytest.mark.parametrize("name", TRAINERS)
def test_an_option_whose_key_is_here_is_read(name: str) -> None:
    trainer, unread = TRAINERS[name], []
    for option, default in options_of(name):
        row = trainer.table.row(option)
        if row is None or row.verdict is not OptionVerdict.OURS or isinstance(default, dict):
            continue
        values = (default, *OF_TYPE[type(default)])
        drafts = [translated(trainer, {**held, option: value}) for held in trainer.settings for value in values]
        if not any(draft is None or option not in draft.left for draft in drafts):
            unread.append(option)
    assert unread == []
