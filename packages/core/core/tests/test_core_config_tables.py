"""Tables of tables under names of the user's are typed, checked, overridden, explained and written back."""

from dataclasses import dataclass, field

import pytest

from offbeat_core import REQUIRED, ConfigError, check_limits, dump_config, explain, parse_config, setting


@dataclass(frozen=True, kw_only=True)
class Judge:
    name: str = setting("", "Which.")
    weights: dict[str, float] = setting({}, "Several.")


@dataclass(frozen=True, kw_only=True)
class OneSet:
    path: str = setting(REQUIRED, "Where it is.")
    n: int = setting(1, "Samples.", "samples", ge=1)
    k: list[int] = setting([], "Of pass@k.", ge=1)
    judge: Judge | None = setting(None, "Its own.")

    def __post_init__(self) -> None:
        if self.n == 13:
            raise ConfigError("13 samples bring bad luck")


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    every: int = setting(0, "When.")
    sets: dict[str, OneSet] = setting({}, "Sets by name.")


@dataclass(frozen=True, kw_only=True)
class Root:
    eval: EvalSection = field(default_factory=EvalSection)


TEXT = """
[eval]
every = 2
[eval.sets.a]
path = "x"
n = 4
[eval.sets.a.judge]
name = "m"
weights = {z = 1.0}
"""


def test_file_and_overrides_fill_them_together_and_it_loads_back_equal():
    words = ["--eval.sets.b.n", "8", "--eval.sets.b.path=y", "--eval.sets.b.k=1,8", "--eval.sets.a.judge.weights.q=0.5"]
    config = parse_config(TEXT, Root, words)
    judge = Judge(name="m", weights={"z": 1.0, "q": 0.5})
    assert config.eval.sets == {"a": OneSet(path="x", n=4, judge=judge), "b": OneSet(path="y", n=8, k=[1, 8])}
    assert parse_config(dump_config(config), Root) == config
    assert "[eval.sets.a.judge]\n" in dump_config(config)


def test_everything_wrong_in_them_is_reported_at_once_with_its_place():
    with pytest.raises(ConfigError) as caught:
        parse_config(TEXT.replace("n = 4", "n = 0\npth = 1"), Root, ["--eval.sets.b.n=x", "--eval.sets.c.path=3"])
    said = str(caught.value)
    assert "the configuration:6: eval.sets.a.n: must be an integer >= 1, in samples, got the integer 0" in said
    assert "the configuration:7: eval.sets.a.pth: unknown key; did you mean path?" in said
    assert '--eval.sets.b.n: must be an integer >= 1, in samples, got the string "x"' in said
    assert "eval.sets.b: path: required and not given" in said
    assert "eval.sets.c" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--eval.sets=3"], "must be tables, each under a name"),
        (["--eval.sets.b=3"], "must be a table"),
        (["--eval.sets.a.n=13"], "eval.sets.a: 13 samples bring bad luck"),
        (["--eval.sets.a b.path=x"], "a name is letters"),
        (["--eval.sets.a.judge=3"], "must be a table"),
    ],
)
def test_what_is_no_such_table_is_one_line(words, said):
    with pytest.raises(ConfigError, match=said) as caught:
        parse_config(TEXT, Root, words)
    assert "\n" not in str(caught.value)


def test_each_key_within_is_explained_under_any_name():
    assert "--eval.sets.NAME.n 1" in explain(Root, "eval.sets.a.n") == explain(Root, "eval.sets.n")
    assert "weights" in explain(Root, "eval.sets.a.judge")
    assert "Where it is" in explain(Root, "eval.sets")
    with pytest.raises(ConfigError, match="no such key"):
        explain(Root, "eval.sets.a.temperatur")


def test_their_keys_are_counted():
    check_limits(Root)
    with pytest.raises(ConfigError, match="at most 3"):
        check_limits(Root, max_keys=3)
