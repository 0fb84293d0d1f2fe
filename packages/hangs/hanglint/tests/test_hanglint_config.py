"""Settings of a project: found, read, and refused in one line that says what to do."""

from pathlib import Path

import pytest

from offbeat_hanglint._config import Config, ConfigError, load_config

WHOLE = """
confidence = "low"
select = ["HL0"]
ignore = ["HL05"]
exclude = ["third_party/*"]
summaries = ["ours.toml"]
baseline = "known.json"
[levels]
HL060 = "note"
HL061 = "off"
"""


def test_every_key_is_read_and_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "hanglint.toml").write_text(WHOLE)
    (tmp_path / "a" / "b").mkdir(parents=True)
    config = load_config([tmp_path / "a" / "b"])
    assert config == Config(
        root=tmp_path,
        file=tmp_path / "hanglint.toml",
        confidence="low",
        select=("HL0",),
        ignore=("HL05",),
        exclude=("third_party/*",),
        summaries=(tmp_path / "ours.toml",),
        baseline=tmp_path / "known.json",
        levels={"HL060": "note", "HL061": "off"},
    )
    assert {"HL001", "HL060"} <= config.rules
    assert not {"HL051", "HL061"} & config.rules


def test_the_nearest_file_counts_and_a_project_without_our_table_does_not(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.hanglint]\nconfidence = "high"\n')
    (inner / "pyproject.toml").write_text("not even = = TOML")
    assert load_config([inner]).file == tmp_path / "pyproject.toml"
    (inner / "pyproject.toml").write_text('[project]\ndependencies = ["offbeat-hanglint"]\n')
    assert load_config([inner]).confidence == "high"
    (inner / "hanglint.toml").write_text("")
    assert load_config([inner]).root == inner
    assert load_config([inner, tmp_path / "pyproject.toml"]).root == tmp_path, "the folder that all paths share"


def test_without_a_file_paths_are_relative_to_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "src"
    source.mkdir()
    assert load_config([source]).root == source
    monkeypatch.chdir(tmp_path)
    assert load_config([Path("src")]).root == tmp_path
    (source / ".git").mkdir()
    assert load_config([Path("src")]).root == source


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('confidense = "low"', "unknown key `confidense`; did you mean `confidence`?"),
        ('confidence = "sure"', "must be one of high, medium, low: got 'sure'"),
        ('exclude = "a"', "must be a list of strings"),
        ("exclude = [1]", "must be a list of strings"),
        ('select = ["HL9"]', "must name rules, such as HL012 or HL01: got `HL9`"),
        ('ignore = [""]', "must name rules"),
        ('levels = ["HL001"]', "`levels` must be a table"),
        ('[levels]\nHL01 = "off"', "unknown rule `HL01`; did you mean `HL061`"),
        ('[levels]\nHL001 = "loud"', "the level of HL001 must be one of error, warning, note, off: got 'loud'"),
        ("baseline = 1", "`baseline` must be a path"),
        ("a = ", "must be TOML"),
        ("\udcff", "must be TOML"),
    ],
)
def test_what_it_may_not_hold_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "hanglint.toml").write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError) as refused:
        load_config([tmp_path])
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_path_or_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PATH must be a file or folder that exists"):
        load_config([tmp_path / "none"])
    with pytest.raises(ConfigError, match="must be readable"):
        load_config([tmp_path], tmp_path / "none.toml")


def test_the_command_line_says_more_than_the_file(tmp_path: Path) -> None:
    (tmp_path / "hanglint.toml").write_text(WHOLE)
    config = load_config([tmp_path])
    assert config.with_options(confidence="high", select=None).confidence == "high"
    assert config.with_options(select=("HL051",), ignore=()).rules == {"HL051"}
    with pytest.raises(ConfigError, match="--select must name rules"):
        config.with_options(select=("collective",))
