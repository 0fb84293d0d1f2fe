"""The system calls that a program in a sandbox may not make, as a filter for the kernel.

A program needs few parts of the kernel. Denied are those that make namespaces and mounts, hold memory outside of any
process (System V and POSIX queues, memfd, keys, shared memory of no file), or look into others, and large ones that no
program here needs.

Source: seccomp(2), bpf(4); numbers: Linux, arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h.
"""

import errno
import struct
from dataclasses import dataclass
from typing import Final

from offbeat_core import BackendError

_LOAD, _AND, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_AT_NUMBER, _AT_ARCHITECTURE, _AT_ARGUMENTS = 0, 4, 16
"""Offsets in the kernel's struct seccomp_data."""
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NEW_NAMESPACES: Final = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_FAMILIES: Final = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6: others, such as AF_VSOCK, are not bounded by a network namespace, or are much code."""
_OPTIONS: Final = (1, 4)
"""PR_SET_PDEATHSIG: by this signal, bubblewrap's process in a sandbox ends with the one outside. Without root a program
can write to its memory, and would keep it alive. PR_SET_DUMPABLE: a program that is not dumpable hides what it shares,
and so what it uses."""
_SHARED_ANONYMOUS, _HUGE_PAGES = 0x21, 0x40000
"""Flags of mmap. Memory that is shared and of no file is a file of the kernel's: it stays whole as long as one page of
it is mapped, and is in no process's resident memory once its pages are let go (MADV_DONTNEED). Huge pages never are."""
_FLAGS_OF_MMAP: Final = 3
"""Index of the argument that holds them."""
_X32_BIT: Final = 0x40000000
"""Numbers of x86's third set of calls, which the list below does not have."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Facts about a processor's kernel that a filter needs.

    Args:
        audit: its number in linux/audit.h.
        numbers: of calls, by name.
        has_x32: there is a second set of calls under the same architecture.
    """

    audit: int
    numbers: dict[str, int]
    has_x32: bool = False


def _read_numbers(text: str) -> dict[str, int]:
    """Read `name number` of calls, separated by commas."""
    pairs = (each.split() for each in text.split(","))
    return {name: int(number) for name, number in pairs}


_EVERYWHERE: Final = """,
    io_uring_setup 425, io_uring_enter 426, io_uring_register 427, open_tree 428, move_mount 429, fsopen 430,
    fsconfig 431, fsmount 432, fspick 433, clone3 435, pidfd_getfd 438, process_madvise 440, mount_setattr 442,
    quotactl_fd 443, memfd_secret 447, statmount 457, listmount 458, open_tree_attr 467
"""
"""Calls that have the same number on all machines."""
ARCHITECTURES: Final = {
    "x86_64": Architecture(
        audit=0xC000003E,
        has_x32=True,
        numbers=_read_numbers(
            """
    mmap 9, shmget 29, shmat 30, shmctl 31, socket 41, socketpair 53, clone 56, semget 64, semop 65, semctl 66,
    shmdt 67, msgget 68, msgsnd 69, msgrcv 70, msgctl 71, ptrace 101, syslog 103, personality 135, pivot_root 155,
    prctl 157, adjtimex 159, chroot 161, acct 163, settimeofday 164, mount 165, umount2 166, swapon 167, swapoff 168,
    reboot 169, init_module 175, delete_module 176, quotactl 179, io_setup 206, semtimedop 220, mq_open 240,
    kexec_load 246, add_key 248, request_key 249, keyctl 250, unshare 272, vmsplice 278, perf_event_open 298,
    fanotify_init 300, name_to_handle_at 303, open_by_handle_at 304, clock_adjtime 305, setns 308,
    process_vm_readv 310, process_vm_writev 311, kcmp 312, finit_module 313, memfd_create 319, kexec_file_load 320,
    bpf 321, userfaultfd 323
"""
            + _EVERYWHERE
        ),
    ),
    "aarch64": Architecture(
        audit=0xC00000B7,
        numbers=_read_numbers(
            """
    io_setup 0, umount2 39, mount 40, pivot_root 41, chroot 51, quotactl 60, vmsplice 75, acct 89, personality 92,
    unshare 97, kexec_load 104, init_module 105, delete_module 106, syslog 116, ptrace 117, reboot 142, prctl 167,
    settimeofday 170, adjtimex 171, mq_open 180, msgget 186, msgctl 187, msgrcv 188, msgsnd 189, semget 190,
    semctl 191, semtimedop 192, semop 193, shmget 194, shmctl 195, shmat 196, shmdt 197, socket 198, socketpair 199,
    add_key 217, request_key 218, keyctl 219, clone 220, swapon 224, swapoff 225, perf_event_open 241,
    fanotify_init 262, name_to_handle_at 264, open_by_handle_at 265, clock_adjtime 266, setns 268, process_vm_readv 270,
    process_vm_writev 271, mmap 222, kcmp 272, finit_module 273, memfd_create 279, bpf 280, userfaultfd 282,
    kexec_file_load 294
"""
            + _EVERYWHERE
        ),
    ),
}
_BY_ARGUMENT: Final = ("clone", "mmap", "prctl", "socket", "socketpair")


def syscall_filter(machine: str) -> bytes:
    """Write the filter for a kind of machine, as bubblewrap reads it.

    Raises:
        BackendError: its numbers are not known.
    """
    if machine not in ARCHITECTURES:
        raise BackendError(f"system calls can be filtered on {', '.join(ARCHITECTURES)}; this machine is {machine}")
    known = ARCHITECTURES[machine]
    numbers = known.numbers
    words = [_word(_LOAD, _AT_ARCHITECTURE), *_unless(_JUMP_EQUAL, known.audit, _KILL), _word(_LOAD, _AT_NUMBER)]
    if known.has_x32:
        words += _if(_JUMP_AT_LEAST, _X32_BIT, _ERROR | errno.ENOSYS)
    # The arguments of clone3 lie in memory, where no filter reads them: without it, libraries take clone.
    words += _if(_JUMP_EQUAL, numbers["clone3"], _ERROR | errno.ENOSYS)
    for name in sorted(set(numbers) - {*_BY_ARGUMENT, "clone3"}):
        words += _if(_JUMP_EQUAL, numbers[name], _ERROR | errno.EPERM)
    words += _call(numbers["clone"], _if(_JUMP_ANY_BIT, _NEW_NAMESPACES, _ERROR | errno.EPERM))
    denied = [word for option in _OPTIONS for word in _if(_JUMP_EQUAL, option, _ERROR | errno.EPERM)]
    words += _call(numbers["prctl"], denied)
    flags = _if(_JUMP_ANY_BIT, _HUGE_PAGES, _ERROR | errno.EPERM)
    flags += [_word(_AND, _SHARED_ANONYMOUS), *_if(_JUMP_EQUAL, _SHARED_ANONYMOUS, _ERROR | errno.EPERM)]
    words += _call(numbers["mmap"], flags, _FLAGS_OF_MMAP)
    allowed = [word for family in _FAMILIES for word in _if(_JUMP_EQUAL, family, _ALLOW)]
    for name in ("socket", "socketpair"):
        words += _call(numbers[name], [*allowed, _word(_RETURN, _ERROR | errno.EAFNOSUPPORT)])
    return b"".join([*words, _word(_RETURN, _ALLOW)])


def _word(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Write one instruction, a struct sock_filter."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _if(jump: int, value: int, result: int) -> list[bytes]:
    return [_word(jump, value, 0, 1), _word(_RETURN, result)]


def _unless(jump: int, value: int, result: int) -> list[bytes]:
    return [_word(jump, value, 1, 0), _word(_RETURN, result)]


def _call(number: int, rules: list[bytes], argument: int = 0) -> list[bytes]:
    """Write rules on an argument of a call, its lower half; what they do not decide is allowed."""
    body = [_word(_LOAD, _AT_ARGUMENTS + 8 * argument), *rules, _word(_RETURN, _ALLOW)]
    return [_word(_JUMP_EQUAL, number, 0, len(body)), *body]
