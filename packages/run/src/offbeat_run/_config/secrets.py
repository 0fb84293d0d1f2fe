"""Keeps secrets out of what a run writes: a value that came from the environment is written as the variable's name."""

import os
import re
from collections.abc import Mapping
from typing import Any, Final

from offbeat_types import ConfigError

_SECRET_WORDS: Final = frozenset({"key", "token", "secret", "password", "passwd", "credential", "credentials"})
_HARMLESS_KEYS: Final = frozenset({"key"})  # of a table in a configuration: "key" alone is a name like any other
_SHORTEST: Final = 8
"""Shorter values are no secrets, and would be found everywhere."""


def hide_secrets(text: str) -> str:
    """Put `${NAME}` where a text holds the value of an environment variable that is named like a secret."""
    for value, name in _secrets().items():
        text = text.replace(value, f"${{{name}}}")
    return text


def mark_secrets(text: str) -> tuple[str, dict[str, str]]:
    """Put a mark where a text holds a secret of the environment.

    Returns:
        The text, and what each mark in it stands for: `${NAME}`.
    """
    marks = {}
    for number, (value, name) in enumerate(_secrets().items()):
        if value in text:
            mark = f"\ue000{number}\ue001"
            text, marks[mark] = text.replace(value, mark), f"${{{name}}}"
    return text, marks


def refuse_literal_secrets(where: str, value: Any) -> None:
    """See that nothing that is named like a secret stands in a configuration as it is.

    Raises:
        ConfigError: something does; a secret belongs into a variable of the environment.
    """
    if not isinstance(value, Mapping):
        return
    for name, item in value.items():
        is_text = isinstance(item, str) and len(item) >= _SHORTEST
        if is_text and _is_secret(str(name), but=_HARMLESS_KEYS) and hide_secrets(item) == item:
            raise ConfigError(
                f"{where}.{name} looks like a secret, and the configuration of a run is kept in its folder: put it "
                f"into a variable of the environment, such as {str(name).upper()}, and write ${{{str(name).upper()}}}"
            )
        refuse_literal_secrets(f"{where}.{name}", item)


def _secrets() -> dict[str, str]:
    """Names by value, the longest value first."""
    found = {value: name for name, value in os.environ.items() if len(value) >= _SHORTEST and _is_secret(name)}
    return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))


def _is_secret(name: str, but: frozenset[str] = frozenset()) -> bool:
    words = re.split(r"[^a-z0-9]+", name.lower())
    return bool(_SECRET_WORDS.intersection(words)) and name.lower() not in but
