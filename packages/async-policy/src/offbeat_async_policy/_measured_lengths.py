"""Completion lengths that were measured: from a file of numbers, from JSON lines, or from a run folder."""

import json
from pathlib import Path
from typing import Any, Final

from offbeat_types import DataError

LENGTH_KEYS: Final = ("num_tokens", "response_tokens", "length")
RUN_FILE: Final = "generations/train.jsonl"


def read_lengths(path: Path) -> tuple[int, ...]:
    """Read measured lengths, in tokens.

    Args:
        path: whole numbers separated by white space; or a `.jsonl` file, each line a number or an object with one of
            the keys num_tokens, response_tokens, length; or a run folder, whose sampled generations are read.

    Raises:
        DataError: the file is missing, empty, or holds something else.
    """
    file = path / RUN_FILE if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise DataError(f"lengths file {file}: {reason}") from error
    lengths = _read_lines(file, text) if file.suffix == ".jsonl" else _read_words(file, text)
    if not lengths:
        raise DataError(f"lengths file {file} is empty: at least one number of tokens required")
    return lengths


def _read_words(file: Path, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split())
    except ValueError as error:
        raise DataError(
            f"lengths file {file}: whole numbers of tokens required, separated by blanks: {error}"
        ) from error


def _read_lines(file: Path, text: str) -> tuple[int, ...]:
    lengths = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            lengths.append(_length(json.loads(line)))
        except (ValueError, KeyError) as error:
            raise DataError(
                f"lengths file {file}, line {number}: a whole number of tokens required, or an object with "
                f"{' or '.join(LENGTH_KEYS)}; got {line[:60]!r}"
            ) from error
    return tuple(lengths)


def _length(value: Any) -> int:
    """The number, or the first of the keys that an object has.

    Raises:
        KeyError, ValueError: there is none.
    """
    if isinstance(value, dict):
        value = value[next((key for key in LENGTH_KEYS if key in value), LENGTH_KEYS[0])]
    if type(value) is int:
        return value
    raise ValueError(f"not a whole number: {value!r}")
