"""Files of lines of JSON that survive a kill between any two bytes."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from offbeat_core import RunFolderError, atomic_write, other_kind, require_file

T = TypeVar("T")


class JsonlFile:
    """Appends lines, each flushed to the system before `write` returns. A torn last line is cut off on opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        require_file(path)
        _cut_torn_line(path)
        self._file = path.open("ab")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line."""
        self._file.write(_encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close; a second call does nothing."""
        self._file.close()


MAX_DAMAGED: Final = 1000
"""Texts about damaged lines that are kept: a file may hold any number of them."""
UNREADABLE: Final = (msgspec.DecodeError, KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""Raised by a line that is not what it should be; a number may be too large, and brackets may nest without end."""
MAX_LINE_BYTES: Final = 1 << 28
"""Longest line of any of our files: the completions of a group with their prompt."""
_BLOCK_BYTES: Final = 1 << 16


def read_raw_lines(path: Path, damaged: list[str] | None) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of a file of lines; a missing file has none.

    Args:
        path: of the file.
        damaged: takes a text where it is no file, or where a line is too long: nothing after that one is read.

    Raises:
        RunFolderError: the same, if `damaged` is None.
    """
    if not path.is_file():
        if other := other_kind(path):
            _refuse(damaged, f"{path}: must be a file and is {other}; move it away")
        return
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                problem = f"{path}:{number}: a line of more than {MAX_LINE_BYTES} bytes, and nothing after it is read"
                _refuse(damaged, f"{problem}; cut the file before it, or restore it")
                return
            yield number, line


def _refuse(damaged: list[str] | None, text: str) -> None:
    if damaged is None:
        raise RunFolderError(text)
    note_damage(damaged, text)


def read_lines(
    path: Path, parse: Callable[[dict[str, Any]], T], what: str, damaged: list[str] | None = None
) -> Iterator[T]:
    """Yield what `parse` makes of every whole line; a missing file has none.

    Args:
        path: of the file.
        parse: reads the object that a line holds.
        what: each line is, for errors, such as "a line of metrics".
        damaged: takes a text for each line that cannot be read, which is then left out; at most `MAX_DAMAGED`.

    Raises:
        RunFolderError: a line is damaged, with its number, and `damaged` is None.
    """
    for number, raw in read_raw_lines(path, damaged):
        if not raw.endswith(b"\n") or not raw.strip():
            continue
        expected = "a line of JSON"
        try:
            line = msgspec.json.decode(raw, type=dict[str, Any])
            expected = what
            found = parse(line)
        except UNREADABLE as error:
            said = f"{path}:{number}: not {expected}: {error}; remove the line, or restore the file"
            if damaged is None:
                raise RunFolderError(said) from error
            note_damage(damaged, said)
        else:
            yield found


def note_damage(damaged: list[str], text: str) -> None:
    """Keep a text about a damaged line, if there is room for it."""
    if len(damaged) < MAX_DAMAGED:
        damaged.append(text)


def _encode(line: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(line)
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 does not hold: no reason to end a run
        return msgspec.json.encode(_encodable(line))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, Mapping):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value


def cut_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite the file, in one piece, with only the lines that `keep` wants."""
    require_file(path)
    if not path.is_file():
        return
    with atomic_write(path, "wb") as file:
        for line in read_lines(path, lambda line: line if keep(line) else None, "a line of this file"):
            if line is not None:
                file.write(msgspec.json.encode(line) + b"\n")


def _cut_torn_line(path: Path) -> None:
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = position = file.seek(0, os.SEEK_END)
        while position:
            start = max(0, position - _BLOCK_BYTES)
            file.seek(start)
            last = file.read(position - start).rfind(b"\n")
            if last >= 0:
                position = start + last + 1
                break
            position = start
        if position < end:
            file.truncate(position)
