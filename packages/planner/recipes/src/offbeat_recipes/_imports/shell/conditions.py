"""Decides the conditions of a shell script: `[ … ]` and `[[ … ]]`."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from offbeat_recipes._imports.shell.values import MARK

_COMPARISONS: Final[dict[str, Callable[[str, str], bool]]] = {
    "=": lambda a, b: a == b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "=~": lambda a, b: _search(b, a),
    "-eq": lambda a, b: int(a) == int(b),
    "-ne": lambda a, b: int(a) != int(b),
    "-lt": lambda a, b: int(a) < int(b),
    "-le": lambda a, b: int(a) <= int(b),
    "-gt": lambda a, b: int(a) > int(b),
    "-ge": lambda a, b: int(a) >= int(b),
}


_QUANTIFIER: Final = re.compile(r"(?<!\\)[*+?{]")
_REPEATED_GROUP: Final = re.compile(r"\)[*+{]")
_MAX_WAYS: Final = 10**6
"""Ways to split a text by a regular expression: more take too long to try."""


def _search(pattern: str, text: str) -> bool:
    if _REPEATED_GROUP.search(pattern) or (len(text) + 1) ** len(_QUANTIFIER.findall(pattern)) > _MAX_WAYS:
        raise ValueError("takes too long")
    return re.search(pattern, text) is not None


def decide(words: Sequence[str], variables: Mapping[str, str]) -> bool | None:
    """Return whether a condition holds.

    Args:
        words: between the brackets.
        variables: that the script has set.

    Returns:
        None where only the machine can decide: for files, and for values that are open.
    """
    for joints, decisive in ((("||", "-o"), True), (("&&", "-a"), False)):
        if position := _outermost(words, joints):
            sides = decide(words[:position], variables), decide(words[position + 1 :], variables)
            if decisive in sides:
                return decisive
            return None if None in sides else not decisive
    if words[:1] == ["!"]:
        state = decide(words[1:], variables)
        return None if state is None else not state
    if words[:1] == ["("] and words[-1:] == [")"]:
        return decide(words[1:-1], variables)
    if words[:1] == ["-v"]:
        return words[-1] in variables or None
    return None if any(MARK in word for word in words) else _compare(words)


def _outermost(words: Sequence[str], joints: tuple[str, str]) -> int:
    """Return where two conditions are joined, outside of parentheses; 0 where they are not."""
    depth = 0
    for position, word in enumerate(words[:-1]):
        depth += (word == "(") - (word == ")")
        if position and not depth and word in joints:
            return position
    return 0


def _compare(words: Sequence[str]) -> bool | None:
    match words:
        case []:
            return False
        case [text] | ["-n", text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case [left, sign, right] if sign in _COMPARISONS:
            try:
                return _COMPARISONS[sign](left, right)
            except (ValueError, re.error):
                return None
    return None  # a file, a terminal, …
