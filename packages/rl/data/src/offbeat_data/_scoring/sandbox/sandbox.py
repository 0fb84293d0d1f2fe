"""Runs an untrusted program: in namespaces of its own by bubblewrap, with limits on all that it could use up.

What isolates is Linux: a user, process, network, IPC and mount namespace, no way to gain rights (no_new_privs), a
filter of system calls (`seccomp.py`), and resource limits. Bubblewrap sets them up. When the first process of a process
namespace ends, the kernel ends all others in it, so nothing is left running whatever it has started and however it has
detached itself.

Source: bubblewrap(1); namespaces(7), pid_namespaces(7), user_namespaces(7), seccomp(2), setrlimit(2).
"""

import contextlib
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol

from offbeat_core import BackendError
from offbeat_data._scoring.sandbox.seccomp import ARCHITECTURES, syscall_filter
from offbeat_data._scoring.sandbox.watching import Meter, ProgramLimits, ProgramRun, as_file, started, watch

SOCKET_VARIABLE: Final = "OFFBEAT_SOCKET"
"""Names, to a program in a sandbox, the descriptor of the socket to the one that runs beside it."""
_INSIDE: Final = Path(__file__).with_name("inside.py")
_PROBE: Final = Path(__file__).with_name("inside_probe.py")
_SYSTEM: Final = ("/usr", "/bin", "/lib", "/lib32", "/lib64")
"""Folders that a Python needs of the machine, besides its own folder."""
_PROBE_S: Final = 60.0
_PROBE_PROCESSES: Final = 4
"""Bubblewrap's own, the probe, its child and a child of that; the probe tries eight at once."""
_PROBE_BYTES: Final = 3 << 25
"""Three processes of `_FILLING_MEMORY` have more, and one has not."""
_TESTS_OUTPUT_BYTES: Final = 1 << 24
"""Limit of the verdict on a program's assertions: about 150 bytes for each, and 4,000 at most."""
_FIRST_UID: Final = 0x70000000
_ADVICE: Final = (
    "Needed is bubblewrap 0.8 or newer (bwrap --version). Run scorers where the kernel grants it this (namespaces, a "
    "filter of system calls, and to root the rights of root): on another machine, or in a container with more rights"
)


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
        with ExitStack() as stack:
            meter = stack.enter_context(Meter(self._limits))
            command, descriptors = stack.enter_context(self._command(source, meter))
            given = stack.enter_context(as_file(stdin))
            return _begun(watch(command, given, self._limits, [meter], pass_fds=descriptors), [meter])

    def run_beside(self, source: str, stdin: str, other: str) -> ProgramRun:
        """Run a program beside another one that it asks over a socket, each in a sandbox of its own.

        Args:
            source: of the program whose run is returned.
            stdin: what it reads.
            other: the source of the other one, which ends with it. What that prints goes nowhere.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs, ExitStack() as stack:
            meters = [stack.enter_context(Meter(self._limits)) for _ in range(2)]
            command, descriptors = stack.enter_context(self._command(other, meters[0], theirs.fileno()))
            null = subprocess.DEVNULL
            stack.enter_context(started(command, stdin=null, stdout=null, stderr=null, pass_fds=descriptors))
            theirs.close()  # else its end would not be seen
            command, descriptors = stack.enter_context(self._command(source, meters[1], ours.fileno()))
            given = stack.enter_context(as_file(stdin))
            limits = replace(self._limits, output_bytes=_TESTS_OUTPUT_BYTES)
            return _begun(watch(command, given, limits, meters, pass_fds=descriptors), meters)

    @contextlib.contextmanager
    def _command(
        self, source: str, meter: Meter, descriptor: int | None = None
    ) -> Iterator[tuple[list[str], tuple[int, ...]]]:
        """Give the command line that runs a program, and the descriptors that it needs."""
        with as_file(source) as program, as_file(_INSIDE.read_bytes()) as inside, as_file(self._filter) as calls:
            words = ["--perms", "0444", "--ro-bind-data", str(program.fileno()), "/sandbox/main.py"]
            words += ["--perms", "0444", "--ro-bind-data", str(inside.fileno()), "/sandbox/inside.py"]
            words += ["--remount-ro", "/", "--seccomp", str(calls.fileno())]
            descriptors = [program.fileno(), inside.fileno(), calls.fileno(), meter.theirs.fileno()]
            if descriptor is not None:
                words += ["--setenv", SOCKET_VARIABLE, str(descriptor)]
                descriptors.append(descriptor)
            uid = _FIRST_UID + secrets.randbelow(1 << 24) if self._has_root else 0
            python = [_python(), "-I", "-S", "-B", "-X", "utf8", "/sandbox/inside.py", "/sandbox/main.py"]
            numbers = _limit_words(self._limits, uid, meter.theirs.fileno())
            yield [*self._isolation, *words, "--", *python, *numbers], tuple(descriptors)

    @cached_property
    def _filter(self) -> bytes:
        return syscall_filter(platform.machine())

    @cached_property
    def _has_root(self) -> bool:
        """Return whether this process may make namespaces of its own; programs then get a user of their own inside.

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
        # /dev/zero would be shared memory that counts for no process (seccomp.py); bound so, no device can be opened.
        places = ["--proc", "/proc", "--dev", "/dev", "--ro-bind", "/dev/null", "/dev/zero", "--remount-ro", "/dev"]
        places += ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp"]
        return [self._program, *spaces, *rights, *own, *view, *places]

    def _try_out(self) -> None:
        """Try what is promised: programs that report how far they get."""
        small = ProgramLimits(timeout_s=_PROBE_S, processes=_PROBE_PROCESSES, packages=self._limits.packages)
        numbers = ARCHITECTURES[platform.machine()].numbers if self._filter else {}
        run = BubblewrapSandbox(small, is_tried=True).run(_PROBE.read_text(), json.dumps(numbers))
        if run.ended != "exited" or run.stdout != "isolated\n":
            output = (run.stdout + run.stderr).strip()[-1000:] or f"it ended with {run.code}"
            raise BackendError(f"bubblewrap is there, and on this machine it does not isolate: {output}. {_ADVICE}")
        together = BubblewrapSandbox(replace(small, processes=8, memory_bytes=_PROBE_BYTES), is_tried=True)
        for program, what in ((_FILLING_MEMORY, "memory of all processes together"), (_FILLING_TMP, "number of files")):
            if (run := together.run(program, "")).ended != "used_too_much":
                output = f"{run.ended} {run.stderr.strip()[-400:]}".strip()
                raise BackendError(
                    f"bubblewrap is there, and on this machine the {what} has no limit: it {output}. {_ADVICE}"
                )


def _begun(run: ProgramRun, meters: Sequence[Meter]) -> ProgramRun:
    """Return the run, if its programs have come to run: one that has not is not a program that fails."""
    if run.ended == "exited" and not all(meter.has_begun for meter in meters):
        output = run.stderr.strip()[-400:] or f"it ended with {run.code}"
        raise BackendError(f"bubblewrap is there, and a sandbox does not start on this machine: {output}. {_ADVICE}")
    return run


class ProcessSandbox:
    """Programs as plain processes with limits: they read and write whatever this user may, network included."""

    note: Final = "with limits and WITHOUT ISOLATION (reward.code.unsafe_no_isolation)"

    def __init__(self, limits: ProgramLimits) -> None:
        self._limits = limits

    def run(self, source: str, stdin: str) -> ProgramRun:
        """Run a program; see `Sandbox`. A child that starts a session of its own is left running."""
        with tempfile.TemporaryDirectory(prefix="offbeat-code-") as folder, as_file(stdin) as given:
            program = Path(folder, "main.py")
            program.write_text(source, errors="surrogateescape")
            python = [_python(), "-I", "-S", "-B", "-X", "utf8", str(_INSIDE), str(program)]
            return watch([*python, *_limit_words(self._limits, 0, -1)], given, self._limits, cwd=folder)


def _limit_words(limits: ProgramLimits, uid: int, meter: int) -> list[str]:
    numbers = {
        "cpu_s": max(1, round(limits.timeout_s + 0.5)),
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.disk_bytes,
        "open_files": 64,
        "processes": limits.processes,
        "uid": uid,
        "meter": meter,
    }
    return [*(f"{name}={number}" for name, number in numbers.items()), "--", *limits.packages]


def _python() -> str:
    """Return the interpreter that this one's environment was made from."""
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
    """Return a folder as the program's user can read it: bubblewrap would lock the folders above it."""
    above = [str(each) for each in reversed(Path(folder).parents)][1:]
    return [*(word for each in above for word in ("--perms", "0755", "--dir", each)), "--ro-bind", folder, folder]


def _has_rights() -> bool:
    """Return whether this process holds what root holds on a machine of its own (CAP_SYS_ADMIN, SETUID and SETGID)."""
    with open("/proc/self/status") as file:
        held = next((int(line.split()[1], 16) for line in file if line.startswith("CapEff:")), 0)
    return all(held >> number & 1 for number in (6, 7, 21))


_FILLING_MEMORY: Final = """
import os, time
for _ in range(2):
    os.fork()
held = bytearray(40 << 20)
held[::4096] = b"x" * len(held[::4096])
time.sleep(20)
"""
"""Four processes of 40 MiB; each may have more."""
_FILLING_TMP: Final = """
import os, time
for number in range(17000):
    os.symlink("x", f"/tmp/{number}")
time.sleep(20)
"""
