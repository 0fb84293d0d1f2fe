"""A configuration is written so that it loads back equal, and every key can be explained."""

from dataclasses import dataclass, field, make_dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_core import REQUIRED, ConfigError, check_limits, dump_config, explain, list_settings, parse_config, setting
from offbeat_run import CheckpointConfig, LogConfig

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["~/x", "$~/x", "${A}", "$${A}", "$$${A:-b}", "~", "$~", "$$", "a\nb\r\n", "\x7f\x00", '"""', "'", "~\n", "${"]
)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = (
    TEXT | st.floats(allow_nan=False) | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.dates() | st.datetimes()
)
TABLES = st.dictionaries(
    TEXT,
    st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)),
    max_size=3,
)


@dataclass(frozen=True, kw_only=True)
class Data:
    """What to learn from."""

    path: str = setting("${OFFBEAT_DATA:-~/data}", "Folder of the data.")
    rate: float = setting(0.5, "Share kept.", "s", ge=0, lt=1)
    limit: int | None = setting(None, "Rows at most.", "rows")
    names: tuple[str, ...] = setting((), "Columns.")
    grid: list[list[float]] = setting([], "Numbers.")
    shuffle: bool = setting(True, "Mix the rows.")
    options: dict[str, Any] = setting({}, "Extras of the reader.")


@dataclass(frozen=True, kw_only=True)
class Config:
    data: Data = field(default_factory=Data)
    async_: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig | None = None


DATA = st.builds(
    Data,
    path=TEXT,
    rate=st.floats(0, 1, exclude_max=True),
    limit=st.none() | st.integers(),
    names=st.lists(TEXT, max_size=3).map(tuple),
    grid=st.lists(st.lists(NUMBERS, max_size=3), max_size=3),
    shuffle=st.booleans(),
    options=TABLES,
)


@given(st.builds(Config, data=DATA, checkpoint=st.none() | st.just(CheckpointConfig(every=7))))
def test_a_written_configuration_loads_back_equal(config):
    assert parse_config(dump_config(config), Config) == config


def test_a_written_configuration_explains_each_key():
    text = dump_config(Config())
    assert "# What to learn from.\n[data]" in text
    assert "# Share kept. (s, >= 0 and < 1)\nrate = 0.5" in text
    assert '# Rows at most. (rows)\nlimit = "none"' in text
    assert "[async]" in text
    assert "[checkpoint]" not in text


def test_a_value_toml_lacks_is_not_written_as_something_else():
    with pytest.raises(TypeError, match="TOML cannot hold"):
        dump_config(Config(data=Data(options={"a": object()})))


def test_a_word_beside_other_values_is_in_quotes():
    cut: Any = setting("auto", "Cut rows.")
    section = make_dataclass("Section", [("cut", bool | Literal["auto"], cut)], frozen=True, kw_only=True)
    root = make_dataclass("Root", [("data", section)], frozen=True, kw_only=True)
    text = explain(root, "data.cut")
    assert 'type:    true or false or "auto"' in text
    assert "example: --data.cut auto" in text
    assert parse_config("[data]\ncut = false", root).data.cut is False
    with pytest.raises(ConfigError, match='must be true or false or "auto"'):
        parse_config("[data]\ncut = 'maybe'", root)


def test_a_key_is_explained_with_type_unit_range_default_and_example():
    text = explain(Config, "data.rate")
    for line in ("data.rate", "Share kept.", "a number", "s", ">= 0 and < 1", "default: 0.5", "--data.rate 0.5"):
        assert line in text
    assert explain(Config, "--data.rate") == explain(Config, "rate") == text


@pytest.mark.parametrize("name", ["path", "rate", "limit", "names", "shuffle", "options"])
def test_an_example_is_accepted_by_the_loader(name):
    key = f"data.{name}"
    line = next(line for line in explain(Config, key).splitlines() if "example:" in line)
    word, value = line.split("example:")[1].strip().split(" ", 1)
    parse_config("", Config, [word, value.strip("'") if value != "VALUE" else "1"])


def test_a_section_lists_its_keys():
    text = explain(Config, "data")
    assert text.startswith("[data] What to learn from.")
    assert all(name in text for name in ("path", "rate", "limit", "shuffle"))


def test_all_keys_are_explained_with_type_unit_and_default():
    text = explain(Config, "all")
    assert [line.split("]")[0] for line in text.splitlines() if line.startswith("[")] == [
        "[data",
        "[async",
        "[checkpoint",
    ]
    assert "  rate     Share kept. Type: a number >= 0 and < 1, in s. Default: 0.5." in text.splitlines()


def test_a_listed_setting_has_a_short_text_its_unit_and_its_default():
    doc = "Stop early; 0: never; 1: at once. More about it."
    late = make_dataclass(
        "Late", [("after", int, setting(0, doc, "s")), ("path", str, setting(REQUIRED, "A file."))], kw_only=True
    )
    lines = list_settings(make_dataclass("Root", [("late", late)]), ["late.path", "late.after"]).splitlines()
    assert lines == [
        "  --late.path   A file (required)",
        "  --late.after  Stop early; 0: never (in s; default: 0)",
    ]


@pytest.mark.parametrize(
    ("key", "near"), [("data.rat", "data.rate"), ("dta", "data"), ("asink.every", "async"), ("qqqq", "sections: data")]
)
def test_an_unknown_key_to_explain_gets_the_nearest_one(key, near):
    with pytest.raises(ConfigError, match=near):
        explain(Config, key)


def test_the_limits_of_a_configuration_are_held():
    check_limits(Config)
    wide = make_dataclass("Wide", [(f"k{i}", int, setting(0, "x")) for i in range(30)], frozen=True)
    with pytest.raises(ConfigError, match=r"\[wide\] has 30 keys: at most 29"):
        check_limits(make_dataclass("Root", [("wide", wide)]))
    full = make_dataclass("Full", [(f"k{i}", int, setting(0, "x")) for i in range(25)], frozen=True)
    with pytest.raises(ConfigError, match="has 125 keys: at most 120"):
        check_limits(make_dataclass("Root", [(f"s{i}", full) for i in range(5)]))
    with pytest.raises(ConfigError, match=r"s\.k has no doc"):
        check_limits(make_dataclass("Root", [("s", make_dataclass("Bare", [("k", int, 0)]))]))


def test_a_root_that_is_not_made_of_sections_is_our_own_bug():
    with pytest.raises(TypeError, match="must be one section class"):
        check_limits(make_dataclass("Root", [("seed", int, 0)]))
