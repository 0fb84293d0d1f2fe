"""The log of a role that runs on another machine than the driver."""

import os
import tempfile
from pathlib import Path
from typing import Final

from offbeat_actors._spawn import open_log
from offbeat_actors.ray._messages import LogFile

_REPORT_BYTES: Final = 1 << 20


def describe_log(path: Path) -> LogFile:
    """Touch a log file and describe it, so that a keeper can tell whether it has the same one."""
    os.utime(path)
    found = path.stat()
    return LogFile(str(path.absolute()), found.st_ino, found.st_mtime_ns)


class LogMirror:
    """Where a role writes on its node, and what of that has not been told to the driver.

    Where driver and node share the file, the role writes straight to it and there is nothing to tell. Otherwise it
    writes to a file of the node, which is read from here and is gone with the process.

    Args:
        log: the driver's.
        role: its name.
    """

    def __init__(self, log: LogFile, role: str) -> None:
        self.is_shared = _is_same(log)
        if self.is_shared:
            self.fd = open_log(Path(log.path), role)
        else:
            self.fd, path = tempfile.mkstemp(prefix=f"offbeat-{role}-", suffix=".log")
            self._reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.set_inheritable(self.fd, False)
            os.unlink(path)  # it lives as long as somebody holds it open

    def news(self) -> bytes:
        """What has been written since the last time."""
        return b"" if self.is_shared else os.read(self._reader, _REPORT_BYTES)

    def close(self) -> None:
        """Let go of the files."""
        os.close(self.fd)
        if not self.is_shared:
            os.close(self._reader)


def _is_same(log: LogFile) -> bool:
    try:
        found = os.stat(log.path)
    except OSError:
        return False
    return (found.st_ino, found.st_mtime_ns) == (log.inode, log.modified_ns)
