"""Settings: configuration declared, documented and bounded where it is used.

A configuration class is a frozen, keyword-only dataclass whose fields are made by `setting`. The loader of
offbeat-run reads the metadata; the class itself needs nothing but the standard library.
"""

import difflib
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

from offbeat_core._errors import ConfigError

OptionsT = TypeVar("OptionsT")
ConfigT = TypeVar("ConfigT")

PathKind = Literal["", "model", "dataset", "input", "output", "function", "command"]
"""Target of a path: a model or rows, which may be names of the Hub; other files and folders that are there, or that
are made; FILE.py:FUNCTION; a program and its arguments, of which those that end in .py or begin with ./ or ../ are
paths. "" is no path."""

METADATA_KEY: Final = "offbeat"
REQUIRED: Final = MISSING
"""Pass as `default` for a setting that has none."""


@dataclass(frozen=True)
class Setting:
    """Metadata of one setting beyond its name and type.

    Args:
        doc: one or two sentences for `--explain`.
        unit: such as "s", "tokens", "bytes", "nats"; empty for a pure number, a name or a path.
        ge, gt, le, lt: bounds on a number, each optional.
        choices: the only values allowed, or empty for any.
        is_text: of a list of texts: the words of an override are one entry, blanks and commas and all, unless they are
            written as a TOML list.
        hub: "model" or "dataset" where it takes a name of the Hub beside a path.
        path: kind of the paths that it takes where it takes no name of the Hub; of a table of options, the kinds by the
            names of its entries. A path in a file is relative to that file.
    """

    doc: str
    unit: str = ""
    _: KW_ONLY
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] = ()
    is_text: bool = False
    hub: str = ""
    path: PathKind | Mapping[str, PathKind] = ""

    def complaint(self, value: object) -> str | None:
        """Say what is required of `value` when it is out of bounds, else None. None itself is always in bounds."""
        if value is None:
            return None
        if self.choices and value not in self.choices:
            return "one of " + ", ".join(self.choices)
        if not isinstance(value, int | float):
            return None
        if isinstance(value, float) and not math.isfinite(value):
            return "a finite number"
        bounds = (
            (">=", self.ge, operator.ge),
            (">", self.gt, operator.gt),
            ("<=", self.le, operator.le),
            ("<", self.lt, operator.lt),
        )
        given = [(sign, bound, holds) for sign, bound, holds in bounds if bound is not None]
        if all(holds(value, bound) for _, bound, holds in given):
            return None
        return "a number " + " and ".join(f"{sign} {bound:g}" for sign, bound, _ in given)


def setting(default: Any, doc: str, unit: str = "", **bounds: Any) -> Any:
    """Declare one field of a configuration class.

    Args:
        default: its value when the file names none; `REQUIRED` for no default; lists and dicts are copied per instance.
        doc: what it does, for `--explain`.
        unit: see `Setting`.
        bounds: `ge`, `gt`, `le`, `lt`, `choices`, `is_text`, `hub`, `path` of `Setting`.

    Returns:
        A dataclass field, typed as the field's own annotation.
    """
    metadata = {METADATA_KEY: Setting(doc, unit, **bounds)}
    if default is REQUIRED:
        return field(metadata=metadata)
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def read_options(backend: str, kind: type[OptionsT], options: Mapping[str, Any]) -> OptionsT:
    """Check the options of a backend against their declarations.

    Args:
        backend: what errors call it, such as "rollout-torch".
        kind: the class of its options, each with a default.
        options: by name.

    Raises:
        ConfigError: an option is unknown (the text names the nearest), of the wrong type, or out of bounds.
    """
    known: dict[str, Any] = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise ConfigError(f"{backend} has no option {name!r}; {hint}")
        declared = known[name].type
        arms = get_args(declared) if isinstance(declared, UnionType) else (declared,)
        wanted = [get_origin(arm) or arm for arm in arms]
        fits = type(value) in wanted or (float in wanted and type(value) is int)
        names = " or ".join("none" if arm is NoneType else arm.__name__ for arm in wanted)
        complaint = known[name].metadata[METADATA_KEY].complaint(value) if fits else names
        if complaint:
            raise ConfigError(f"{backend}: option {name} must be {complaint}, got {value!r}")
    return kind(**options)


def check_ranges(config: Any, section: str = "") -> None:
    """Hold every value of a dataclass to the bounds of its `setting`.

    Raises:
        ConfigError: one is out of them.
    """
    for each in fields(config):
        value = getattr(config, each.name)
        if complaint := each.metadata[METADATA_KEY].complaint(value):
            raise ConfigError(f"{section}{each.name}: required {complaint}, got {value!r}")


def replace_settings(config: ConfigT, change: Callable[[str, Setting, Any], Any], prefix: str = "") -> ConfigT:
    """Return a configuration in which each value is what `change` makes of its key, its declaration and itself.

    Args:
        config: a dataclass of settings, which may hold others, and dicts of others.
        change: gets the key, such as "data.mix.sums.path".
        prefix: of the keys.
    """
    changed = {}
    for each in fields(config):  # type: ignore[arg-type]
        value, key = getattr(config, each.name), prefix + each.name.removesuffix("_")
        if is_dataclass(value):
            new: Any = replace_settings(value, change, f"{key}.")
        elif isinstance(value, dict) and any(is_dataclass(inner) for inner in value.values()):
            new = {name: replace_settings(inner, change, f"{key}.{name}.") for name, inner in value.items()}
        else:
            declared = each.metadata.get(METADATA_KEY)
            new = value if declared is None else change(key, declared, value)
        if new is not value and new != value:
            changed[each.name] = new
    return replace(config, **changed) if changed else config  # type: ignore[type-var]
