"""Advice for a value or a line that a configuration does not take: how to write it."""

import re
from collections.abc import Mapping
from datetime import date, time
from typing import Any, Final, get_origin

from offbeat_core._config.schema import number_text, union_arms
from offbeat_core._config.setting import Setting

_QUANTITY: Final = re.compile(r"\s*(\d[\d_]*\.?\d*)\s*([A-Za-z%]+)\s*")
_SECONDS: Final = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_POWERS: Final = {"k": 1, "m": 2, "g": 3, "t": 4}
_SPOKEN: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_LARGEST_WRITTEN: Final = 2**53


def value_advice(value: Any, annotation: Any, setting: Setting) -> str:
    """Say what to write in place of a value that does not fit, to go behind the error; empty where that is not plain.

    Args:
        value: as TOML has it, or the words of an override that are no TOML.
        annotation: type of the setting.
        setting: the setting.
    """
    arms = union_arms(annotation)
    written = ""
    if bool in arms:
        written = _truth(value)
    elif int in arms or float in arms:
        written = _number(value, is_whole=float not in arms, setting=setting)
    elif isinstance(value, str) and any(get_origin(arm) in (list, tuple) for arm in arms):
        written = 'a list as ["a", "b"]' if value.startswith("[") else f'["{value}"]'
    elif isinstance(value, str) and any(arm is dict or get_origin(arm) is dict for arm in arms):
        written = "a table as {name = 1}"
    return f"; write {written}" if written else ""


def _truth(value: Any) -> str:
    if isinstance(value, str):
        meant = _SPOKEN.get(value.lower())
    else:
        meant = bool(value) if type(value) is int and value in (0, 1) else None
    return "" if meant is None else str(meant).lower()


def _number(value: Any, *, is_whole: bool, setting: Setting) -> str:
    """Return the number that is meant, where it is one that the setting takes."""
    meant = value if isinstance(value, float) else _meant_number(value, setting) if isinstance(value, str) else None
    if meant is None or abs(meant) > _LARGEST_WRITTEN or (is_whole and not float(meant).is_integer()):
        return ""
    meant = int(meant) if float(meant).is_integer() else meant
    return "" if setting.complaint(meant) else number_text(meant)


def _meant_number(text: str, setting: Setting) -> float | None:
    try:
        return float(text)  # in quotes, or with an underscore
    except ValueError:
        pass
    if not (found := _QUANTITY.fullmatch(text)):
        return None
    number, unit = float(found[1].replace("_", "")), found[2].lower()
    if unit == "%":
        return number / 100
    if setting.unit == "s" and unit in _SECONDS:
        return number * _SECONDS[unit]
    power = _POWERS.get(unit[0])
    if setting.unit == "bytes" and power and unit[1:] in ("", "b", "ib"):
        return number * float((1000 if unit[1:] == "b" else 1024) ** power)
    return None


def show(value: Any) -> str:
    """Show a value as the file would write it, cut to one line, with its kind."""
    if isinstance(value, bool):
        return str(value).lower()
    text = _written(value)
    return _kind(value) + (text if len(text) <= 80 else text[:77] + "...")


def _kind(value: Any) -> str:
    if isinstance(value, date | time):
        return "the time " if isinstance(value, time) else "the date "
    kinds = {str: "the string ", int: "the integer ", float: "the number ", list: "the list ", dict: "the table "}
    return kinds.get(type(value), "")


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_written(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return value.isoformat() if isinstance(value, date | time) else repr(value)


_UNQUOTED: Final = re.compile(r"\s*[A-Za-z0-9_.\"'-]+\s*=\s*(?P<value>[^#\n]*?)\s*(#.*)?")
_OF_PYTHON: Final = {"true": "true", "false": "false", "none": '"none"', "null": '"none"', "nil": '"none"'}
_QUOTES: Final = "“”‘’„«»`"


def syntax_advice(line: str, column: int, reason: str) -> str:
    """Say what TOML expects instead of the text of a line, to be printed below it; empty where that is unclear.

    Args:
        line: that the parser stumbled over.
        column: where, from 1.
        reason: the parser's.
    """
    here = line[column - 1 : column]
    if "Cannot overwrite" in reason:
        return "the key is given twice; keep one of them"
    if reason.startswith("Cannot declare"):
        return "the section is there twice; put its keys together under one heading"
    if any(quote in line for quote in _QUOTES):
        return 'TOML takes straight quotes alone: "..."'
    if line.lstrip().startswith((";", "//", "--", "/*")):
        return "a comment begins with #"
    if "\\" in line and ("hex" in reason or "'\\'" in reason or "escape" in reason):
        return r"in double quotes a backslash begins an escape; write single quotes: 'C:\data'"
    if here == ":" and "=" in reason:
        return "TOML writes key = value; a file of another trainer is read by the command import"
    if line.lstrip()[:1] in ("{", "<") or line.lstrip().startswith(("import ", "from ", "#!")):
        return "this is no TOML; a file of another trainer is read by the command import"
    return _value_syntax_advice(line)


def _value_syntax_advice(line: str) -> str:
    """Say how to write a value that is neither a number nor in quotes."""
    found = _UNQUOTED.fullmatch(line)
    value = found["value"] if found else ""
    if written := _OF_PYTHON.get(value.lower()):
        return f"TOML writes {written}"
    if _QUANTITY.fullmatch(value):
        return "a number has no unit; --explain SECTION.KEY says in what it counts"
    return f'a text needs quotes: "{value}"' if re.match(r"[A-Za-z~/$.][^\"']*$", value) else ""
