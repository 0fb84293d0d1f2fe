"""What a file descriptor of this process is: a path and its file system, a pipe, a socket and its other side.

Nothing here touches a file system or a connection that may stand still: only /proc is read.
"""

import os
import re
import socket
from dataclasses import dataclass
from typing import Final, Literal

from offbeat_liveness._process.kernel.sockets import LISTENS, MAX_TABLE_BYTES, tcp_sockets

MAX_CHILDREN: Final = 16
MAX_DESCRIPTORS: Final = 64
TERMINALS: Final = ("/dev/pts/", "/dev/tty", "/dev/console")


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """What one number of an open file stands for.

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
            return f"a pipe that pid {self.holder} has too" if self.holder else "a pipe"
        if self.kind == "terminal":
            return f"the terminal {self.name}"
        return f"{self.name} ({self.file_system})" if self.file_system else self.name


def describe(number: int) -> Descriptor | None:
    """What a descriptor of this process is; None where it is closed or the platform does not tell."""
    try:
        name = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return None
    if name.startswith("socket:["):
        return _socket(name)
    if name.startswith("pipe:["):
        return Descriptor(kind="pipe", name=name, holder=_holder(name))
    if name.startswith(TERMINALS):
        return Descriptor(kind="terminal", name=name)
    if name.startswith("/"):
        return Descriptor(kind="path", name=name, file_system=_file_system_of_descriptor(number))
    return Descriptor(kind="other", name=name)


def watched(number: int) -> list[int]:
    """The first descriptors that an epoll descriptor watches.

    Source: proc_pid_fdinfo(5): one line "tfd: 7 events: ..." for each.
    """
    found = re.findall(r"^tfd:\s*(\d+)", _read(f"/proc/self/fdinfo/{number}"), re.MULTILINE)
    return [int(each) for each in found[:16]]


def file_system(path: str) -> str:
    """Type of the file system that a path lies on, by the names of the mounts; "" where that is not told."""
    best, kind = -1, ""
    for _, place, found in _mounts():
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= best:  # a later mount on the same place hides the earlier one
            best, kind = len(place), found
    return kind


def _file_system_of_descriptor(number: int) -> str:
    """Source: proc_pid_fdinfo(5): mnt_id is the mount's number in /proc/self/mountinfo."""
    match = re.search(r"^mnt_id:\s*(\d+)", _read(f"/proc/self/fdinfo/{number}"), re.MULTILINE)
    return next((kind for mount, _, kind in _mounts() if match and mount == match[1]), "")


def _mounts() -> list[tuple[str, str, str]]:
    """Number, place and type of each mount.

    Source: proc_pid_mountinfo(5): "36 35 98:0 /root /place rw,noatime [optional fields] - type source options".
    """
    found = []
    for line in _read("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        found.append((fields[0], place, after.split(" ")[0]))
    return found


def _socket(name: str) -> Descriptor:
    """Read from the kernel's table, since to ask the socket itself takes an object that may set its mode."""
    inode = name[len("socket:[") : -1]
    found = next((each for each in tcp_sockets() if each.inode == inode), None)
    if found is None:
        return Descriptor(kind="socket", name=name)
    own, listens = _address(found.own), found.state == LISTENS
    return Descriptor(kind="socket", name=name, own=own, peer="" if listens else _address(found.peer), listens=listens)


def _address(field: str) -> str:
    """For one, "0100007F:1F40" is 127.0.0.1:8000: words of 32 bits in the order of the machine."""
    words, _, port = field.partition(":")
    data = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    family = socket.AF_INET if len(data) == 4 else socket.AF_INET6
    return join(socket.inet_ntop(family, data), int(port, 16))


def join(host: str, port: int) -> str:
    """Host and port as one text; an IPv6 address in brackets, unless it only wraps an IPv4 one."""
    host = host.removeprefix("::ffff:")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _holder(name: str) -> int:
    """The child at the other end of a pipe, if just one has it."""
    held = [pid for pid in _children()[:MAX_CHILDREN] if _holds(pid, name)]
    return held[0] if len(held) == 1 else 0


def _children() -> list[int]:
    """Those that the main thread has made; one file for each thread would be many."""
    return [int(each) for each in _read(f"/proc/self/task/{os.getpid()}/children").split()]


def _holds(pid: int, name: str) -> bool:
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")[:MAX_DESCRIPTORS]
    except OSError:
        return False
    return any(_link(f"/proc/{pid}/fd/{number}") == name for number in numbers)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_TABLE_BYTES).decode(errors="replace")
    except OSError:
        return ""
