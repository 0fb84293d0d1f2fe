"""Tries, inside a sandbox, all that a program there should not be able to do, and prints what it can do all the same.

Reads the machine's numbers of system calls, as JSON.
"""

import ctypes
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator

NEW_USER, SIGCHLD, NO_NUMBER = 0x10000000, 17, -1
CALLS = {
    "unshare": ("it may make new user namespaces", (NEW_USER,)),
    "clone": ("it may start processes in new user namespaces", (NEW_USER | SIGCHLD, 0, 0, 0, 0)),
    "clone3": ("it may start processes by clone3", (0, 0)),
    "setns": ("it may call setns, which enters other namespaces", (-1, 0)),
    "mount": ("it may call mount", (0, 0, 0, 0, 0)),
    "fsopen": ("it may call fsopen, which mounts", (0, 0)),
    "shmget": ("it may hold System V shared memory", (0, 4096, 0o600)),
    "mq_open": ("it may call mq_open, which makes POSIX message queues", (0, 0, 0, 0)),
    "memfd_create": ("it may hold files in memory outside of /tmp", (b"probe", 0)),
    "mmap": ("it may share memory that counts for no process (MAP_SHARED, MAP_ANONYMOUS)", (0, 4096, 3, 0x21, -1, 0)),
    "bpf": ("it may call bpf", (0, 0, 0)),
    "keyctl": ("it may use the kernel's keys", (0, -3, 0)),
    "io_uring_setup": ("it may use io_uring", (1, 0)),
    "prctl": ("it may outlive its scorer (PR_SET_PDEATHSIG)", (1, 0)),
    "ptrace": ("it may trace processes", (0, 0, 0, 0)),
    "process_vm_readv": ("it may read memory of other processes", (0, 0, 0, 0, 0, 0)),
    "userfaultfd": ("it may call userfaultfd", (0,)),
    "perf_event_open": ("it may call perf_event_open", (0, 0, 0, 0, 0)),
}
DENIED = (errno.EPERM, errno.ENOSYS)


def findings() -> Iterator[str]:
    """Yield a text for everything that does not hold."""
    if os.getpid() >= 10:
        yield "it sees processes of others"
    if os.getuid() == 0:
        yield "it is root"
    if {bounds_of(name) for name in os.listdir("/proc") if name.isdigit()} != {bounds_of("self")}:
        yield "another process in it, which it may write to, has other limits, or no filter of system calls"
    yield from network()
    yield from system_calls(json.load(sys.stdin))
    try:
        os.close(os.open("/dev/zero", os.O_RDWR))
        yield "it opens /dev/zero, by which memory may be shared that counts for no process"
    except OSError:
        pass
    for path in ("/written", "/usr/written", "/dev/written"):
        try:
            open(path, "w").close()
            yield f"it writes to {path}"
        except OSError:
            pass
    yield from processes()


def bounds_of(process: str) -> tuple[str, ...]:
    with open(f"/proc/{process}/limits") as limits, open(f"/proc/{process}/status") as status:
        return limits.read(), *(line for line in status if line.startswith("Seccomp:"))


def network() -> Iterator[str]:
    with socket.socket() as one:
        one.settimeout(1)
        try:
            one.connect(("192.0.2.1", 9))
            yield "it reaches a network"
        except OSError as error:
            if error.errno != errno.ENETUNREACH:
                yield f"a network answers: {error}"
    try:
        socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()
        yield "it may make sockets that no network namespace bounds (AF_VSOCK)"
    except OSError as error:
        if error.errno != errno.EAFNOSUPPORT:
            yield f"sockets of AF_VSOCK answer: {error}"


def system_calls(numbers: dict[str, int]) -> Iterator[str]:
    for name, (words, args) in CALLS.items():
        if is_answered(numbers.get(name, NO_NUMBER), args):
            yield words


def is_answered(number: int, args: tuple[int | bytes, ...]) -> bool:
    """Make a call in a child: one that succeeds would decide about the next. In a new user namespace, ptrace fails."""
    child = os.fork()
    if not child:
        call = ctypes.CDLL(None, use_errno=True).syscall
        call.restype = ctypes.c_long
        wide = [ctypes.c_long(each) if isinstance(each, int) else each for each in args]
        result = call(ctypes.c_long(number), *wide)
        os._exit(int(result != -1 or ctypes.get_errno() not in DENIED))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def processes() -> Iterator[str]:
    children: list[int] = []
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
    if len(children) >= 8:
        yield "the number of processes has no limit (RLIMIT_NPROC)"


print("; ".join(findings()) or "isolated")
