"""The streams of an agent's program: the end of each output is kept, and the key of its reward is read once."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Final

_KEPT_BYTES: Final = 64 * 1024
"""Longest end of each output: an answer and an error are short, and a program may print for hours."""
_GRACE_S: Final = 0.5
"""For output on its way when the program has ended. What it has left behind may hold the pipe for ever."""


REWARD_KEY_FD: Final = "OFFBEAT_REWARD_KEY_FD"
"""Variable with the number of the file descriptor from which a program reads the key that posts its reward."""


@dataclass(frozen=True)
class Streams:
    """File descriptors of a program; `key` is None where it may post no reward."""

    stdin: int
    stdout: int
    stderr: int
    key: int | None

    @property
    def keys(self) -> tuple[int, ...]:
        return () if self.key is None else (self.key,)


def key_variables(fd: int | None) -> dict[str, str]:
    """Return the environment variable from which the program learns where its key is."""
    return {} if fd is None else {REWARD_KEY_FD: str(fd)}


class OutputEnd(asyncio.Protocol):
    """The end of what is written to a pipe.

    Attributes:
        fd: where to write.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._kept = bytearray()
        self._over = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        """Keep what has come, as much as may be kept."""
        self._kept += data
        del self._kept[:-_KEPT_BYTES]

    def connection_lost(self, _: Exception | None) -> None:
        """Note that no more will come."""
        self._over.set()

    async def text(self) -> str:
        """Return what was written last, when the writer has ended."""
        self.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self._over.wait()
        return self._kept.decode(errors="replace")

    def close(self) -> None:
        """Close the end to write to, as this process holds it."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


@contextlib.asynccontextmanager
async def keep_end() -> AsyncIterator[OutputEnd]:
    """Read a pipe while the block lasts, whose end is kept: nothing that grows, in memory or on disk."""
    ours, theirs = os.pipe()
    end = OutputEnd(theirs)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: end, os.fdopen(ours, "rb", buffering=0))
    try:
        yield end
    finally:
        end.close()
        transport.close()


@contextlib.contextmanager
def key_pipe(key: str) -> Iterator[int | None]:
    """Give the end of a pipe from which a key can be read once; None without a key.

    A variable of the environment would be inherited by whatever the program starts, and a file could be read by it.
    """
    if not key:
        yield None
        return
    theirs, ours = os.pipe()
    os.write(ours, key.encode())  # shorter than what a pipe holds
    os.close(ours)
    try:
        yield theirs
    finally:
        os.close(theirs)
