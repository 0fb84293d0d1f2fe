"""Main memory that a role holds: its own process, and those that its engine has started."""

from collections.abc import Iterator
from pathlib import Path


def resident_bytes() -> int:
    """Resident memory of this process and all that descend from it, in bytes; 0 where there is no /proc."""
    return sum(_resident_bytes(process) for process in _family("self"))


def _family(process: str) -> Iterator[str]:
    yield process
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        for child in _read(children).split():
            yield from _family(child)


def _resident_bytes(process: str) -> int:
    lines = (line.split() for line in _read(Path(f"/proc/{process}/status")).splitlines())
    return sum(int(line[1]) * 1024 for line in lines if line and line[0] == "VmRSS:")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended meanwhile
        return ""
