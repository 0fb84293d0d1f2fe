"""Starts an untrusted program, reads what it prints, and ends it at its limits.

What the kernel bounds for each process alone is looked at for all of them together, every 50 ms: memory and the number
of files. A sandbox hands out its own /proc and /tmp for that, before it runs anything (`inside.py`).
"""

import contextlib
import fcntl
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final

_ENDING_S: Final = 10.0
"""Limit for the kernel to end the processes of a namespace whose first one was killed."""
_POLL_S: Final = 0.05
"""Between two looks at the memory of all processes: what they can fill in it is what they can be over their limit."""
_MAX_FILES: Final = 1 << 14
"""Limit of files in /tmp: each costs about 1 KiB of the kernel's memory, which `disk_bytes` does not count."""
_SOCKET_BYTES: Final = 416 << 10
"""Bytes that the kernel may hold for a socket: twice net.core.wmem_max, as Linux has it."""
_TCP_BYTES: Final = 10 << 20
"""The same for one of TCP, whose buffers grow: the most of net.ipv4.tcp_rmem and tcp_wmem, as Linux has them."""
_READ_BYTES: Final = 1 << 16
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class ProgramLimits:
    """Bounds of one run of a program.

    Args:
        timeout_s: wall clock, and CPU time of each process.
        memory_bytes: of all its processes together, and address space of each.
        disk_bytes: of all files in its /tmp, which lies in memory.
        output_bytes: of what it may print; more ends it.
        processes: at once, threads included.
        packages: folders that it may import from besides the standard library.
    """

    timeout_s: float = 5.0
    memory_bytes: int = 1 << 29
    disk_bytes: int = 1 << 26
    output_bytes: int = 1 << 20
    processes: int = 16
    packages: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class ProgramRun:
    """End of a run.

    Args:
        ended: `exited`, `timed_out`, `printed_too_much`, or `used_too_much` (memory, or files).
        code: exit status; negative: the signal that ended it. 0 says nothing where it has not `exited`.
        stdout, stderr: what it has printed, as UTF-8 with replacements.
    """

    ended: str
    code: int
    stdout: str
    stderr: str


class Meter:
    """Measures what all processes of a sandbox use together.

    Attributes:
        theirs: what the sandbox sends its /proc and its /tmp to.
        has_begun: it has sent them, and so comes to its program.
    """

    def __init__(self, limits: ProgramLimits) -> None:
        self._limits = limits
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ours.setblocking(False)
        self._proc, self._tmp = -1, -1

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        self.theirs.close()
        for descriptor in (self._proc, self._tmp):
            if descriptor >= 0:
                os.close(descriptor)

    @property
    def has_begun(self) -> bool:
        if self._proc < 0:
            with contextlib.suppress(BlockingIOError, ValueError):
                _, (self._proc, self._tmp), _, _ = socket.recv_fds(self._ours, 1, 2)
        return self._proc >= 0

    def is_exceeded(self) -> bool:
        """Tell whether they use more than they may; no before there is a program."""
        if not self.has_begun:
            return False
        disk = os.fstatvfs(self._tmp)  # also of a sandbox that has ended, as long as this is open
        return disk.f_files - disk.f_ffree > _MAX_FILES or self._memory_bytes() > self._limits.memory_bytes

    def _memory_bytes(self) -> int:
        """Add up resident memory, and what sockets may hold.

        Pages that processes share count once, where it comes to that.
        """
        pids = [name for name in _entries(self._proc) if name.isdigit()]
        sockets = _socket_bytes(self._proc, pids)
        resident = sum(_resident_bytes(self._proc, pid) for pid in pids)
        if resident + sockets <= self._limits.memory_bytes:
            return resident + sockets
        return sockets + sum(_proportional_bytes(self._proc, pid) for pid in pids)


def _entries(folder: int) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # all processes have ended
        return []


def _read_in(folder: int, path: str) -> str:
    """Read a file of a process; empty where it has ended, or may not be looked at."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)) as file:
            return file.read()
    except OSError:
        return ""


def _resident_bytes(proc: int, pid: str) -> int:
    words = _read_in(proc, f"{pid}/statm").split()
    return int(words[1]) * _PAGE_BYTES if words else 0


def _proportional_bytes(proc: int, pid: str) -> int:
    lines = [line.split() for line in _read_in(proc, f"{pid}/smaps_rollup").splitlines() if line.startswith("Pss:")]
    return int(lines[0][1]) << 10 if lines else _resident_bytes(proc, pid)


def _socket_bytes(proc: int, pids: Sequence[str]) -> int:
    """Return what the kernel may hold for all sockets of a network namespace, in which all these processes are.

    What it does hold is not to be seen: a queue of single bytes takes some hundred times their number.
    """
    found = (_read_in(proc, f"{pid}/net/sockstat") + _read_in(proc, f"{pid}/net/sockstat6") for pid in pids)
    text = next(filter(None, found), "")
    counts = {words[0]: int(words[2]) for words in map(str.split, text.splitlines()) if len(words) > 2}
    num_tcp = counts.get("TCP:", 0) + counts.get("TCP6:", 0)
    return counts.get("sockets:", 0) * _SOCKET_BYTES + num_tcp * _TCP_BYTES


@contextlib.contextmanager
def as_file(text: str | bytes) -> Iterator[IO[bytes]]:
    """Hold a text as a file in memory, open at its beginning. No process can write to it."""
    with open(os.memfd_create("text", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b") as file:
        file.write(text if isinstance(text, bytes) else text.encode(errors="surrogateescape"))
        file.seek(0)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        yield file


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program in a session and with an environment of its own; it is ended in the end.

    With bubblewrap this ends the namespace, and so all that was started in it.
    """
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, 9)
        process.wait(_ENDING_S)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def watch(
    command: Sequence[str], stdin: IO[bytes], limits: ProgramLimits, meters: Sequence[Meter] = (), **options: Any
) -> ProgramRun:
    """Run a program and read what it prints, to its end or to a limit, be it one that another meter has found."""
    with started(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        ended, printed = _read(process, limits, meters)
    stdout, stderr = (bytes(each).decode(errors="replace") for each in printed)
    return ProgramRun(ended=ended, code=process.returncode, stdout=stdout, stderr=stderr)


def _read(
    process: subprocess.Popen[bytes], limits: ProgramLimits, meters: Sequence[Meter]
) -> tuple[str, list[bytearray]]:
    """Read to the end of a program: how it ended, and what it has printed to stdout and stderr."""
    assert process.stdout is not None
    assert process.stderr is not None
    printed, end_s = [bytearray(), bytearray()], time.monotonic() + limits.timeout_s
    look_s = time.monotonic() + _POLL_S
    with selectors.DefaultSelector() as selector:
        for number, pipe in enumerate((process.stdout, process.stderr)):
            os.set_blocking(pipe.fileno(), False)  # a program that can open it may have read what was there
            selector.register(pipe, selectors.EVENT_READ, number)
        while selector.get_map() or process.poll() is None:
            now_s = time.monotonic()
            if now_s >= end_s:
                return "timed_out", printed
            if now_s >= look_s:
                look_s = now_s + _POLL_S
                if any(meter.is_exceeded() for meter in meters):
                    return "used_too_much", printed
            for key, _ in _ready(selector, process, min(end_s, look_s) - now_s):
                try:
                    read = os.read(key.fd, _READ_BYTES)
                except BlockingIOError:
                    continue
                printed[key.data] += read
                if not read:
                    selector.unregister(key.fileobj)
            if sum(map(len, printed)) > limits.output_bytes:
                return "printed_too_much", [each[: limits.output_bytes] for each in printed]
    is_over = any(meter.is_exceeded() for meter in meters)  # what it has made since the last look: files stay
    return ("used_too_much" if is_over else "exited"), printed


def _ready(
    selector: selectors.BaseSelector, process: subprocess.Popen[bytes], timeout_s: float
) -> list[tuple[selectors.SelectorKey, int]]:
    """Wait for something to read; of a program that has closed what it prints to, for its end."""
    if selector.get_map():
        return selector.select(timeout_s)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    return []
