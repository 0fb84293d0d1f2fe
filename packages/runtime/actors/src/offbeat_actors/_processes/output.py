"""Output of a role whose code may print without end: its log keeps the beginning and the end."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from offbeat_actors._launcher import open_log
from offbeat_core import RunFolderError

_LAST_BYTES: Final = 64 * 1024
"""Longest end of a log: tracebacks of a role that dies."""
_SHOWN_CHARACTERS: Final = 200
_GRACE_S: Final = 0.5
"""Time for output on its way when the process has ended. Its children may hold the pipe for ever."""

OnOutput = Callable[[str, str], None]
"""Takes a role's name and the beginning of what it has printed, once."""


class RoleOutput(asyncio.Protocol):
    """Reads the output of one process and writes its log.

    Args:
        role: its name.
        path: of the log, which is appended to; None: nothing is kept.
        max_bytes: of the log, before the last of the output.
        on_output: is called when the role first prints.
    """

    def __init__(self, role: str, path: Path | None, max_bytes: int, on_output: OnOutput | None) -> None:
        self._role, self._path, self._on_output = role, path, on_output
        self._write(b"")  # raises where the log cannot be opened
        size = path.stat().st_size if path else 0
        # Of each process after the log is full there is still the end, but not of thousands that are started again.
        self._room, self._may_end = max(max_bytes - size, 0), size < 2 * max_bytes
        self._last, self._num_left_out = bytearray(), 0
        self._over = asyncio.Event()

    async def start(self) -> int:
        """Return the file descriptor that the process writes to; close it when the process has it."""
        ours, theirs = os.pipe()
        reader = os.fdopen(ours, "rb", buffering=0)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, reader)
        return theirs

    def data_received(self, data: bytes) -> None:
        """Keep what has come, as much as may be kept."""
        if self._on_output is not None:
            text = data[: 4 * _SHOWN_CHARACTERS].decode(errors="replace")[:_SHOWN_CHARACTERS]
            self._on_output(self._role, "".join(each if each.isprintable() else " " for each in text).strip())
            self._on_output = None
        if self._room:
            with contextlib.suppress(OSError, RunFolderError):  # a full disk: what depends on it says so
                self._write(data[: self._room])
        rest = data[self._room :]
        self._room -= len(data) - len(rest)
        self._last += rest
        self._num_left_out += max(len(self._last) - _LAST_BYTES, 0)
        del self._last[:-_LAST_BYTES]

    def connection_lost(self, _: Exception | None) -> None:
        """Note that no more will come."""
        self._over.set()

    async def close(self) -> None:
        """Write the last of the output, when the process has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self._over.wait()
        self._transport.close()
        if self._last and self._may_end:
            with contextlib.suppress(OSError, RunFolderError):
                gap = f"\n[{self._num_left_out} bytes left out]\n".encode() if self._num_left_out else b""
                self._write(gap + self._last)
        self._last.clear()

    def _write(self, data: bytes | bytearray) -> None:
        """Append to the log, which is open no longer than that: no end of a role can leave it open."""
        if self._path is None:
            return
        log = open_log(self._path, self._role)
        try:
            if data:  # a disk that is full is no reason not to begin
                os.write(log, data)
        finally:
            os.close(log)
