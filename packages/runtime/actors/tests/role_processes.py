"""Finds the processes that a test has started, whatever their parent."""

import os
from pathlib import Path

MARK = "OFFBEAT_TEST_FOLDER"
"""Environment variable that every role of a test carries, and whatever it starts."""


def role_processes(folder: Path) -> set[int]:
    """Ids of the living processes whose MARK is this folder."""
    wanted = f"{MARK}={folder}".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
        except OSError:  # gone meanwhile, or another user's
            continue
    return found - {os.getpid()}


def parent_of(pid: int) -> int:
    """Process id of the parent. Source: proc_pid_stat(5), field 4."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
