"""Settings are written into a recipe's own text, and the file says what they were."""

from dataclasses import dataclass, field

import pytest

from offbeat_core import ConfigError, setting
from offbeat_recipes import change_recipe, sample_row


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Section `engine`."""

    num_ranks: int = setting(1, "Ranks.")
    wide: bool = setting(False, "Whether it is.")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Section `trial`."""

    num_ranks: int = setting(1, "Ranks.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Of a run."""

    engine: Engine = field(default_factory=Engine)
    trial: Trial = field(default_factory=Trial)


def test_a_changed_setting_says_what_it_was_and_the_rest_stays():
    text = "# why\n\n[engine]   # of eight\n# before\nnum_ranks = 8  # one machine\n# after\n"
    changed = change_recipe(text, {"engine.num_ranks": 4, "engine.wide": True}, Config)
    assert changed.splitlines() == [
        "# why",
        "",
        "[engine]   # of eight",
        "wide = true",
        "# before",
        "num_ranks = 4".ljust(36) + "# was 8",
        "# after",
    ]


def test_a_key_of_the_same_name_in_another_section_stays():
    text = "[engine]\nwide = true\n[trial]\nnum_ranks = 8\n"
    wanted = "[engine]\nnum_ranks = 4\nwide = true\n[trial]\nnum_ranks = 8\n"
    assert change_recipe(text, {"engine.num_ranks": 4}, Config) == wanted


def test_a_section_that_is_missing_is_added():
    assert change_recipe("# nothing\n", {"engine.num_ranks": 4}, Config) == "# nothing\n\n[engine]\nnum_ranks = 4\n"


def test_what_cannot_be_rewritten_line_by_line_is_refused():
    with pytest.raises(ConfigError, match=r"set by hand engine\.num_ranks = 4"):
        change_recipe("engine = {num_ranks = 8}\n", {"engine.num_ranks": 4}, Config)


def test_a_text_of_a_plan_is_one_line_that_shows_its_beginning_and_its_end():
    assert sample_row("a prompt", "<|user|>\nadd\n", "chat_template.jinja") == (
        "a prompt",
        r"rendered with the chat template of chat_template.jinja: <|user|>\nadd\n",
    )
    _, said = sample_row("a prompt", "begin" + "x" * 10_000 + "end", "")
    assert said.startswith("as it is, without a chat template: beginxxx")
    assert said.endswith("xxxend")
    assert " [9408 characters] " in said
    assert len(said) < 700
