"""Call of the kernel that a thread is in: the names of the calls that may wait, by their numbers.

Source: proc_pid_syscall(5): number of the call and its six arguments in hexadecimal, or "running".
"""

import contextlib
import os
from typing import Final

from offbeat_liveness._process.proc import MAX_TABLE_BYTES

# Source: Linux, arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
X86: Final = {
    0: "read", 1: "write", 2: "open", 7: "poll", 17: "read", 18: "write", 19: "read", 20: "write", 23: "select",
    34: "signal", 35: "nanosleep", 40: "sendfile", 42: "connect", 43: "accept", 44: "write", 45: "read", 46: "write",
    47: "read",
    61: "wait4", 72: "fcntl", 73: "lock", 74: "sync", 75: "sync", 77: "truncate", 128: "signal", 130: "signal",
    202: "futex", 217: "list",
    230: "clock_nanosleep", 232: "epoll", 247: "waitid", 257: "openat", 262: "openat", 263: "openat", 264: "openat",
    270: "select", 271: "poll", 281: "epoll", 285: "allocate", 288: "accept", 295: "read", 296: "write",
    332: "openat", 441: "epoll",
}  # fmt: skip
ARM: Final = {
    22: "epoll", 25: "fcntl", 32: "lock", 35: "openat", 38: "openat", 46: "truncate", 47: "allocate", 56: "openat",
    61: "list", 63: "read", 64: "write", 65: "read", 66: "write", 67: "read", 68: "write", 71: "sendfile",
    72: "select", 73: "poll", 79: "openat", 82: "sync", 83: "sync", 95: "waitid", 98: "futex", 101: "nanosleep",
    115: "clock_nanosleep", 133: "signal", 137: "signal", 202: "accept", 203: "connect", 206: "write",
    207: "read", 211: "write", 212: "read",
    242: "accept", 260: "wait4", 291: "openat", 441: "epoll",
}  # fmt: skip
CALLS: Final = {"x86_64": X86, "aarch64": ARM}.get(os.uname().machine if hasattr(os, "uname") else "", {})


def link_of(path: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


def read_proc(path: str) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(MAX_TABLE_BYTES).decode(errors="replace")
    return ""


def syscall_words(task: str) -> list[int]:
    words = read_proc(f"/proc/{task}/syscall").split()
    return [] if len(words) < 7 else [int(words[0]), *(int(word, 16) for word in words[1:])]
