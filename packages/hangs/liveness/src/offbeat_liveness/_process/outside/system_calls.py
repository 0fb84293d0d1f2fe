"""Waits of a thread as the kernel sees them, for calls of C without a frame of Python, and on which descriptor.

Nothing here touches a file system or a connection that may hang: only /proc is read, and the status of a path on a disk
of this machine.

Source: proc_pid_syscall(5): number of the call and its six arguments in hexadecimal, or "running".
"""

import contextlib
import os
import re
import socket
import struct
import time
from dataclasses import dataclass
from types import FrameType
from typing import Final, Literal

from offbeat_liveness._process.outside.file_locks import file_lock_wait, holder_of_wait, is_named_pipe
from offbeat_liveness._process.outside.kernel_calls import CALLS, link_of, read_proc, syscall_words
from offbeat_liveness._process.outside.locks import lock_wait
from offbeat_liveness._process.outside.mounts import file_system, mounts
from offbeat_liveness._process.outside.other_processes import command_of, process_text, state_of
from offbeat_liveness._process.proc import LISTENS, tcp_sockets
from offbeat_liveness._process.snapshot import OutsideKind, OutsideWait

MAX_CHILDREN: Final = 16
MAX_DESCRIPTORS: Final = 64
TERMINALS: Final = ("/dev/pts/", "/dev/tty", "/dev/console")
ON_PATHS: Final = {
    "read": "a read of", "write": "a write to", "sync": "a sync of", "lock": "", "fcntl": "",
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


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """The file or socket behind a number of an open file.

    Args:
        kind: of what.
        name: the path, or what the kernel calls it: "pipe:[123]", "socket:[123]".
        file_system: such as "nfs4"; of paths.
        peer: "host:port" of the other side of a socket.
        own: "host:port" of this side.
        listens: a socket that accepts connections.
        holder: pid of the one child that has the same pipe, 0 if that is not one.
    """

    kind: Literal["path", "pipe", "socket", "terminal", "other"]
    name: str
    file_system: str = ""
    peer: str = ""
    own: str = ""
    listens: bool = False
    holder: int = 0

    def __str__(self) -> str:
        if self.kind == "socket":
            if self.listens:
                return f"connections to {self.own}"
            return f"a socket to {self.peer}" if self.peer else "a socket of this host"
        if self.kind == "pipe":
            return f"a pipe that pid {self.holder} has too ({process_text(self.holder)})" if self.holder else "a pipe"
        if self.kind == "terminal":
            return f"the terminal {self.name}"
        return f"{self.name} ({self.file_system})" if self.file_system else self.name


def descriptor_of(number: int) -> Descriptor | None:
    """Return what a descriptor of this process is; None where it is closed or the platform does not report it."""
    name = link_of(f"/proc/self/fd/{number}")
    if name.startswith("socket:["):
        return _socket_descriptor(name)
    if name.startswith("pipe:["):
        return Descriptor(kind="pipe", name=name, holder=_holder(name))
    if name.startswith(TERMINALS):
        return Descriptor(kind="terminal", name=name)
    if name.startswith("/"):
        return Descriptor(kind="path", name=name, file_system=_file_system_of_descriptor(number))
    return Descriptor(kind="other", name=name) if name else None


def epoll_members(number: int) -> list[int]:
    """Return the first descriptors that an epoll descriptor watches.

    Source: proc_pid_fdinfo(5): one line "tfd: 7 events: ..." for each.
    """
    found = re.findall(r"^tfd:\s*(\d+)", read_proc(f"/proc/self/fdinfo/{number}"), re.MULTILINE)
    return [int(each) for each in found[:16]]


def _file_system_of_descriptor(number: int) -> str:
    """Source: proc_pid_fdinfo(5): mnt_id is the mount's number in /proc/self/mountinfo."""
    match = re.search(r"^mnt_id:\s*(\d+)", read_proc(f"/proc/self/fdinfo/{number}"), re.MULTILINE)
    return next((kind for mount, _, kind in mounts() if match and mount == match[1]), "")


def _socket_descriptor(name: str) -> Descriptor:
    """Read from the kernel's table, since to ask the socket itself takes an object that may set its mode."""
    inode = name[len("socket:[") : -1]
    found = next((each for each in tcp_sockets() if each.inode == inode), None)
    if found is None:
        return Descriptor(kind="socket", name=name)
    own, listens = _address(found.own), found.state == LISTENS
    return Descriptor(kind="socket", name=name, own=own, peer="" if listens else _address(found.peer), listens=listens)


def _address(field: str) -> str:
    """Parse such as "0100007F:1F40", which is 127.0.0.1:8000: words of 32 bits in the order of the machine."""
    words, _, port = field.partition(":")
    data = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    family = socket.AF_INET if len(data) == 4 else socket.AF_INET6
    return join_host_port(socket.inet_ntop(family, data), int(port, 16))


def join_host_port(host: str, port: int) -> str:
    """Host and port as one text; an IPv6 address in brackets, unless it only wraps an IPv4 one."""
    host = host.removeprefix("::ffff:")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _holder(name: str) -> int:
    held = [pid for pid in _children()[:MAX_CHILDREN] if _holds(pid, name)]
    return held[0] if len(held) == 1 else 0


def _children() -> list[int]:
    """Return those that the main thread has made; one file for each thread would be many."""
    return [int(each) for each in read_proc(f"/proc/self/task/{os.getpid()}/children").split()]


def _holds(pid: int, name: str) -> bool:
    with contextlib.suppress(OSError):
        numbers = os.listdir(f"/proc/{pid}/fd")[:MAX_DESCRIPTORS]
        return any(link_of(f"/proc/{pid}/fd/{number}") == name for number in numbers)
    return False


def kernel_wait(frame: FrameType, native_id: int) -> OutsideWait | None:
    """Return what a thread waits for in the kernel; None where it runs, or where the platform does not report it.

    Its innermost frame has the name of a lock.
    """
    words = syscall_words(f"self/task/{native_id}")
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
    if call == "signal":
        return OutsideWait(kind="signal", text="a signal")
    return lock_wait(frame) if call == "futex" and words[2] & FUTEX_COMMAND in FUTEX_WAITS else None


def _on_descriptor(call: str, words: list[int]) -> OutsideWait | None:
    number = words[1] & 0xFFFFFFFF
    if call == "fcntl" and words[2] not in LOCK_CALLS:
        return None
    found = descriptor_of(number)
    if found is None or found.kind == "other":
        return None
    if call in ("lock", "fcntl") and found.kind == "path":
        return file_lock_wait(found.name, found.file_system, holder_of_wait(call))
    return wait_on_descriptor(found, number, ON_PATHS[call] if found.kind == "path" else ON_STREAMS.get(call, ""))


def wait_on_descriptor(found: Descriptor, number: int, doing: str = "") -> OutsideWait:
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
    if is_named_pipe(name):
        return OutsideWait(kind="process", text=f"a process that opens the other end of the pipe {name}", on=name)
    kind = file_system(name)
    return OutsideWait(kind="file", text=f"{name}, to open or look at it{kind and f' ({kind})'}", on=name)


def _on_sockets(call: str, words: list[int]) -> OutsideWait | None:
    """Return the first of the descriptors that a call waits for, if it says more than that it is one."""
    numbers = _waited(call, words)
    for number in numbers:
        found = descriptor_of(number)
        if found is not None and found.kind != "other":
            return wait_on_descriptor(found, number, ON_STREAMS.get(call, ""))
    if call == "select" and not numbers and words[1] == 0:
        return OutsideWait(kind="sleep", text="the end of a sleep (select)")
    return None


def _waited(call: str, words: list[int]) -> list[int]:
    """Source: poll(2): struct pollfd is int fd, short events, short revents. select(2): sets of 1024 bits."""
    if call in ("connect", "accept"):
        return [words[1]]
    if call == "epoll":
        return epoll_members(words[1])
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


def _memory(pointer: int, size: int) -> bytes:
    """Bytes of this process; b"" where there are none, which reading them by the pointer would not survive."""
    with contextlib.suppress(OSError, OverflowError), open("/proc/self/mem", "rb", buffering=0) as memory:
        return os.pread(memory.fileno(), size, pointer) if pointer and size > 0 else b""
    return b""
