"""Keeps secrets out of what a run writes: a value that came from the environment is written as the variable's name."""

import os
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from offbeat_core._errors import ConfigError

_SECRET_WORDS: Final = frozenset(
    [
        "key",
        "token",
        "secret",
        "password",
        "passwd",
        "passphrase",
        "passcode",
        "credential",
        "credentials",
        "creds",
        "apikey",
    ]
)
"""Words that mark a secret anywhere in a name of several words: OPENAI_API_KEY, GITHUB_TOKEN_2."""
_LAST_WORDS: Final = frozenset({"pass", "pwd", "pat", "auth", "authorization"})
"""Words that mark a secret only at the end of a name: DB_PASS and GH_PAT, and not AUTH_URL or pass_at_k."""
_JOINED: Final = ("apikey", "accesskey", "secretkey", "privatekey", "authkey", "token", "secret", "password", "passwd")
"""Ends of one word: OPENAIAPIKEY, mytoken."""
_HARMLESS_BEFORE: Final = {
    "token": frozenset(
        [
            "pad",
            "eos",
            "bos",
            "unk",
            "mask",
            "sep",
            "cls",
            "stop",
            "start",
            "end",
            "image",
            "video",
            "vision",
            "audio",
            "think",
            "tool",
        ]
    ),
    "key": frozenset(
        ["sort", "group", "primary", "foreign", "cache", "prompt", "answer", "reward", "image", "data", "metric"]
    ),
    "pass": frozenset(["forward", "backward", "first", "second", "single"]),
}
_PLACES: Final = frozenset({"path", "file", "dir", "folder"})
"""Words at the end of a name that mark the place of a secret, and not the secret."""
_HARMLESS_NAMES: Final = frozenset({"pwd", "oldpwd"})
_HARMLESS_KEYS: Final = frozenset({"key", "pass", "pat", "auth"})
"""Keys of a table in a configuration that alone are names like any other."""
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


def secret_variables(kept: Collection[str] = ()) -> list[str]:
    """Return the names of the environment's variables that are named like secrets, but for some that are kept.

    One that says where a secret lies, such as RAY_AUTH_TOKEN_PATH, counts as one.
    """
    return [name for name in os.environ if _is_secret(_PLACE_AT_END.sub("", name)) and name not in kept]


def drop_secrets(kept: Collection[str] = ()) -> None:
    """Take variables that are named like secrets out of the environment of this process, and of what it starts.

    Args:
        kept: names of variables that stay.
    """
    for name in secret_variables(kept):
        del os.environ[name]


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
    words = [word for word in re.split(r"[^a-z0-9]+", _CAMEL.sub("_", name).lower()) if word]
    if not words or name.lower() in but | _HARMLESS_NAMES or words[-1] in _PLACES:
        return False
    before = ["", *words]
    return (words[-1] in _LAST_WORDS and not _is_harmless(before[-2], words[-1])) or any(
        (word in _SECRET_WORDS or word.endswith(_JOINED)) and not _is_harmless(first, word)
        for first, word in zip(before, words, strict=False)
    )


_PLACE_AT_END: Final = re.compile(r"_(?:path|file|dir|folder)$", re.IGNORECASE)
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def _is_harmless(before: str, word: str) -> bool:
    return before in _HARMLESS_BEFORE.get(word, ())
