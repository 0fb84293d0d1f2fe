"""Paths in a configuration are relative to the file that they stand in, or to the working folder if they are typed."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from offbeat_core import (
    ConfigError,
    Setting,
    as_written,
    dump_config,
    find_function,
    load_config,
    parse_config,
    path_advice,
    path_from,
    place_paths,
    setting,
)


@dataclass(frozen=True, kw_only=True)
class SetConfig:
    path: str = setting("", "Rows.", hub="dataset")
    weights: dict[str, float] = setting({}, "Rewards.", path="function")


@dataclass(frozen=True, kw_only=True)
class PlacesConfig:
    path: str = setting("", "A model.", hub="model")
    rows: str = setting("", "Rows.", hub="dataset")
    name: str = setting("", "A reward.", path="function")
    label: str = setting("", "No path.")
    command: list[str] = setting([], "A program.", path="command", is_text=True)
    weights: dict[str, float] = setting({}, "Rewards.", path="function")
    options: dict[str, Any] = setting({}, "Of a reward.", path={"model": "model", "cache": "output"})
    sets: dict[str, SetConfig] = setting({}, "Sets.")


@dataclass(frozen=True, kw_only=True)
class RootConfig:
    places: PlacesConfig = field(default_factory=PlacesConfig)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, rows, a function and a program; the working folder is an empty one beside it."""
    folder, elsewhere = tmp_path / "recipe", tmp_path / "elsewhere"
    for path in (folder / "model", folder / "own" / "model", elsewhere):
        path.mkdir(parents=True)
    for file in ("rows.jsonl", "mine.py", "go.sh"):
        (folder / file).touch()
    monkeypatch.chdir(elsewhere)
    return folder


def loaded(recipe: Path, text: str, *words: str) -> PlacesConfig:
    (recipe / "my.toml").write_text(f"[places]\n{text}\n")
    return load_config(recipe / "my.toml", RootConfig, words).places


@pytest.mark.parametrize(
    ("line", "field_name", "placed"),
    [
        ('path = "model"', "path", "{}/model"),
        ('path = "own/model"', "path", "{}/own/model"),  # and no name of the Hub
        ('path = "own/typo"', "path", "{}/own/typo"),  # as its owner is a folder here
        ('path = "absent"', "path", "{}/absent"),
        ('path = "../recipe/model"', "path", "{}/../recipe/model"),
        ('path = "${FOLDER_OF_MODELS:-model}"', "path", "{}/model"),
        ('rows = "rows.jsonl"', "rows", "{}/rows.jsonl"),
        ('rows = "rows/train.parquet"', "rows", "{}/rows/train.parquet"),
        ('name = "mine.py:score"', "name", "{}/mine.py:score"),
        ('command = ["python", "mine.py", "--fast"]', "command", ["python", "{}/mine.py", "--fast"]),
        ('command = ["./go.sh", "mine"]', "command", ["{}/./go.sh", "mine"]),
        ('weights = {"mine.py:score" = 1.0, exact = 2.0}', "weights", {"{}/mine.py:score": 1.0, "exact": 2.0}),
        ('options = {model = "model", cache = "new"}', "options", {"model": "{}/model", "cache": "{}/new"}),
        ('[places.sets.a]\npath = "rows.jsonl"', "sets", {"a": SetConfig(path="{}/rows.jsonl")}),
    ],
)
def test_a_path_in_a_file_is_relative_to_its_folder(recipe, line, field_name, placed):
    found = getattr(loaded(recipe, line), field_name)
    assert str(found).replace(f"{recipe}/./", "{}/") == str(placed)
    assert "{}" in str(placed)


@pytest.mark.parametrize(
    "line",
    [
        'path = "Qwen/Qwen3-0.6B"',
        'path = "hub:own/model"',
        'path = "/models/a"',
        'rows = "arithmetic:2"',
        'rows = "openai/gsm8k:main/train@abc"',
        'rows = "https://example.com/rows.jsonl"',
        'rows = ""',
        'name = "exact_match"',
        'name = "mine:score"',
        'label = "model"',
        'command = ["python", "-m", "mine"]',
        'options = {label = "model"}',
    ],
)
def test_what_is_no_relative_path_stays_as_it_is(recipe, line):
    config = loaded(recipe, line)
    assert config == parse_config(f"[places]\n{line}", RootConfig).places
    assert "/./" not in str(config)


@pytest.mark.parametrize(
    ("words", "field_name", "placed"),
    [
        (["--places.path=model"], "path", "HERE/./model"),
        (["--places.name", "mine.py:score"], "name", "HERE/./mine.py:score"),
        (['--places.weights={"mine.py:score" = 1}'], "weights", {"HERE/./mine.py:score": 1.0}),
        (['--places.command=["python", "mine.py"]'], "command", ["python", "HERE/./mine.py"]),
        (["--places.options.model=model"], "options", {"cache": "FILE/./c", "model": "HERE/./model"}),
        (["--places.sets.b.path=rows.jsonl"], "sets", {"b": SetConfig(path="HERE/./rows.jsonl")}),
    ],
)
def test_a_path_that_is_typed_is_relative_to_the_working_folder(recipe, words, field_name, placed):
    config = loaded(recipe, 'path = "model"\nname = "mine.py:score"\noptions = {cache = "c"}', *words)
    found = str(getattr(config, field_name))
    assert found.replace(str(Path.cwd()), "HERE").replace(str(recipe), "FILE") == str(placed)


@pytest.mark.parametrize(
    ("line", "where", "name"),
    [
        ('path = "model"', "2: places.path", "model"),
        ('path = "own/model"', "2: places.path", "own/model"),  # in the file's folder it would be a name of the Hub
        ('rows = "rows.jsonl"', "2: places.rows", "rows.jsonl"),
        ('name = "mine.py:score"', "2: places.name", "mine.py"),
        ('command = ["python", "mine.py"]', "2: places.command", "mine.py"),
        ('weights = {"mine.py:score" = 1.0}', "2: places.weights", "mine.py"),
        ('[places.sets.a]\npath = "rows.jsonl"', "3: places.sets.a.path", "rows.jsonl"),
    ],
)
def test_a_path_that_lies_in_the_working_folder_alone_is_refused_with_what_to_write(
    recipe, monkeypatch, line, where, name
):
    (recipe.parent / "elsewhere" / "my.toml").write_text(f"[places]\n{line}\n")
    monkeypatch.chdir(recipe)
    file = recipe.parent / "elsewhere" / "my.toml"
    with pytest.raises(ConfigError) as refusal:
        load_config(file, RootConfig)
    assert str(refusal.value) == (
        f"{file}:{where}: {name} is not in {file.parent}, the folder of the file, from which its relative paths are "
        f"read; it lies in the working folder: write ../recipe/{name}"
    )


def test_a_path_that_is_replaced_on_the_command_line_is_not_looked_for(recipe):
    Path("absent").mkdir()
    assert loaded(recipe, 'path = "absent"', "--places.path=/models/a").path == "/models/a"


def test_a_new_folder_may_be_one_that_the_working_folder_has_too(recipe):
    Path("new").mkdir()
    assert loaded(recipe, 'options = {cache = "new"}').options["cache"] == f"{recipe}/./new"


def test_a_name_of_the_hub_means_the_same_in_a_working_folder_that_has_its_owner(recipe):
    Path("Qwen").mkdir()
    assert loaded(recipe, 'path = "Qwen/Qwen3-0.6B"').path == "hub:Qwen/Qwen3-0.6B"


def test_a_configuration_that_is_written_down_leads_to_the_same_files_from_everywhere(recipe, tmp_path):
    config = loaded(recipe, 'path = "model"\ncommand = ["python", "mine.py"]\nweights = {"mine.py:score" = 1.0}')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(dump_config(RootConfig(places=config)))
    assert load_config(tmp_path / "run" / "config.toml", RootConfig).places == config
    assert as_written(config.path) == "model"
    assert [as_written(name) for name in config.weights] == ["mine.py:score"]
    assert Path(config.path) == recipe / "model"


def test_signs_in_the_name_of_the_folder_are_no_variables(tmp_path):
    folder = tmp_path / "a${HOME}b"
    (folder / "model").mkdir(parents=True)
    assert loaded(folder, 'path = "model"').path == f"{folder}/./model"


def test_a_folder_that_is_named_by_way_of_another_is_written_without_it(recipe, monkeypatch):
    (recipe / "my.toml").write_text('[places]\npath = "model"\n')
    assert load_config(Path("../recipe/my.toml"), RootConfig).places.path == f"{recipe}/./model"


def test_text_that_can_be_no_path_is_left_to_what_reads_it(recipe):
    for strange in ("m" * 5000, "\\u0000"):
        assert as_written(loaded(recipe, f'path = "{strange}"').path)


def test_a_function_of_a_file_is_found_and_called_as_it_was_written(recipe):
    (recipe / "mine.py").write_text("def score(): return 3\n")
    placed = loaded(recipe, 'name = "mine.py:score"').name
    assert find_function("reward", placed)() == 3
    with pytest.raises(ConfigError, match=r"^reward mine\.py:scores: mine\.py has no function 'scores'"):
        find_function("reward", f"{placed}s")


def test_advice_is_on_what_was_written_and_not_on_the_folder(tmp_path):
    assert path_advice(f"{tmp_path}/a,b*/./model") == ""
    assert "a pattern is not read" in path_advice(f"{tmp_path}/./rows/*.jsonl")
    (tmp_path / "own").mkdir()
    assert (
        path_advice(f"{tmp_path}/./own/model") == "write hub:own/model where the Hub is meant: the folder own is here"
    )


def test_sections_of_a_program_are_relative_to_the_working_folder(recipe):
    placed = place_paths({"places": {"path": "model", "label": "model"}, "others": {"a": 1}}, RootConfig)
    assert place_paths({"places": 3}, RootConfig) == {"places": 3}  # refused by what loads it
    assert placed == {"places": {"path": f"{Path.cwd()}/./model", "label": "model"}, "others": {"a": 1}}


def test_what_a_command_line_has_named_is_written_for_the_folder_of_the_file(recipe, monkeypatch):
    monkeypatch.chdir(recipe)
    configs = recipe / "configs"
    model, function = Setting("", hub="model"), Setting("", path="function")
    assert path_from("model", model, configs) == "../model"
    assert path_from("mine.py:score", function, configs) == "../mine.py:score"
    for text in ("Qwen/Qwen3-0.6B", str(recipe / "model"), ""):
        assert path_from(text, model, configs) == text
    assert path_from("exact_match", function, configs) == "exact_match"
    assert path_from("model", model, recipe) == "model"
