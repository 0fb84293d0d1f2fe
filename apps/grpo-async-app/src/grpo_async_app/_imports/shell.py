"""Reads hydra overrides out of a shell script. Nothing is run: words are split, variables and whole numbers put in.

What a shell would do otherwise is left alone: conditions are not decided (of assignments in branches the first stands),
functions and commands in `$(…)` are not called. A variable that the script does not set stays a reference to the
environment, `${NAME}`, which our configuration reads in the same way.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from offbeat_data import calculate
from offbeat_types import DataError

_OVERRIDE: Final = re.compile(r"\+{0,2}(?P<name>[A-Za-z_]\w*(?:\.\w+)+)=(?P<value>.*)", re.DOTALL)
_ASSIGNMENT: Final = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_ARRAY: Final = re.compile(r"\s*(?:\w+\s+)*?(?P<name>[A-Za-z_]\w*)\+?=\((?P<inner>.*)\)\s*", re.DOTALL)
_ARRAY_BEGINS: Final = re.compile(r"\s*(?:\w+\s+)*?[A-Za-z_]\w*\+?=\((?!\()")
_WHOLE_ARRAY: Final = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_CALCULATION: Final = re.compile(r"\$\(\((.*?)\)\)(?!\))", re.DOTALL)
_REFERENCE: Final = re.compile(r"\$\{(?P<braced>\w+)(?::?[-=](?P<default>[^${}]*))?\}|\$(?P<bare>[A-Za-z_]\w*|\d)")
_UNSET: Final = re.compile("\0(\\w+)\0")
_DECLARING: Final = frozenset({"export", "local", "declare", "readonly", "typeset", "-x", "-r", "-a"})
_BRANCH_BEGINS: Final = frozenset({"if", "case", "for", "while", "until"})
_BRANCH_ENDS: Final = frozenset({"fi", "esac", "done"})
_MAX_ROUNDS: Final = 20
"""References inside references inside references; a script that needs more refers to itself."""


@dataclass
class _Script:
    """What is known so far."""

    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    depth: int = 0


def read_shell(text: str) -> dict[str, str]:
    """Overrides such as `data.max_prompt_length=1024`, by name, the last of each; values as text.

    Args:
        text: of a script of bash or sh.
    """
    script = _Script()
    for statement in _statements(text):
        _read_statement(script, statement)
    return script.overrides


def _statements(text: str) -> Iterator[str]:
    """Lines, joined where a quote, an array or a backslash goes on."""
    held = ""
    for line in text.replace("\\\n", " ").splitlines():
        held += line + "\n"
        if _is_whole(held):
            yield held
            held = ""
    if held:
        yield re.sub(r"[\"'\\]", " ", held)  # a quote that never ends: take what can be taken


def _is_whole(text: str) -> bool:
    try:
        words = _split(text)
    except ValueError:
        return False
    code = " ".join(words)
    return not _ARRAY_BEGINS.match(text) or code.count("(") <= code.count(")")


def _split(text: str) -> list[str]:
    without_blanks = _CALCULATION.sub(lambda found: "$((" + re.sub(r"\s", "", found[1]) + "))", text)
    return shlex.split(without_blanks, comments=True)


def _read_statement(script: _Script, statement: str) -> None:
    if _ARRAY_BEGINS.match(statement) and (found := _ARRAY.fullmatch(_without_comments(statement))):
        script.arrays.setdefault(found["name"], []).extend(_split(found["inner"]))
        return
    words = _split(statement)
    script.depth += sum(word in _BRANCH_BEGINS for word in words[:1])
    script.depth -= min(sum(word.rstrip(";") in _BRANCH_ENDS for word in words), script.depth)
    while words and words[0] in _DECLARING:
        words.pop(0)
    while words and (found := _ASSIGNMENT.fullmatch(words[0])):
        name, value = found["name"], _expand(found["value"].rstrip(";"), script.variables)
        if not (script.depth and name in script.variables):
            script.variables[name] = value
        words.pop(0)
    for word in _with_arrays(words, script.arrays):
        if found := _OVERRIDE.fullmatch(word):
            script.overrides[found["name"]] = _expand(found["value"], script.variables)


def _without_comments(statement: str) -> str:
    return "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in statement.splitlines())


def _with_arrays(words: list[str], arrays: dict[str, list[str]]) -> Iterator[str]:
    for word in words:
        found = _WHOLE_ARRAY.fullmatch(word)
        yield from arrays.get(found[1], []) if found else [word]


def _expand(text: str, variables: dict[str, str]) -> str:
    """Put variables and calculations in, innermost first."""

    def put_in(found: re.Match[str]) -> str:
        name = found["braced"] or found["bare"]
        if name in variables:
            return variables[name]
        return f"\0{name}\0" if found["default"] is None else str(found["default"])

    for _ in range(_MAX_ROUNDS):
        changed = _REFERENCE.sub(put_in, text)
        changed = _CALCULATION.sub(lambda found: _calculated(found, variables), changed)
        if changed == text:
            break
        text = changed
    return _UNSET.sub(lambda found: f"${{{found[1]}}}", text)


def _calculated(found: re.Match[str], variables: dict[str, str]) -> str:
    expression = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), found[1])
    try:
        return calculate(re.sub(r"(?<!/)/(?!/)", "//", expression))  # a shell divides whole numbers
    except DataError:
        return found[0]
