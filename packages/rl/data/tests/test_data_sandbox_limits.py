"""What a sandbox denies and bounds, as root and as another user: system calls, memory of all processes, and files."""

import json
import os
import platform
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat_core import BackendError
from offbeat_data._scoring.sandbox.sandbox import BubblewrapSandbox
from offbeat_data._scoring.sandbox.seccomp import ARCHITECTURES, syscall_filter
from offbeat_data._scoring.sandbox.watching import Meter, ProgramLimits

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap on this machine")

DENIED = """
import ctypes, json, mmap, os, socket
libc, done = ctypes.CDLL(None, use_errno=True), {}
def tried(name, works):
    try:
        done[name] = bool(works())
    except OSError:
        done[name] = False
def started_by_clone():
    child = libc.syscall(CLONE, 0x10000000 | 17, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    return child > 0
tried("writing to its input", lambda: os.pwrite(os.open("/proc/self/fd/0", os.O_RDWR), b"x", 0))
tried("its input longer", lambda: os.pwrite(0, b"x", 1 << 20))
tried("user namespace", lambda: libc.unshare(0x10000000) == 0)
tried("mount namespace", lambda: libc.unshare(0x00020000) == 0)
tried("user namespace by clone", started_by_clone)
tried("mount", lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, b"size=100%") == 0)
tried("shared memory", lambda: libc.shmget(0, ctypes.c_size_t(1 << 20), 0o1600) >= 0)
tried("message queue", lambda: libc.msgget(0, 0o1600) >= 0)
tried("memfd", lambda: os.memfd_create("m") >= 0)
tried("shared memory of no file", lambda: mmap.mmap(-1, 1 << 20))
tried("zeros to share", lambda: mmap.mmap(os.open("/dev/zero", os.O_RDWR), 1 << 20))
tried("huge pages", lambda: mmap.mmap(-1, 1 << 21, flags=0x40022))
tried("trace", lambda: libc.ptrace(0, 0, 0, 0) == 0)
tried("vsock", lambda: socket.socket(40, socket.SOCK_STREAM))
tried("netlink", lambda: socket.socket(16, socket.SOCK_RAW))
tried("pairs of tipc", lambda: socket.socketpair(30, socket.SOCK_STREAM))
tried("crypto sockets", lambda: socket.socket(38, socket.SOCK_SEQPACKET))
tried("not dumpable", lambda: libc.prctl(4, 0, 0, 0, 0) == 0)
tried("to outlive the scorer", lambda: libc.prctl(1, 0, 0, 0, 0) == 0)
tried("inherited descriptors", lambda: [n for n in range(3, 64) if os.path.exists(f"/proc/self/fd/{n}") and n != 3])
print(json.dumps(done))
""".replace("CLONE", str(ARCHITECTURES[platform.machine()].numbers["clone"]))
USUAL = """
import concurrent.futures, mmap, socket, subprocess, tempfile
one, two = socket.socketpair()
one.send(b"x")
with tempfile.TemporaryFile() as file:
    file.write(b"x" * 1000)
    file.flush()
    mmap.mmap(file.fileno(), 1000)[:1] = b"y"
mmap.mmap(-1, 1000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
listener = socket.create_server(("127.0.0.1", 0))
talking = [socket.create_connection(listener.getsockname()) for _ in range(4)]
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    squares = list(pool.map(lambda x: x * x, range(4)))
print(two.recv(1), subprocess.run(["/bin/echo", "echo"], capture_output=True).stdout, squares)
"""
FILLS = """
import os, time
for _ in range(2):
    os.fork()
held = bytearray(60 << 20)
held[::4096] = b"x" * len(held[::4096])
time.sleep(40)
"""
SHARES = """
import os, time
held = bytearray(60 << 20)
held[::4096] = b"x" * len(held[::4096])
children = []
for _ in range(4):
    if not (child := os.fork()):
        time.sleep(1)
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
print("shared")
"""
TALKS = """
import socket, time
listener, held = socket.create_server(("127.0.0.1", 0)), []
for _ in range(20):
    held += [socket.create_connection(listener.getsockname()), listener.accept()[0]]
time.sleep(40)
"""
OTHER_LIMITS = """
import os
def bounds(pid):
    filters = [line for line in open(f"/proc/{pid}/status") if line.startswith("Seccomp:")]
    return open(f"/proc/{pid}/limits").read(), filters
own = bounds("self")
assert own[1] == ["Seccomp:\\t2\\n"]
print([pid for pid in os.listdir("/proc") if pid.isdigit() and bounds(pid) != own])
"""
MANY_FILES = "import os\nfor number in range(20000):\n    os.symlink('x', f'/tmp/{number}')"

SCRIPT = """
import json, sys
from offbeat_data._scoring.sandbox.sandbox import BubblewrapSandbox
from offbeat_data._scoring.sandbox.watching import ProgramLimits
runs = {}
for name, program in json.load(sys.stdin).items():
    limits = ProgramLimits(timeout_s=50.0, memory_bytes=160 << 20, processes=12)
    run = BubblewrapSandbox(limits, is_tried=bool(runs)).run(program, "")
    runs[name] = [run.ended, run.code, run.stdout, run.stderr]
print(json.dumps(runs))
"""


@pytest.fixture(scope="module")
def runs(run_as_user: Callable[[str, Any], Any]) -> dict[str, tuple[str, int, str, str]]:
    """How the programs above end in a sandbox that has been tried first, by the user that starts it."""
    programs = {
        "denied": DENIED,
        "usual": USUAL,
        "fills": FILLS,
        "shares": SHARES,
        "files": MANY_FILES,
        "talks": TALKS,
        "limits": OTHER_LIMITS,
    }
    return {name: tuple(run) for name, run in run_as_user(SCRIPT, programs).items()}


@needs_bubblewrap
def test_system_calls_that_reach_further_are_denied(runs: dict[str, tuple[str, int, str, str]]) -> None:
    ended, code, stdout, stderr = runs["denied"]
    assert (ended, code, stderr) == ("exited", 0, "")
    assert [name for name, works in json.loads(stdout).items() if works] == []


@needs_bubblewrap
def test_what_programs_usually_do_is_allowed(runs: dict[str, tuple[str, int, str, str]]) -> None:
    assert runs["usual"] == ("exited", 0, "b'x' b'echo\\n' [0, 1, 4, 9]\n", "")


@needs_bubblewrap
def test_a_process_that_a_program_can_write_to_has_its_limits_and_its_filter(
    runs: dict[str, tuple[str, int, str, str]],
) -> None:
    """Without root, the first process of the namespace is the same user's: its memory can be written, code included."""
    assert runs["limits"] == ("exited", 0, "[]\n", "")


@needs_bubblewrap
def test_memory_of_all_processes_together_is_bounded(runs: dict[str, tuple[str, int, str, str]]) -> None:
    assert runs["fills"][0] == "used_too_much", "four processes of 60 MiB; each may have 160"


@needs_bubblewrap
def test_sockets_count_as_what_the_kernel_may_hold_for_them(runs: dict[str, tuple[str, int, str, str]]) -> None:
    assert runs["talks"][0] == "used_too_much", "41 sockets; each may hold 10 MiB"


@needs_bubblewrap
def test_memory_that_processes_share_counts_once(runs: dict[str, tuple[str, int, str, str]]) -> None:
    assert runs["shares"][:3] == ("exited", 0, "shared\n")


@needs_bubblewrap
def test_the_number_of_files_is_bounded(runs: dict[str, tuple[str, int, str, str]]) -> None:
    assert runs["files"][0] == "used_too_much", "also where it ends before it is measured"


def kernel_denies_traces() -> bool:
    """Tell whether Yama denies ptrace without rights, filter or not. Source: Linux, admin-guide/LSM/Yama."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return scope.exists() and int(scope.read_text()) >= 2


@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="without root, bubblewrap itself denies namespaces")
def test_what_does_not_hold_on_a_machine_is_named(bubblewrap_that: Callable[[str], None]) -> None:
    """A bubblewrap that leaves the filter out."""
    real = shutil.which("bwrap")
    bubblewrap_that(f"at = words.index('--seccomp')\nos.execv({real!r}, ['bwrap', *words[:at], *words[at + 2:]])\n")
    with pytest.raises(BackendError) as refused:
        BubblewrapSandbox(ProgramLimits())
    words = [
        "make new user namespaces",
        "in new user namespaces",
        "System V shared memory",
        "outlive its scorer",
        "files in memory outside of /tmp",
    ]
    words += [] if kernel_denies_traces() else ["trace processes"]
    assert {each: str(refused.value).count(each) for each in words} == dict.fromkeys(words, 1)
    assert "Run scorers where the kernel grants it this" in str(refused.value)
    assert "it reaches a network" not in str(refused.value)


@needs_bubblewrap
def test_memory_without_a_bound_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meter, "is_exceeded", lambda self: False)
    monkeypatch.setattr("offbeat_data._scoring.sandbox.sandbox._PROBE_S", 5.0)
    with pytest.raises(BackendError, match="on this machine the memory of all processes together has no limit"):
        BubblewrapSandbox(ProgramLimits())


ALLOW, KILL = "allow", "kill"


def verdict(program: bytes, audit: int, number: int, argument: int = 0) -> str | int:
    """What the kernel makes of a call: allowed, killed, or an errno. Source: Linux, net/core/filter.c."""
    words = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    data, at, value = struct.pack("<IIQ6Q", number, audit, 0, argument, 0, 0, argument, 0, 0), 0, 0
    while True:
        code, if_true, if_false, k = words[at]
        if code == 0x20:
            value = struct.unpack_from("<I", data, k)[0]
            at += 1
        elif code == 0x54:
            value &= k
            at += 1
        elif code == 0x06:
            return {0x7FFF0000: ALLOW, 0x80000000: KILL}.get(k, k & 0xFFFF)
        else:
            holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            at += 1 + (if_true if holds else if_false)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_decides_each_call_by_its_number(machine: str) -> None:
    program, known = syscall_filter(machine), ARCHITECTURES[machine]
    numbers = known.numbers
    for name in set(numbers) - {"clone", "mmap", "prctl", "socket", "socketpair", "clone3"}:
        assert verdict(program, known.audit, numbers[name]) == 1, name
    assert verdict(program, known.audit, numbers["clone3"]) == 38
    others = [number for number in range(600) if number not in numbers.values()]
    assert {verdict(program, known.audit, number) for number in others} == {ALLOW}
    for argument, expected in ((17, ALLOW), (0x3D0F00, ALLOW), (0x10000011, 1), (0x00020011, 1), (0x40000011, 1)):
        assert verdict(program, known.audit, numbers["clone"], argument) == expected
    shared, private, of_file = 0x21, 0x22, 0x01
    for argument, expected in ((shared, 1), (0x23, 1), (private, ALLOW), (of_file, ALLOW), (private | 0x40000, 1)):
        assert verdict(program, known.audit, numbers["mmap"], argument) == expected
    for name in ("socket", "socketpair"):
        families = {family: verdict(program, known.audit, numbers[name], family) for family in range(46)}
        assert [family for family, each in families.items() if each == ALLOW] == [1, 2, 10]
        assert set(families.values()) == {ALLOW, 97}
    assert [verdict(program, known.audit, numbers["prctl"], each) for each in (1, 4, 15)] == [1, 1, ALLOW]
    assert verdict(program, 0x40000003, 20) == KILL, "32-bit calls have other numbers"
    assert verdict(program, known.audit, 0x40000000 | 41) == (38 if machine == "x86_64" else ALLOW)


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_are_those_of_the_kernel(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip("no headers of the kernel")
    text = HEADERS[machine].read_text()
    kernel = {name: int(number) for name, number in re.findall(r"__NR3?2?6?4?_(\w+)\s+(\d+)\b", text)}
    ours = ARCHITECTURES[machine].numbers
    assert {name: kernel[name] for name in ours if name in kernel} == {n: v for n, v in ours.items() if n in kernel}
    assert len(set(ours) - set(kernel)) < 6, "calls newer than the headers"


def test_a_machine_without_known_numbers_is_refused() -> None:
    with pytest.raises(BackendError, match="filtered on x86_64, aarch64; this machine is riscv64"):
        syscall_filter("riscv64")
