"""Files of one JSON object a line, that survive a kill between any two bytes."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from offbeat_run._atomic import atomic_write
from offbeat_types import RunFolderError


class JsonlFile:
    """Appends lines, each flushed to the system before `write` returns. A torn last line is cut off on opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _cut_torn_line(path)
        self._file = path.open("ab")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line."""
        self._file.write(_encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close; a second call does nothing."""
        self._file.close()


def read_lines(path: Path, damaged: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield every whole line; a missing file has none.

    Args:
        path: of the file.
        damaged: takes a word for each line that cannot be read, which is then left out.

    Raises:
        RunFolderError: a line is damaged, with its number, and nobody takes note of it.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n") or not raw.strip():
                continue
            try:
                line = _decode(raw, f"{path}:{number}")
            except RunFolderError as error:
                if damaged is None:
                    raise
                damaged.append(str(error))
            else:
                yield line


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


def _decode(raw: bytes, where: str) -> dict[str, Any]:
    try:
        line = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise RunFolderError(f"{where}: not a line of JSON: {error}; remove the line, or restore the file") from error
    if not isinstance(line, dict):
        raise RunFolderError(f"{where}: must be a JSON object; remove the line, or restore the file")
    return line


def cut_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite the file, in one piece, with only the lines that `keep` wants."""
    if not path.is_file():
        return
    with atomic_write(path, "wb") as file:
        for line in read_lines(path):
            if keep(line):
                file.write(msgspec.json.encode(line) + b"\n")


def _cut_torn_line(path: Path) -> None:
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = file.seek(0, 2)
        tail = b""
        position = end
        while position and b"\n" not in tail:
            position = max(0, position - 65536)
            file.seek(position)
            tail = file.read(end - position)
        last = tail.rfind(b"\n")
        if position + last + 1 < end:
            file.truncate(position + last + 1)
