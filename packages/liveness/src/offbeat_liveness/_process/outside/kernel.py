"""What the kernel says that a thread waits in, for calls of C that have no frame of Python.

Source: proc_pid_syscall(5): number of the call and its six arguments in hexadecimal, or "running".
"""

import dis
import os
import struct
import threading
import time
from types import CodeType, FrameType
from typing import Final

from offbeat_liveness._process.head import OutsideKind, OutsideWait
from offbeat_liveness._process.outside import files, peek
from offbeat_liveness._process.outside.processes import command_of, state_of

# Source: Linux, arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
X86: Final = {
    0: "read", 1: "write", 2: "open", 7: "poll", 17: "read", 18: "write", 19: "read", 20: "write", 23: "select",
    35: "nanosleep", 40: "sendfile", 42: "connect", 43: "accept", 44: "write", 45: "read", 46: "write", 47: "read",
    61: "wait4", 72: "fcntl", 73: "lock", 74: "sync", 75: "sync", 77: "truncate", 202: "futex", 217: "list",
    230: "clock_nanosleep", 232: "epoll", 247: "waitid", 257: "openat", 262: "openat", 263: "openat", 264: "openat",
    270: "select", 271: "poll", 281: "epoll", 285: "allocate", 288: "accept", 295: "read", 296: "write",
    332: "openat", 441: "epoll",
}  # fmt: skip
ARM: Final = {
    22: "epoll", 25: "fcntl", 32: "lock", 35: "openat", 38: "openat", 46: "truncate", 47: "allocate", 56: "openat",
    61: "list", 63: "read", 64: "write", 65: "read", 66: "write", 67: "read", 68: "write", 71: "sendfile",
    72: "select", 73: "poll", 79: "openat", 82: "sync", 83: "sync", 95: "waitid", 98: "futex", 101: "nanosleep",
    115: "clock_nanosleep", 202: "accept", 203: "connect", 206: "write", 207: "read", 211: "write", 212: "read",
    242: "accept", 260: "wait4", 291: "openat", 441: "epoll",
}  # fmt: skip
CALLS: Final = {"x86_64": X86, "aarch64": ARM}.get(os.uname().machine if hasattr(os, "uname") else "", {})
ON_PATHS: Final = {
    "read": "a read of", "write": "a write to", "sync": "a sync of", "lock": "a lock of", "fcntl": "a lock of",
    "truncate": "a change of the size of", "allocate": "space for", "list": "the list of files in",
    "sendfile": "a write to",
}  # fmt: skip
ON_STREAMS: Final = {
    "read": "data from", "write": "room to send to", "connect": "a connection over", "accept": "somebody who makes",
}  # fmt: skip
FUTEX_WAITS: Final = frozenset({0, 9})
FUTEX_COMMAND: Final = 0x7F
TIMER_ABSTIME: Final = 1
LOCK_CALLS: Final = frozenset({6, 7, 14, 37, 38})
"""Commands of fcntl that wait: F_OFD_SETLKW is 38, F_SETLKW 7 (6 and 14 with 32 bits)."""
RLOCK: Final = type(threading.RLock())
MAX_CODE_BYTES: Final = 20_000
METHODS: Final[dict[str, OutsideKind]] = {"acquire": "lock", "__enter__": "lock", "get": "queue"}


def kernel_wait(frame: FrameType, native_id: int) -> OutsideWait | None:
    """What a thread waits for in the kernel; None where it runs, or where the platform does not tell.

    Args:
        frame: its innermost one, for what a lock is called.
        native_id: the kernel's number of the thread.
    """
    words = _words(native_id)
    call = CALLS.get(words[0], "") if len(words) > 6 else ""
    if call in ON_PATHS:
        return _on_descriptor(call, words)
    if call in ("open", "openat"):
        return _on_path(words[1] if call == "open" else words[2])
    if call in ("poll", "select", "epoll", "connect", "accept"):
        return _on_sockets(call, words)
    if call in ("wait4", "waitid"):
        return _on_child(words[1] if call == "wait4" else words[2])
    if call in ("nanosleep", "clock_nanosleep"):
        return _sleep(call, words)
    return _on_lock(frame) if call == "futex" and words[2] & FUTEX_COMMAND in FUTEX_WAITS else None


def _words(native_id: int) -> list[int]:
    try:
        with open(f"/proc/self/task/{native_id}/syscall", "rb") as file:
            words = file.read(512).split()
    except OSError:
        return []
    return [] if len(words) < 7 else [int(words[0]), *(int(word, 16) for word in words[1:])]


def _on_descriptor(call: str, words: list[int]) -> OutsideWait | None:
    number = words[1] & 0xFFFFFFFF
    if call == "fcntl" and words[2] not in LOCK_CALLS:
        return None
    found = files.describe(number)
    if found is None or found.kind == "other":
        return None
    return told(found, number, ON_PATHS[call] if found.kind == "path" else ON_STREAMS.get(call, ""))


def told(found: files.Descriptor, number: int, doing: str = "") -> OutsideWait:
    """A wait for what a descriptor stands for."""
    kind: OutsideKind
    if found.kind == "terminal" or (number == 0 and found.kind == "pipe"):
        return OutsideWait(kind="terminal", text=f"its standard input, {found}" if number == 0 else str(found))
    kind = "process" if found.holder else "socket" if found.kind == "socket" else "file"
    return OutsideWait(
        kind=kind,
        text=f"{doing} {found}".lstrip(),
        address=found.peer or found.own,
        pid=found.holder,
        on=found.name if found.kind == "path" else "",
    )


def _on_path(pointer: int) -> OutsideWait | None:
    name = _memory(pointer, 4096).partition(b"\0")[0].decode(errors="replace")
    if not name:
        return None
    kind = files.file_system(name)
    return OutsideWait(kind="file", text=f"{name}, to open or look at it{kind and f' ({kind})'}", on=name)


def _on_sockets(call: str, words: list[int]) -> OutsideWait | None:
    """The first of the descriptors that a call waits for, if it says more than that it is one."""
    numbers = _waited(call, words)
    for number in numbers:
        found = files.describe(number)
        if found is not None and found.kind != "other":
            return told(found, number, ON_STREAMS.get(call, ""))
    if call == "select" and not numbers and words[1] == 0:
        return OutsideWait(kind="sleep", text="the end of a sleep (select)")
    return None


def _waited(call: str, words: list[int]) -> list[int]:
    """Source: poll(2): struct pollfd is int fd, short events, short revents. select(2): sets of 1024 bits."""
    if call in ("connect", "accept"):
        return [words[1]]
    if call == "epoll":
        return files.watched(words[1])
    if call == "poll":
        data = _memory(words[1], 8 * min(words[2], 16))
        return [number for number, _, _ in struct.iter_unpack("=ihh", data[: len(data) // 8 * 8]) if number >= 0]
    if call == "select":
        sets = [_memory(pointer, 128) for pointer in words[2:4] if pointer]
        bits = {8 * at + bit for each in sets for at, byte in enumerate(each) for bit in range(8) if byte >> bit & 1}
        return sorted(bits)[:16]
    return []


def _on_child(word: int) -> OutsideWait:
    pid = struct.unpack("=i", struct.pack("=I", word & 0xFFFFFFFF))[0]
    if pid <= 0:
        return OutsideWait(kind="subprocess", text="the end of any child process")
    return OutsideWait(kind="subprocess", text=f"{command_of(pid)} (pid {pid}, {state_of(pid)})", pid=pid)


def _sleep(call: str, words: list[int]) -> OutsideWait:
    """Source: clock_nanosleep(2): with TIMER_ABSTIME the time is one of the clock, else a duration."""
    at = 3 if call == "clock_nanosleep" else 1
    data = _memory(words[at], 16)
    left_s = None
    if len(data) == 16:
        whole_s, rest_ns = struct.unpack("=qq", data)
        left_s = whole_s + rest_ns / 1e9
        if call == "clock_nanosleep" and words[2] & TIMER_ABSTIME:
            left_s -= time.clock_gettime(words[1])
    return OutsideWait(
        kind="sleep",
        text="the end of a sleep" if left_s is None else f"the end of a sleep, {max(0.0, left_s):.0f} s more",
        timeout_s=left_s,
    )


def _on_lock(frame: FrameType) -> OutsideWait | None:
    """A lock, only where the instruction that runs takes one: a futex is also how threads wait for the GIL."""
    name, method = _callee(frame.f_code, frame.f_lasti)
    kind = METHODS.get(method)
    if kind is None:
        return None
    if kind == "queue":
        return OutsideWait(kind=kind, text=f"{name or 'queue'}.get: the queue is empty", on=name)
    if not name:
        return OutsideWait(kind=kind, text="a lock")
    return OutsideWait(kind=kind, text=f"the lock {name}{_owner(frame, name)}", on=name)


def _callee(code: CodeType, at: int) -> tuple[str, str]:
    """Which name's method runs: ("self.lock", "acquire"); of a `with`, "__enter__"."""
    if len(code.co_code) > MAX_CODE_BYTES:
        return "", ""
    before = [each for each in dis.get_instructions(code) if each.offset <= at]
    if not before or before[-1].opname not in ("BEFORE_WITH", "CALL", "CALL_FUNCTION_EX", "CALL_KW"):
        return "", ""
    method = "__enter__" if before[-1].opname == "BEFORE_WITH" else ""
    names: list[str] = []
    for each in reversed(before[:-1]):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if not method:
                method = str(each.argval)
            else:
                names.append(str(each.argval))
        elif each.opname.startswith(("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")):
            if method:
                names.append(str(each.argval))
                return ".".join(reversed(names)), method
        elif method and each.opname.startswith(("CALL", "BINARY")):
            break
    return "", method


def _owner(frame: FrameType, name: str) -> str:
    """Who holds an RLock, where that can be asked: a plain Lock does not know."""
    first, *rest = name.split(".")
    lock = frame.f_globals.get(first) if first in frame.f_globals else peek.own_local(frame, first)
    for each in rest:
        lock = peek.attribute(lock, each) if lock is not None else None
    return holder_of(lock)


def holder_of(lock: object) -> str:
    """Text such as ", held by the thread 'writer'"; "" where that is not known."""
    if type(lock) is not RLOCK:
        return ""
    told_owner = RLOCK.__repr__(lock).partition("owner=")[2].partition(" ")[0]
    threads = peek.thread_names()
    return f", held by the thread {threads[int(told_owner)]!r}" if int(told_owner or 0) in threads else ""


def _memory(pointer: int, size: int) -> bytes:
    """Bytes of this process; b"" where there are none, which reading them by the pointer would not survive."""
    if not pointer or size <= 0:
        return b""
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(memory, size, pointer)
    except (OSError, OverflowError):
        return b""
    finally:
        os.close(memory)
