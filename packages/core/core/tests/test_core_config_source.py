"""Problems are said with the line of the file, or with the option, that they come from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from offbeat_core import (
    MADE_FILE_VARIABLE,
    ConfigError,
    DataError,
    PlacementError,
    ProblemsError,
    load_config,
    naming_lines,
    setting,
)

TEXT = """
[model]
path = "absent"

[data]
path = "rows.jsonl"
eval_size = 3
[data.mix.sums]
path = "sums.jsonl"

[reward]
extract = "all"
name = "exact_mach"
"""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = setting("", "A model.", hub="model")


@dataclass(frozen=True, kw_only=True)
class MixConfig:
    path: str = setting("", "Rows.", hub="dataset")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    path: str = setting("", "Rows.", hub="dataset")
    eval_size: int = setting(0, "Rows that are held out.")
    epochs: int = setting(1, "Epochs.")
    mix: dict[str, MixConfig] = setting({}, "Sources.")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    name: str = setting("", "A reward.")
    extract: str = setting("all", "A place.")


@dataclass(frozen=True, kw_only=True)
class RootConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text(TEXT)
    return "my.toml"


def named(file: str, error: Exception, words: Sequence[str] = ()) -> Exception:
    with pytest.raises(type(error)) as raised, naming_lines(file, RootConfig, words):
        raise error
    return raised.value


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("model.path: no such folder: /absent", "my.toml:3: "),
        ("data.eval_size = 3 leaves nothing to train on", "my.toml:7: "),
        ("the run would never end: set data.epochs above 0, or data.eval_size", "my.toml:7: "),  # epochs is not given
        ("data.mix.sums.path: nothing", "my.toml:9: "),
        ("data.mix.sums: /x/sums.jsonl does not exist", "my.toml:8: "),
        ("data path /x/rows.jsonl does not exist", "my.toml:6: "),
        ("reward: no reward 'exact_mach'", "my.toml:13: "),
        ("reward: give either name or weights", "my.toml:11: "),
        ("section model: it has an effect", "my.toml:2: "),
        ("data.jsonl is broken", ""),
        ("the machine is too small", ""),
        ("first\nmodel.path: below", ""),
    ],
)
def test_a_problem_names_the_line_of_what_it_is_about(file, text, where):
    assert str(named(file, ConfigError(text))) == f"{where}{text}"


@pytest.mark.parametrize(
    ("words", "text", "wanted"),
    [
        (["--model.path=b"], "model.path: no such folder", "--model.path: no such folder"),
        (["--data.eval_size", "9"], "data.eval_size = 9 is much", "--data.eval_size = 9 is much"),
        (["--reward.name=maths"], "reward: no reward 'maths'", "--reward.name: reward: no reward 'maths'"),
        (["--data.path=new.jsonl"], "data path /x/new.jsonl is not there", None),
        (["--data.mix.sums.path=b.jsonl"], "data.mix.sums.path: no", "--data.mix.sums.path: no"),
        (["--data.epochs=0"], "model.path: no such folder", "my.toml:3: model.path: no such folder"),
    ],
)
def test_a_problem_of_the_command_line_names_the_option(file, words, text, wanted):
    assert str(named(file, DataError(text), words)) == (wanted or f"--data.path: {text}")


def test_each_of_several_problems_has_a_place_of_its_own(file):
    error = named(file, ProblemsError("model.path: none", "too small", "data.path: none"))
    assert isinstance(error, ProblemsError)
    assert error.texts == ("my.toml:3: model.path: none", "too small", "my.toml:6: data.path: none")
    assert str(error).startswith("3 problems\n  my.toml:3: model.path")


def test_an_error_of_several_parts_stays_whole(file):
    error = PlacementError("model.path does not fit", ("node a",), ("fewer",))
    assert named(file, error) is error


def test_what_is_found_beside_values_that_do_not_fit_has_its_line_too(file):
    with pytest.raises(ConfigError) as refusal:
        load_config(file, RootConfig, ["--data.epochs=many"], look=lambda *_: ["model.path: no such folder"])
    assert "  --data.epochs: must be an integer" in str(refusal.value)
    assert "  my.toml:3: model.path: no such folder" in str(refusal.value)


def test_a_file_that_a_program_has_made_is_not_named(file, monkeypatch):
    monkeypatch.setenv(MADE_FILE_VARIABLE, file)
    assert str(named(file, ConfigError("model.path: no such folder"))) == "model.path: no such folder"
    assert str(named(file, ConfigError("reward: what"), ["--data.epochs=1"])) == "reward: what"
