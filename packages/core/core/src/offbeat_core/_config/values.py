"""Turns what a file or a command line says into what a field holds: types, bounds, paths of overrides."""

import math
import tomllib
from collections.abc import Iterable
from itertools import repeat
from typing import Any, get_args, get_origin

import msgspec

from offbeat_core._config.advice import show, value_advice
from offbeat_core._config.paths import ValueProblemError, expand, place
from offbeat_core._config.schema import union_arms
from offbeat_core._config.setting import Setting

_LARGEST_COUNT = 2**53
"""Largest value of a count with a lower bound: what is computed from it stays within 64 bits for a whole run."""

NONE = "none"
"""Text for None in a file, which TOML lacks: every optional setting takes it."""


def convert(value: Any, annotation: Any) -> Any:
    """Turn a value of TOML into one of `annotation`, strictly: an integer is a number, but true is not an integer.

    Raises:
        ValueProblemError: it does not fit, or is a number that is not finite.
    """
    arms = union_arms(annotation)
    if type(None) in arms and (value == NONE or value is None):
        return None
    for item, inner in _items(value, annotation):
        convert(item, inner)  # first, so that an error shows the part that does not fit
    try:
        converted = msgspec.convert(value, annotation, dec_hook=lambda kind, held: kind(held))
    except msgspec.ValidationError:
        too_large = ", which is not finite" if float in arms and type(value) is int else ""
        raise ValueProblemError(got=show(value) + too_large) from None
    if float in arms and isinstance(converted, float) and not math.isfinite(converted):
        raise ValueProblemError(got=f"{show(value)}, which is not finite")
    return converted


def _items(value: Any, annotation: Any) -> Iterable[tuple[Any, Any]]:
    """Return the parts of a list or a table, each with what it must be."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is dict and isinstance(value, dict):
        return [(item, args[1]) for item in value.values()]
    if origin in (list, tuple) and isinstance(value, list | tuple):
        return zip(value, repeat(args[0]) if origin is list or args[-1] is Ellipsis else args, strict=False)
    return ()


def fit(value: Any, annotation: Any, setting: Setting) -> Any:
    """Expand, convert and check against the bounds; elements of a list are checked one by one.

    Raises:
        ValueProblemError: it does not fit.
    """
    try:
        converted = convert(expand(value), annotation)
    except ValueProblemError as problem:
        if not problem.got:
            raise
        raise ValueProblemError(got=problem.got + value_advice(value, annotation, setting)) from None
    for item in converted if isinstance(converted, list | tuple) else (converted,):
        is_huge = type(item) is int and item > _LARGEST_COUNT and setting.ge is not None
        if is_huge or (not isinstance(item, bool) and setting.complaint(item)):
            raise ValueProblemError(got=show(item))
    return converted


def parse_scalar(text: str) -> Any:
    """Parse the value of an override as TOML would; what is not TOML is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # not TOML, or integers and lists without measure
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def fit_override(text: str, annotation: Any, setting: Setting) -> Any:
    """Fit the text of an override: as TOML, else as a bare string, else as a list separated by commas.

    Where `setting.is_text`, it is TOML or one entry of a list, as it is. Paths are relative to the working folder.

    Raises:
        ValueProblemError: no reading fits; it speaks of the first one.
    """
    if setting.is_text:
        value = parse_scalar(text) if text else []
        entry = value if isinstance(value, str) else text
        return fit(place(value if isinstance(value, list) else [entry], setting), annotation, setting)
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    readings: list[Any] = [parse_scalar(text), text, [parse_scalar(piece) for piece in pieces], pieces]
    first: ValueProblemError | None = None
    for reading in readings:
        try:
            return fit(place(reading, setting), annotation, setting)
        except ValueProblemError as problem:
            first = first or problem
    assert first is not None
    raise first
