"""Ports at which this process accepts connections, so that whoever waits for an answer from one is led here.

Source: proc(5), /proc/pid/net/tcp: state 0A is LISTEN, the local address is hex, field 10 is the inode; /proc/pid/fd.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

LISTEN: Final = "0A"
TABLES: Final = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
MAX_PORTS: Final = 64


def listening_ports() -> tuple[int, ...]:
    """In order; none where the platform does not tell."""
    own = set(_own_sockets())
    return tuple(sorted({port for inode, port in _listeners() if inode in own}))[:MAX_PORTS]


def _own_sockets() -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:["):
                    yield target.removeprefix("socket:[").rstrip("]")


def _listeners() -> Iterator[tuple[str, int]]:
    for table in TABLES:
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN:
                    yield fields[9], int(fields[1].rpartition(":")[2], 16)
