"""Keeps what a process can still say while native code ends it: its Python stack, through faulthandler.

gloo, for one, aborts the process that receives more bytes than its own tensor holds.
"""

import contextlib
import faulthandler
import os
import re
from pathlib import Path
from typing import Final

from offbeat_liveness._process.head import CallSite
from offbeat_liveness._process.kernel.proc import HOST
from offbeat_liveness._process.stacks import readable

PREFIX: Final = ".fatal-"
FRAME: Final = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
REASON: Final = re.compile(r"Fatal Python error: (.+)")
MAX_BYTES: Final = 1 << 16
NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW


class CrashFile:
    """Has faulthandler write to a file of this process, unless the program uses faulthandler itself.

    A program that enables faulthandler later takes it over, and loses it when this is closed: Python does not tell
    whose file it writes to.

    Args:
        directory: the dump folder.
    """

    def __init__(self, directory: Path) -> None:
        self._path = path_of(directory, HOST, os.getpid())
        self._file = None
        if not faulthandler.is_enabled():
            with contextlib.suppress(OSError):
                directory.mkdir(parents=True, exist_ok=True)
                self._file = os.fdopen(os.open(self._path, NEW_FILE, 0o600), "w")
                faulthandler.enable(self._file)

    def close(self) -> None:
        """The process ends in order: nothing to keep."""
        if self._file is not None:
            faulthandler.disable()
            self._file.close()
            self._path.unlink(missing_ok=True)
            self._file = None

    def forget(self) -> None:
        """In a forked child: the file is the parent's."""
        if self._file is not None:
            faulthandler.disable()
            self._file.close()
            self._file = None


def path_of(directory: Path, machine: str, pid: int) -> Path:
    """File of one process: hosts that share a folder may have the same pids."""
    return directory / f"{PREFIX}{plain_name(machine)}-{pid}.txt"


def plain_name(text: str) -> str:
    """A text as part of a file's name: letters, digits, "_", "." and "-"."""
    return re.sub(r"[^\w.-]+", "-", text)


def read_crash(directory: Path | None, machine: str, pid: int) -> tuple[str, tuple[CallSite, ...]]:
    """What a dead process left: the reason, and its stack, innermost first; empty if nothing."""
    if directory is None:
        return "", ()
    try:
        text = path_of(directory, machine, pid).read_bytes()[:MAX_BYTES].decode(errors="replace")
    except OSError:
        return "", ()
    reason = REASON.search(text)
    main_thread = text.rpartition("hread 0x")[2]  # told last; the one that crashed may be a thread without Python
    sites = [
        CallSite(file=each["file"], line=int(each["line"]), function=each["function"])
        for each in FRAME.finditer(main_thread)
    ]
    return (reason[1] if reason else ""), readable(sites) if sites else ()
