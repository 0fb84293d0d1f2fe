"""What a process of this machine is doing, as far as the kernel says."""

from pathlib import Path
from typing import Final

_WORDS: Final = {
    "T": "its process is stopped (SIGSTOP, or a debugger): continue it with SIGCONT, or kill it",
    "t": "its process is stopped by a debugger",
    "D": "its process waits for a disk or a device",
    "Z": "its process has ended",
}


def describe_process(pid: int) -> str:
    """Words for a state that explains silence; "" when nothing is odd, or on a system without /proc.

    Source: proc_pid_stat(5), field 3.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return _WORDS.get(stat.rpartition(")")[2].split()[0], "")
