"""Schema of a root configuration class: its sections, their keys, and the values of each key."""

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from offbeat_core._config.setting import METADATA_KEY, Setting
from offbeat_core._errors import ConfigError

MAX_KEYS_PER_SECTION = 29
MAX_KEYS = 120
_PLAIN_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Path: "a path"}
_NEAR = 0.6
_ALL_DIGITS = 10**15
"""Up to here a person can read the digits of a whole number."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One setting of one section.

    Args:
        name: as written in the file; a trailing underscore of the field's name is left out.
        field_name: the dataclass field's name.
        annotation: the resolved type.
        setting: doc, unit and bounds.
        default: the value when the file names none, or `dataclasses.MISSING`.
    """

    name: str
    field_name: str
    annotation: Any
    setting: Setting
    default: Any

    @property
    def required(self) -> str:
        """Describe what a value must be: type, bounds, unit."""
        required = type_words(self.annotation)
        bounds = bound_words(self.setting)
        unit = f", in {self.setting.unit}" if self.setting.unit else ""
        return required + (f" {bounds}" if bounds else "") + unit


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section: a table of the file, a dataclass in the program. `optional` ones may be left out as None."""

    name: str
    field_name: str
    cls: Any
    doc: str
    keys: dict[str, Key]
    optional: bool


def sections_of(root_type: type) -> dict[str, Section]:
    """Read a root configuration class.

    Returns:
        Sections by their name in the file, in the order of declaration.

    Raises:
        TypeError: a field of the root is not a section; our own bug, found by any test that loads a file.
    """
    hints = get_type_hints(root_type)
    return {_file_name(field): _section(field, hints[field.name]) for field in _fields(root_type)}


def _section(field: Field[Any], annotation: Any) -> Section:
    arms = [arm for arm in union_arms(annotation) if arm is not type(None)]
    if len(arms) != 1 or not is_dataclass(arms[0]):
        raise TypeError(f"{field.name}: a field of the root must be one section class, got {annotation!r}")
    default = _default(field)
    base = default if is_dataclass(default) else None
    known = field.metadata.get(METADATA_KEY)
    doc = known.doc if known else (arms[0].__doc__ or "").strip().splitlines()[0]
    return Section(
        name=_file_name(field),
        field_name=field.name,
        cls=arms[0],
        doc=doc,
        keys=keys_of(arms[0], base),
        optional=default is None,
    )


def keys_of(cls: Any, base: Any = None) -> dict[str, Key]:
    """Read the keys of a section class; `base`, when given, is an instance that holds the defaults."""
    hints = get_type_hints(cls)
    return {
        _file_name(field): Key(
            name=_file_name(field),
            field_name=field.name,
            annotation=hints[field.name],
            setting=field.metadata.get(METADATA_KEY) or Setting(""),
            default=_default(field) if base is None else getattr(base, field.name),
        )
        for field in _fields(cls)
    }


def named_class(annotation: Any) -> Any:
    """Return the section class D of a setting `dict[str, D]`, a table of tables by names of the user's.

    None for others.
    """
    args = get_args(annotation) if get_origin(annotation) is dict else ()
    return args[1] if args and is_dataclass(args[1]) else None


def nested_class(annotation: Any) -> Any:
    """Return the section class D of a setting `D` or `D | None` within another; None for others."""
    return next((arm for arm in union_arms(annotation) if is_dataclass(arm)), None)


def _fields(cls: Any) -> list[Field[Any]]:
    return [field for field in fields(cls) if field.init]


def _file_name(field: Field[Any]) -> str:
    return str(field.metadata.get("name") or field.name.removesuffix("_"))


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def union_arms(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of `A | B`, or the annotation alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def type_words(annotation: Any) -> str:
    """Name a type for a person: `tuple[str, ...]` is "a list of strings"."""
    if annotation in _PLAIN_NAMES:
        return _PLAIN_NAMES[annotation]
    if annotation is type(None):
        return '"none"'
    arms = union_arms(annotation)
    if len(arms) > 1:
        return " or ".join(type_words(arm) for arm in arms)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f'"{args[0]}"' if len(args) == 1 else "one of " + ", ".join(str(arg) for arg in args)
    if named_class(annotation):
        return "tables, each under a name of your own"
    if annotation is dict or origin is dict or is_dataclass(annotation):
        return "a table"
    if origin in (list, tuple) and args:
        if origin is tuple and args[-1] is not Ellipsis:
            return f"a list of {len(args)}: " + ", ".join(type_words(arg) for arg in args)
        return "a list, each " + type_words(args[0])
    return "any value" if annotation is Any else "a list"


def bound_words(setting: Setting) -> str:
    """Name the bounds of a setting: ">= 0 and < 1", "one of a, b", or nothing."""
    if setting.choices:
        return "(one of " + ", ".join(setting.choices) + ")"
    bounds = {">=": setting.ge, ">": setting.gt, "<=": setting.le, "<": setting.lt}
    return " and ".join(f"{sign} {number_text(bound)}" for sign, bound in bounds.items() if bound is not None)


def number_text(number: float) -> str:
    """Write a number as a person would: all digits of a whole one, "1e-06" for a small one."""
    return str(int(number)) if float(number).is_integer() and abs(number) < _ALL_DIGITS else f"{number:g}"


def nearest_key(sections: Mapping[str, Section], section: str, key: str) -> str | None:
    """Find the known `section.key` most like an unknown one, over all sections; the same section wins a tie."""

    def likeness(known_section: str, known_key: str) -> float:
        return SequenceMatcher(None, key, known_key).ratio() + (0.05 if known_section == section else 0.0)

    names = [(likeness(name, known), f"{name}.{known}") for name, item in sections.items() for known in item.keys]
    best = max(names, default=(0.0, ""), key=lambda pair: pair[0])
    return best[1] if best[0] >= _NEAR else None


def nearest_section(sections: Mapping[str, Section], name: str) -> str | None:
    """Find the known section most like an unknown one."""
    return next(iter(get_close_matches(name, sections, n=1, cutoff=_NEAR)), None)


def check_limits(root_type: type, *, max_keys: int = MAX_KEYS) -> None:
    """Hold a configuration to its size: applications call this in a test.

    Raises:
        ConfigError: too many keys in a section or in all, or a key without a doc.
    """
    sections = sections_of(root_type)
    for name, section in list(sections.items()):
        for key in section.keys.values():
            if cls := named_class(key.annotation):
                named = f"{name}.{key.name}.NAME"
                keys = keys_of(cls)
                sections[named] = Section(name=named, field_name="", cls=cls, doc="", keys=keys, optional=True)
    problems = [
        f"[{name}] has {len(section.keys)} keys: at most {MAX_KEYS_PER_SECTION}"
        for name, section in sections.items()
        if len(section.keys) > MAX_KEYS_PER_SECTION
    ]
    total = sum(len(section.keys) for section in sections.values())
    if total > max_keys:
        problems.append(f"{root_type.__name__} has {total} keys: at most {max_keys}")
    problems += [
        f"{name}.{key.name} has no doc: declare it with offbeat_core.setting"
        for name, section in sections.items()
        for key in section.keys.values()
        if not key.setting.doc
    ]
    if problems:
        raise ConfigError("\n".join(problems))
