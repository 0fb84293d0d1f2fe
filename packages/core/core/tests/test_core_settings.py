"""A setting says what is required of a value, and only when the value breaks it."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_core import (
    METADATA_KEY,
    REQUIRED,
    ConfigError,
    RolloutEngineConfig,
    Setting,
    TrainEngineConfig,
    read_options,
    setting,
)

numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(low=numbers, high=numbers, value=numbers)
def test_bounds_hold_or_leave_out_their_ends(low, high, value):
    assert (Setting("x", ge=low, le=high).complaint(value) is None) == (low <= value <= high)
    assert (Setting("x", gt=low, lt=high).complaint(value) is None) == (low < value < high)


@given(bound=numbers | st.just(0))
def test_a_number_on_a_bound(bound):
    assert Setting("x", ge=bound).complaint(bound) is None
    assert Setting("x", gt=bound).complaint(bound) == f"a number > {bound:g}"


def test_the_complaint_names_every_bound():
    assert Setting("x", ge=0, lt=1).complaint(1.5) == "a number >= 0 and < 1"
    assert Setting("x", gt=0.5, le=2).complaint(0) == "a number > 0.5 and <= 2"


def test_choices_are_named():
    dtype = Setting("x", choices=("float32", "bfloat16"))
    assert dtype.complaint("float32") is None
    assert dtype.complaint("float8") == "one of float32, bfloat16"


def test_nothing_given_is_never_out_of_bounds():
    assert Setting("x", ge=1).complaint(None) is None
    assert Setting("x", choices=("a",)).complaint(None) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_out_of_any_bounds(value):
    assert Setting("x").complaint(value) == Setting("x", ge=0).complaint(value) == "a finite number"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    path: str = setting(REQUIRED, "Where it lives.")
    limit_s: float = setting(2.5, "How long to wait.", "s", gt=0)
    options: dict[str, int] = setting({"a": 1}, "Extras.")
    names: list[str] = setting([], "Names.")


def test_a_required_setting_has_no_default():
    with pytest.raises(TypeError, match="path"):
        Example()
    assert Example(path="p").limit_s == 2.5


def test_instances_share_no_list_and_no_dict():
    first, second = Example(path="p"), Example(path="p")
    first.options["b"] = 2
    first.names.append("n")
    assert second.options == {"a": 1}
    assert second.names == []


def test_documentation_and_unit_stand_beside_the_field():
    (field,) = (field for field in dataclasses.fields(Example) if field.name == "limit_s")
    declared = field.metadata[METADATA_KEY]
    assert (declared.doc, declared.unit, declared.gt) == ("How long to wait.", "s", 0)


@pytest.mark.parametrize("config", [RolloutEngineConfig, TrainEngineConfig])
def test_every_engine_setting_is_documented_and_its_default_is_in_bounds(config):
    defaults = config(model_path="m")
    for field in dataclasses.fields(config):
        declared = field.metadata[METADATA_KEY]
        assert declared.doc.endswith("."), field.name
        assert declared.complaint(getattr(defaults, field.name)) is None, field.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    limit_s: float = setting(2.5, "How long to wait.", "s", gt=0)
    num_parts: int = setting(1, "Parts.", ge=1)
    extras: dict[str, int] = setting({}, "Extras.")
    seed: int | None = setting(None, "Seed.", ge=0)


def test_options_are_read_by_their_declarations():
    assert read_options("engine", Options, {}) == Options()
    assert read_options("engine", Options, {"limit_s": 3, "extras": {"a": 1}}) == Options(limit_s=3, extras={"a": 1})
    assert [read_options("engine", Options, {"seed": seed}).seed for seed in (None, 4)] == [None, 4]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_part": 2}, "engine has no option 'num_part'; did you mean num_parts"),
        ({"xyz": 2}, "engine has no option 'xyz'; it has limit_s, num_parts, extras, seed"),
        ({"num_parts": "2"}, "engine: option num_parts must be int, got '2'"),
        ({"num_parts": True}, "engine: option num_parts must be int, got True"),
        ({"extras": 1}, "engine: option extras must be dict, got 1"),
        ({"seed": 1.5}, "engine: option seed must be int or none, got 1.5"),
        ({"seed": -1}, "engine: option seed must be a number >= 0, got -1"),
        ({"limit_s": 0.0}, "engine: option limit_s must be a number > 0, got 0.0"),
    ],
)
def test_an_option_that_cannot_be_is_named(options, text):
    with pytest.raises(ConfigError, match=text):
        read_options("engine", Options, options)
