"""Files of the dump folder: one head a process, the verdicts, and the addresses of processes outside any world.

Written whole and renamed, so a reader, or a kill in the middle, never meets half a file.
"""

import contextlib
import json
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._process.exceptions import plain_name
from offbeat_liveness._process.snapshot import ProcessSnapshot, from_data, to_data
from offbeat_liveness._process.stacks import OwnThread

VERDICT: Final = "verdict.json"
HEAD_PREFIX: Final = "head-"
ADDRESS_PREFIX: Final = ".address-"
SECRET: Final = ".secret"
FORMAT: Final = 1
MAX_VERDICTS: Final = 64  # that wait to be written


def write(directory: Path, name: str, data: dict[str, Any]) -> None:
    """Write a file as a whole, for this user alone; a folder that cannot be written does not disturb the run."""
    partial = directory / f".{name}.{os.getpid()}.{secrets.token_hex(4)}.partial"
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(data, file)
        partial.replace(directory / name)


def write_head(directory: Path, head: ProcessSnapshot) -> None:
    process = f"@{plain_name(head.host)}-{head.pid}.json"  # no "@" is in a name: the pattern finds no other host's
    name = f"{HEAD_PREFIX}{plain_name(head.name)}{process}"
    write(directory, name, {"format": FORMAT, **to_data(head)})
    with contextlib.suppress(OSError):
        for older in directory.glob(f"{HEAD_PREFIX}*{process}"):  # from before it knew its rank
            if older.name != name:
                remove(directory, older.name)


def write_verdict(directory: Path, verdict: Verdict) -> None:
    data = verdict.to_data()
    write(directory, f"verdict-{int(verdict.time_s * 1000)}-{verdict.kind}.json", data)
    write(directory, VERDICT, data)


class DumpWriter:
    """Writer of dumps from a thread of its own, which exists only while there is something to write.

    So a folder that hangs blocks no other thread. The queue is bounded: each process's newest snapshot, and the newest
    verdicts, which go first. Without a directory nothing is written.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._changed = threading.Condition()
        self._heads: dict[str, ProcessSnapshot] = {}
        self._verdicts: deque[Verdict] = deque(maxlen=MAX_VERDICTS)
        self._is_writing = False

    def write_head(self, head: ProcessSnapshot) -> None:
        self._have_written(lambda: self._heads.update({head.key: head}))

    def write_verdict(self, verdict: Verdict) -> None:
        self._have_written(lambda: self._verdicts.append(verdict))

    def flush(self, deadline_s: float) -> bool:
        """Wait until all is written, but no longer than `deadline_s` seconds; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_writing, deadline_s)

    def _have_written(self, add: Callable[[], object]) -> None:
        if self._directory is None:
            return
        with self._changed:
            add()
            if not self._is_writing:
                thread = OwnThread(self._write, "dumps")
                with contextlib.suppress(RuntimeError):  # the interpreter ends, or has no thread to spare
                    thread.start()
                    self._is_writing = True

    def _write(self) -> None:
        assert self._directory is not None
        while True:
            with self._changed:
                verdict = self._verdicts.popleft() if self._verdicts else None
                head = self._heads.pop(next(iter(self._heads))) if self._heads and verdict is None else None
                if verdict is None and head is None:
                    self._is_writing = False
                    self._changed.notify_all()
                    return
            if verdict is not None:
                write_verdict(self._directory, verdict)
            if head is not None:
                write_head(self._directory, head)


def read_heads(directory: Path) -> list[ProcessSnapshot]:
    heads = [from_data(ProcessSnapshot, data) for data in _read_all(directory, f"{HEAD_PREFIX}*.json")]
    return sorted(heads, key=lambda head: (head.rank is None, head.rank or 0, head.name))


def read_verdicts(directory: Path) -> list[Verdict]:
    verdicts = [from_data(Verdict, data) for data in _read_all(directory, "verdict-*.json")]
    return sorted(verdicts, key=lambda verdict: verdict.time_s)


def read_addresses(directory: Path) -> list[dict[str, Any]]:
    return _read_all(directory, f"{ADDRESS_PREFIX}*.json")


def address_name(machine: str, pid: int) -> str:
    return f"{ADDRESS_PREFIX}{machine}-{pid}.json"


def remove(directory: Path, name: str) -> None:
    with contextlib.suppress(OSError):
        (directory / name).unlink()


def shared_secret(directory: Path) -> str:
    """Return a secret for the processes that can read the folder as this user. The first makes it."""
    path = directory / SECRET
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            partial = directory / f"{SECRET}.{os.getpid()}.partial"
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(16))
            with contextlib.suppress(FileExistsError):
                os.link(partial, path)  # fails if another was first, and is never half written
            partial.unlink()
        return path.read_text()
    return ""


def _read_all(directory: Path, pattern: str) -> list[dict[str, Any]]:
    found = []
    for path in sorted(directory.glob(pattern)):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_text()))
    return found
