"""A configuration loads typed, and everything wrong with it is said at once, with its place."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from offbeat_core import REQUIRED, ConfigError, ProblemsError, load_config, parse_config, setting, split_overrides


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """How to sample."""

    model_path: str = setting(REQUIRED, "Model folder.")
    temperature: float = setting(1.0, "Sampling temperature.", ge=0, le=2)
    max_running: int = setting(64, "Samples at once.", "samples", ge=1)
    dtype: str = setting("float32", "Format.", choices=("float32", "bfloat16"))
    seed: int | None = setting(None, "Seed.")
    stop: tuple[str, ...] = setting((), "Stop strings.")
    ends: tuple[str, ...] = setting((), "Texts as they are.", is_text=True)
    ids: list[int] = setting([], "Token ids.", ge=0)
    pair: tuple[int, str] = setting((1, "a"), "A pair.")
    mode: Literal["fast", "slow"] = setting("fast", "Mode.")
    ignore_eos: bool = setting(False, "Continue after the end.")
    options: dict[str, Any] = setting({}, "Extras.")
    weights: dict[str, float] = setting({}, "Weights by name.")


@dataclass(frozen=True, kw_only=True)
class Async:
    """How far off policy."""

    staleness_threshold: float = setting(0.0, "Share of stale groups.", ge=0)
    trigger: int = setting(1, "Updates between syncs.", ge=1)

    def __post_init__(self):
        if self.trigger > 10 and self.staleness_threshold == 0:
            raise ConfigError("trigger above 10 needs a staleness_threshold above 0")


@dataclass(frozen=True, kw_only=True)
class Config:
    rollout: Rollout = setting(REQUIRED, "The rollout engine.")
    async_: Async = field(default_factory=lambda: Async(trigger=3))
    extra: Async | None = None


def load(text, *overrides):
    return parse_config(text, Config, overrides, name="my.toml")


def refused(text, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)


WELL = "[rollout]\nmodel_path = 'm'\n"


def test_a_file_sets_what_it_names_and_the_rest_keeps_its_default(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(WELL + "stop = ['a', 'b']\nseed = 3\n[async]\nstaleness_threshold = 1\n")
    config = load_config(path, Config)
    assert (config.rollout.model_path, config.rollout.stop, config.rollout.seed) == ("m", ("a", "b"), 3)
    assert config.async_ == Async(staleness_threshold=1.0, trigger=3)
    assert type(config.async_.staleness_threshold) is float
    assert config.extra is None


def test_a_section_named_like_a_python_keyword_drops_its_underscore():
    assert load(WELL, "--async.trigger=2").async_.trigger == 2


def test_an_optional_section_is_built_once_something_names_it():
    assert load(WELL + "[extra]\n").extra == Async()
    assert load(WELL, "--extra.trigger", "2").extra == Async(trigger=2)


def test_without_a_file_defaults_and_overrides_are_the_configuration():
    assert load_config(None, Config, ["--rollout.model_path", "m"]).rollout.model_path == "m"


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--rollout.temperature", "0.5"], "temperature", 0.5),
        (["--rollout.temperature=1"], "temperature", 1.0),
        (["--rollout.model_path", "123"], "model_path", "123"),
        (["--rollout.model_path=true"], "model_path", "true"),
        (["--rollout.model_path", "a=b"], "model_path", "a=b"),
        (["--rollout.seed", "-1"], "seed", -1),
        (["--rollout.seed", "1", "--rollout.seed", "none"], "seed", None),
        (["--rollout.stop", "a,b"], "stop", ("a", "b")),
        (["--rollout.stop", '["a,b"]'], "stop", ("a,b",)),
        (["--rollout.stop="], "stop", ()),
        (["--rollout.ends", "\n"], "ends", ("\n",)),
        (["--rollout.ends", "Question: "], "ends", ("Question: ",)),
        (["--rollout.ends", "a, b"], "ends", ("a, b",)),
        (["--rollout.ends", "42"], "ends", ("42",)),
        (["--rollout.ends", '["a, b", "\\n"]'], "ends", ("a, b", "\n")),
        (["--rollout.ends", '"two\\nlines"'], "ends", ("two\nlines",)),
        (["--rollout.ends="], "ends", ()),
        (["--rollout.ids", "1,2"], "ids", [1, 2]),
        (["--rollout.ignore_eos", "true"], "ignore_eos", True),
        (["--rollout.options.a.b", "3", "--rollout.options.c=x"], "options", {"a": {"b": 3}, "c": "x"}),
        (["--rollout.weights.exact", "1"], "weights", {"exact": 1.0}),
    ],
)
def test_an_override_is_read_as_the_type_of_its_key(words, key, value):
    assert getattr(load(WELL, *words).rollout, key) == value


def test_an_override_inside_a_table_keeps_the_other_entries_of_the_file():
    config = load(WELL + "options = {a = 1, text = '$${x}'}", "--rollout.options.b=2")
    assert config.rollout.options == {"a": 1, "text": "${x}", "b": 2}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("temperature = 3", "must be a number >= 0 and <= 2, got the number 3.0"),
        ("temperature = true", "must be a number >= 0 and <= 2, got true"),
        ("temperature = nan", "got the number nan, which is not finite"),
        ("temperature = inf", "must be a number >= 0 and <= 2, got the number inf, which is not finite"),
        ("max_running = 0", "must be an integer >= 1, in samples, got the integer 0"),
        ("max_running = 1.0", "must be an integer >= 1, in samples, got the number 1.0"),
        ("max_running = true", "got true"),
        ("ignore_eos = 1", "must be true or false, got the integer 1"),
        ("dtype = 'int8'", 'must be a string (one of float32, bfloat16), got the string "int8"'),
        ("stop = 'a'", 'must be a list, each a string, got the string "a"'),
        ("stop = ['a', 1]", "got the integer 1"),
        ("ids = [3, -1]", "got the integer -1"),
        ("pair = [1]", "must be a list of 2: an integer, a string"),
        ("mode = 'medium'", "must be one of fast, slow"),
        ("options = 1", "must be a table, got the integer 1"),
        ("weights = {a = nan}", "got the number nan"),
        ("weights = {a = -inf}", "got the number -inf"),
        ("weights = {a = 'x'}", 'got the string "x"'),
        ("seed = 'x'", 'must be an integer or "none", got the string "x"'),
        ("max_running = 1e6", "got the number 1000000.0; write 1000000"),
        ("max_running = 0.0", "got the number 0.0"),
        ("max_running = '8'", 'got the string "8"; write 8'),
        ("temperature = '0.7'", 'got the string "0.7"; write 0.7'),
        ("temperature = '50%'", 'got the string "50%"; write 0.5'),
        ("temperature = '9'", 'got the string "9"'),
        ("temperature = [0.7]", "got the list [0.7]"),
        ("temperature = {value = 0.7, unit = 'x'}", 'got the table {value = 0.7, unit = "x"}'),
        ("temperature = 2026-01-01", "got the date 2026-01-01"),
        ("temperature = 10:30:00", "got the time 10:30:00"),
        ("ignore_eos = 'True'", 'got the string "True"; write true'),
        ("ignore_eos = 'maybe'", 'got the string "maybe"'),
        ("ignore_eos = 0", "got the integer 0; write false"),
        ("ignore_eos = [true]", "must be true or false, got the list [true]"),
        ("ignore_eos = {on = true}", "must be true or false, got the table {on = true}"),
        ("max_running = '1_GB'", 'got the string "1_GB"'),
        ("max_running = [8]", "must be an integer >= 1, in samples, got the list [8]"),
        ("stop = 'b'", 'got the string "b"; write ["b"]'),
        ("options = 'a=1'", 'got the string "a=1"; write a table as {name = 1}'),
    ],
)
def test_a_wrong_value_is_refused_with_key_requirement_and_line(line, said):
    message = refused(WELL + line)
    assert message.startswith(f"my.toml:3: rollout.{line.split(' ')[0]}: ")
    assert said in message


@pytest.mark.parametrize("text", ["inf", "-inf", "1e999", "1" + 400 * "0"])
def test_a_setting_without_an_upper_bound_is_still_finite(text):
    assert "not finite" in refused(WELL, f"--async.staleness_threshold={text}")


def test_a_wrong_override_is_named_as_the_place():
    assert refused(WELL, "--rollout.max_running", "many").startswith("--rollout.max_running: must be an integer >= 1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (WELL + "temprature = 1", "my.toml:3: rollout.temprature: unknown key; did you mean rollout.temperature?"),
        (WELL + "staleness_treshold = 1", "did you mean async.staleness_threshold?"),
        (WELL + "qqq = 1", "unknown key; [rollout] has model_path, temperature"),
        (WELL + "[asinc]", "my.toml:3: [asinc]: unknown section; did you mean [async]?"),
        (WELL + "[zzz]", "known sections: rollout, async, extra"),
        ("temperature = 1\n" + WELL, "my.toml:1: temperature: unknown key; did you mean rollout.temperature?"),
        ("rollout = 1", "must be a table, [rollout], got a single value"),
        ("[[rollout]]", "must be a table, [rollout], got [[rollout]], a list of tables"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(text, said):
    assert said in refused(text)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--rollout.temprature=1", "--rollout.temprature: unknown key; did you mean rollout.temperature?"),
        ("--rollot.seed=1", "did you mean --rollout.seed?"),
        ("--rollout.seed.x=1", "which has no inner keys"),
        ("--rollout.seed", "needs a value"),
        ("rollout.seed=1", "an override is --section.key value"),
    ],
)
def test_a_wrong_override_key_is_refused(word, said):
    assert said in refused(WELL, word)


def test_a_value_may_be_negative_but_not_another_option():
    assert split_overrides(["--a.b", "-1", "--a.c", "-x"]) == [("a.b", "-1"), ("a.c", "-x")]
    with pytest.raises(ConfigError, match=r"--a\.b: needs a value"):
        split_overrides(["--a.b", "--a.c", "1"])


def test_a_required_key_that_is_missing_is_named_with_how_to_give_it():
    message = refused("[rollout]\n")
    assert "rollout.model_path: required and not given (a string)" in message
    assert "--rollout.model_path VALUE" in message
    assert "rollout.model_path" in refused("")


def test_all_problems_are_reported_at_once():
    message = refused("[rollout]\ntemperature = 9\nfoo = 1\n[async]\ntrigger = 0\n", "--rollout.seed=x")
    assert message.startswith("5 problems in the configuration\n")
    for place in ("my.toml:2:", "my.toml:3:", "my.toml:5:", "--rollout.seed:", "rollout.model_path: required"):
        assert place in message


def test_what_else_is_wrong_is_reported_in_the_same_answer(tmp_path):
    seen, path = {}, tmp_path / "my.toml"

    def look(sections, failed):
        seen.update(sections=sections, failed=failed)
        return ["model: not there"]

    path.write_text(WELL + "temperature = 9\n[async]\ntrigger = 2\n")
    with pytest.raises(ConfigError) as refusal:
        load_config(path, Config, look=look)
    assert str(refusal.value).splitlines()[::2] == ["2 problems in the configuration", "  model: not there"]
    assert seen["failed"] == {"rollout"}
    assert seen["sections"]["async_"].trigger == 2
    assert seen["sections"]["rollout"].temperature == 1.0
    path.write_text(WELL)
    load_config(path, Config, look=look)  # nothing is wrong, and it is not asked


def test_many_problems_are_counted_and_the_first_are_shown():
    lines = str(ProblemsError(*(f"problem {number}" for number in range(25)))).splitlines()
    assert (lines[0], lines[20], lines[21:]) == ("25 problems", "  problem 19", ["  and 5 more"])


def test_what_a_section_checks_itself_is_reported_with_its_place():
    assert refused(WELL + "[async]\ntrigger = 11").startswith("my.toml:3: [async]: trigger above 10 needs")


def test_lines_are_right_after_values_of_several_lines():
    text = WELL + 'stop = [\n  "a",\n]\noptions.a = """\n[async]\ntrigger = 0\n"""\n\nseed = "x"\n'
    assert refused(text).startswith("my.toml:11: rollout.seed")


@pytest.mark.parametrize(
    ("text", "place", "shown"),
    [
        ("[rollout\nx = 1", "my.toml:1:9", "    [rollout\n            ^"),
        ("[rollout]\nx = = 1", "my.toml:2:5", "    x = = 1\n        ^"),
        ("[rollout]\nx = [1,\n", "my.toml:2:8", "    x = [1,\n           ^"),
        ("a = 1\na = 2", "my.toml:2", "    a = 2"),
    ],
)
def test_broken_toml_is_shown_with_line_column_and_caret(text, place, shown):
    message = refused(text)
    assert message.startswith(place)
    assert "broken TOML" in message
    assert shown in message


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("ignore_eos = True", "TOML writes true"),
        ("seed = None", 'TOML writes "none"'),
        ("seed = null # not set", 'TOML writes "none"'),
        ("seed: 3", "TOML writes key = value; a file of another trainer is read by the command import"),
        ("seed = 3; temperature = 1", ""),
        ("; a comment", "a comment begins with #"),
        ("// a comment", "a comment begins with #"),
        ("dtype = “float32”", 'TOML takes straight quotes alone: "..."'),
        ('model_path = "C:\\Users\\me"', r"in double quotes a backslash begins an escape; write single quotes"),
        ("dtype = float32", 'a text needs quotes: "float32"'),
        ("model_path = ~/models/a", 'a text needs quotes: "~/models/a"'),
        ("temperature = 50%", "a number has no unit"),
        ("max_bytes = 10GB", "a number has no unit"),
        ("every_s = 1h", "a number has no unit"),
        ("seed = 1\nseed = 2", "the key is given twice; keep one of them"),
        ("[rollout]", "the section is there twice; put its keys together under one heading"),
        ("#!/bin/bash\nimport trl", "this is no TOML; a file of another trainer is read by the command import"),
        ('{"rollout": 1}', "this is no TOML"),
    ],
)
def test_broken_toml_is_answered_with_what_to_write(line, advice):
    message = refused(WELL + line)
    *_, caret, below = message.splitlines()
    assert (caret.strip(), below[:2]) == ("^", "  ") if advice else below.strip() == "^"
    assert advice in below


def test_a_quantity_is_answered_in_the_unit_of_its_setting():
    @dataclass(frozen=True, kw_only=True)
    class Limits:
        size: int = setting(0, "How much.", "bytes", ge=0)
        after_s: float = setting(1.0, "How long.", "s", ge=0)

    @dataclass(frozen=True, kw_only=True)
    class Root:
        limits: Limits = field(default_factory=Limits)

    cases = {"size": ["10GB", "10000000000", "2 GiB", "2147483648"], "after_s": ["1h", "3600", "500ms", "0.5"]}
    for key, (first, its, second, others) in cases.items():
        for text, written in ((first, its), (second, others)):
            with pytest.raises(ConfigError) as refusal:
                parse_config("", Root, [f"--limits.{key}={text}"])
            assert str(refusal.value).endswith(f'got the string "{text}"; write {written}')


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.toml", Config)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path, Config)
    (tmp_path / "binary.toml").write_bytes(b"a = 1 # \xff\x00")
    with pytest.raises(ConfigError, match="must be UTF-8 text: byte 8 is not; save it as UTF-8"):
        load_config(tmp_path / "binary.toml", Config)
    (tmp_path / "wide.toml").write_bytes(WELL.encode("utf-16"))
    with pytest.raises(ConfigError, match="must be UTF-8 text: it is UTF-16: save it as UTF-8"):
        load_config(tmp_path / "wide.toml", Config)
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match=r"give a file, such as .*config\.toml; resume continues that run"):
        load_config(tmp_path, Config)


def test_a_file_may_begin_with_a_byte_order_mark_and_end_lines_as_windows_does(tmp_path):
    (tmp_path / "my.toml").write_bytes((WELL + "seed = 4\n").replace("\n", "\r\n").encode("utf-8-sig"))
    assert load_config(tmp_path / "my.toml", Config).rollout.seed == 4


def test_variables_and_the_home_folder_are_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("SET", "value")
    monkeypatch.delenv("UNSET", raising=False)
    cases = {
        "${SET}/x": "value/x",
        "${UNSET:-other}": "other",
        "${SET:-other}": "value",
        "${UNSET:-}": "",
        "~/data": "/home/ada/data",
        "${UNSET:-~/data}": "/home/ada/data",
        "a~": "a~",
        "~user/x": "~user/x",
        "$${SET}": "${SET}",
        "$~/x": "~/x",
        "price $5 \\\\boxed{x}$": "price $5 \\boxed{x}$",
    }
    for text, expected in cases.items():
        assert load(f'[rollout]\nmodel_path = "{text}"').rollout.model_path == expected
    assert load(WELL + 'options = {a = ["${SET}"]}').rollout.options == {"a": ["value"]}


def test_what_a_variable_holds_is_not_expanded_again(monkeypatch):
    monkeypatch.setenv("SET", "${OTHER}")
    assert load('[rollout]\nmodel_path = "${SET}"').rollout.model_path == "${OTHER}"


def test_a_missing_variable_and_a_broken_reference_are_refused(monkeypatch):
    monkeypatch.delenv("UNSET", raising=False)
    message = refused('[rollout]\nmodel_path = "${UNSET}/x"')
    assert "my.toml:2: rollout.model_path: environment variable UNSET is not set" in message
    assert "${ must name a variable" in refused('[rollout]\nmodel_path = "${no name}"')


def test_what_is_overridden_needs_no_variable():
    text = '[rollout]\nmodel_path = "${UNSET_FOR_SURE}/model"\n'
    assert parse_config(text, Config, ["--rollout.model_path=here"]).rollout.model_path == "here"


def test_a_default_may_name_a_variable(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Data:
        """Data."""

        path: str = setting("${OFFBEAT_DATA:-~/data}", "Where.")

    @dataclass(frozen=True, kw_only=True)
    class Root:
        data: Data = setting(REQUIRED, "Data.")

    monkeypatch.setenv("OFFBEAT_DATA", "/disk")
    # A class made inside a function is not found by name, so its annotation is the class itself.
    Root.__annotations__["data"] = Data
    assert load_config(None, Root).data.path == "/disk"
