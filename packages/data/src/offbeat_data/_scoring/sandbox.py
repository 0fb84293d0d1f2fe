"""Runs a program that nobody trusts: in namespaces of its own by bubblewrap, with limits on all that it could use up.

What isolates is Linux: a user, process, network, IPC and mount namespace, no way to gain rights (no_new_privs), and
resource limits. Bubblewrap sets them up. When the first process of a process namespace ends, the kernel ends all others
in it, so nothing is left running whatever it has started and however it has detached itself.

Source: bubblewrap(1); namespaces(7), pid_namespaces(7), user_namespaces(7), setrlimit(2).
"""

import contextlib
import json
import os
import secrets
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Final, Protocol

from offbeat_types import BackendError

_INSIDE: Final = Path(__file__).with_name("_inside.py")
_SYSTEM: Final = ("/usr", "/bin", "/lib", "/lib32", "/lib64")
"""What a Python needs of the machine, besides its own folder."""
_ENDING_S: Final = 10.0
"""For the kernel to end the processes of a namespace whose first one was killed."""
_PROBE_S: Final = 30.0
_FIRST_UID: Final = 0x70000000
_READ_BYTES: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ProgramLimits:
    """What one run of a program may use.

    Args:
        timeout_s: wall clock, and CPU time of each process.
        memory_bytes: address space of each process.
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
    """How a run ended.

    Args:
        ended: `exited`, `timed_out`, or `printed_too_much`.
        code: exit status; negative: the signal that ended it. 0 says nothing where it has not `exited`.
        stdout, stderr: what it has printed, as UTF-8 with replacements.
    """

    ended: str
    code: int
    stdout: str
    stderr: str


class Sandbox(Protocol):
    """Runs Python programs. A class of your own, by `module:Class`, is made with the limits and has this method."""

    def run(self, source: str, stdin: str) -> ProgramRun:
        """Run a program to its end, or to one of its limits; whatever it does, this returns in time."""
        ...


class BubblewrapSandbox:
    """Programs in namespaces of their own.

    Args:
        limits: of each run.
        is_tried: it is known to isolate; else that is tried first.

    Raises:
        BackendError: bubblewrap is not installed, or what it promises does not hold on this machine: tried once.
    """

    note: Final = "in namespaces of its own, by bubblewrap"

    def __init__(self, limits: ProgramLimits, *, is_tried: bool = False) -> None:
        self._limits, self._program = limits, shutil.which("bwrap")
        if self._program is None:
            raise BackendError(
                "it needs bubblewrap (bwrap), which is not installed: Debian: apt-get install bubblewrap"
            )
        if not is_tried:
            self._try_out()

    def run(self, source: str, stdin: str) -> ProgramRun:
        """Run a program; see `Sandbox`."""
        with _as_file(source) as program, _as_file(_INSIDE.read_text()) as inside, _as_file(stdin) as given:
            files = ["--perms", "0444", "--ro-bind-data", str(program.fileno()), "/sandbox/main.py"]
            files += ["--perms", "0444", "--ro-bind-data", str(inside.fileno()), "/sandbox/inside.py"]
            uid = _FIRST_UID + secrets.randbelow(1 << 24) if self._has_root else 0
            python = [_python(), "-I", "-S", "-B", "-X", "utf8", "/sandbox/inside.py", "/sandbox/main.py"]
            command = [*self._isolation, *files, "--remount-ro", "/", "--", *python, _limits_json(self._limits, uid)]
            return _watch(command, given, self._limits, pass_fds=(program.fileno(), inside.fileno()))

    @cached_property
    def _has_root(self) -> bool:
        """Whether this process may make namespaces without a user's: then programs get a user of their own inside.

        Limits on the number of processes do not hold for root, nor for a user that stands for it.
        """
        return os.geteuid() == 0 and _has_rights()

    @cached_property
    def _isolation(self) -> list[str]:
        """All of the command line that is the same for each run."""
        limits = self._limits
        assert self._program is not None
        spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        if self._has_root:
            rights = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            rights = ["--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534"]
        own = ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv", "--setenv", "HOME", "/tmp"]
        view = [*_system_view(), *(word for folder in limits.packages for word in _readable(os.path.realpath(folder)))]
        places = ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        places += ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp"]
        return [self._program, *spaces, *rights, *own, *view, *places]

    def _try_out(self) -> None:
        """Try what is promised: a program that tells how far it gets."""
        small = ProgramLimits(timeout_s=_PROBE_S, processes=2, packages=self._limits.packages)
        run = BubblewrapSandbox(small, is_tried=True).run(_PROBE, "")
        if run.ended != "exited" or run.stdout != "isolated\n":
            told = (run.stdout + run.stderr).strip()[-400:] or f"it ended with {run.code}"
            raise BackendError(f"bubblewrap is there, and on this machine it does not isolate: {told}")


class ProcessSandbox:
    """Programs as plain processes with limits: they read and write whatever this user may, network included."""

    note: Final = "with limits and WITHOUT ISOLATION (reward.code.unsafe_no_isolation)"

    def __init__(self, limits: ProgramLimits) -> None:
        self._limits = limits

    def run(self, source: str, stdin: str) -> ProgramRun:
        """Run a program; see `Sandbox`. A child that starts a session of its own is left running."""
        with tempfile.TemporaryDirectory(prefix="offbeat-code-") as folder, _as_file(stdin) as given:
            program = Path(folder, "main.py")
            program.write_text(source, errors="surrogateescape")
            python = [_python(), "-I", "-S", "-B", "-X", "utf8", str(_INSIDE), str(program)]
            return _watch([*python, _limits_json(self._limits, 0)], given, self._limits, folder=folder)


def _limits_json(limits: ProgramLimits, uid: int) -> str:
    told = {
        "cpu_s": max(1, round(limits.timeout_s + 0.5)),
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.disk_bytes,
        "open_files": 64,
        "processes": limits.processes,
        "uid": uid,
        "packages": list(limits.packages),
    }
    return json.dumps(told)


def _python() -> str:
    """The interpreter that this one's environment was made from."""
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


def _system_view() -> list[str]:
    """Programs and libraries of the machine, and Python's own folder; nothing else of its files."""
    words: list[str] = []
    for folder in _SYSTEM:
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            words += ["--ro-bind", folder, folder]
    if os.path.isfile("/etc/ld.so.cache"):
        words += ["--ro-bind", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    own = os.path.realpath(sys.base_prefix)
    return words if own.startswith("/usr/") else [*words, *_readable(own)]


def _readable(folder: str) -> list[str]:
    """A folder where it is, to be read by whatever user a program has: bubblewrap would lock the folders above it."""
    above = [str(each) for each in reversed(Path(folder).parents)][1:]
    return [*(word for each in above for word in ("--perms", "0755", "--dir", each)), "--ro-bind", folder, folder]


def _has_rights() -> bool:
    """Whether this process holds what root holds on a machine of its own (CAP_SYS_ADMIN, SETUID and SETGID)."""
    with open("/proc/self/status") as file:
        held = next((int(line.split()[1], 16) for line in file if line.startswith("CapEff:")), 0)
    return all(held >> number & 1 for number in (6, 7, 21))


@contextlib.contextmanager
def _as_file(text: str) -> Iterator[IO[bytes]]:
    """The text as a file without a name, open at its beginning."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode(errors="surrogateescape"))
        file.seek(0)
        yield file


def _watch(
    command: Sequence[str],
    stdin: IO[bytes],
    limits: ProgramLimits,
    *,
    folder: str | None = None,
    pass_fds: tuple[int, ...] = (),
) -> ProgramRun:
    """Start a program in a session and with an environment of its own, and read what it prints to its end or limit."""
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    process = subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=folder,
        pass_fds=pass_fds,
        start_new_session=True,
    )
    try:
        ended, printed = _read(process, limits)
    finally:
        _end(process)
    stdout, stderr = (bytes(each).decode(errors="replace") for each in printed)
    return ProgramRun(ended=ended, code=process.returncode, stdout=stdout, stderr=stderr)


def _read(process: subprocess.Popen[bytes], limits: ProgramLimits) -> tuple[str, list[bytearray]]:
    """How it ended, and what it has printed to stdout and stderr."""
    assert process.stdout is not None
    assert process.stderr is not None
    printed, end_s = [bytearray(), bytearray()], time.monotonic() + limits.timeout_s
    with selectors.DefaultSelector() as selector:
        for number, pipe in enumerate((process.stdout, process.stderr)):
            selector.register(pipe, selectors.EVENT_READ, number)
        while selector.get_map():
            ready = selector.select(max(0.0, end_s - time.monotonic()))
            if not ready and time.monotonic() >= end_s:
                return "timed_out", printed
            for key, _ in ready:
                read = os.read(key.fd, _READ_BYTES)
                printed[key.data] += read
                if not read:
                    selector.unregister(key.fileobj)
            if sum(map(len, printed)) > limits.output_bytes:
                return "printed_too_much", [each[: limits.output_bytes] for each in printed]
    try:  # it may close what it prints to and go on
        process.wait(max(0.0, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return "timed_out", printed
    return "exited", printed


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its group; with bubblewrap this ends the namespace, and so all that was started in it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, 9)
    process.wait(_ENDING_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


_PROBE: Final = """
import os, socket, time
def check(holds, what):
    if not holds:
        raise SystemExit(what)
check(os.getpid() < 10, "it sees processes of others")
check(os.getuid() != 0, "it is root")
with socket.socket() as one:
    one.settimeout(1)
    try:
        one.connect(("192.0.2.1", 9))
        check(False, "it reaches a network")
    except OSError as error:
        check(error.errno == 101, f"a network answers: {error}")
for path in ("/written", "/usr/written", "/dev/written"):
    try:
        open(path, "w")
        check(False, "it writes to " + path)
    except OSError:
        pass
children = []
try:
    while len(children) < 8:
        child = os.fork()
        if not child:
            time.sleep(60)
        children.append(child)
except OSError:
    pass
for child in children:
    os.kill(child, 9)
check(len(children) < 8, "the number of processes has no limit (RLIMIT_NPROC)")
print("isolated")
"""
