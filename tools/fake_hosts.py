"""Hosts of a Ray cluster on one machine: each in a network namespace of its own, all on one switch. Needs root.

The program that makes them is on the first, with the head of the cluster. A host is lost when all its processes are
killed at once, and cut off when its cable is pulled.
"""

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

CLONE_NEWNET: Final = 0x40000000
NETWORK: Final = "10.79.0"
PORT: Final = 6379
STORE_BYTES: Final = 100_000_000
START_S: Final = 120.0


class FakeHosts:
    """Made by `fake_hosts`; the first host is number 1.

    Args:
        holders: processes that hold the networks of the others open, by number.
    """

    def __init__(self, holders: "dict[int, subprocess.Popen[bytes]]") -> None:
        self._holders = holders

    @property
    def address(self) -> str:
        """Of the cluster's head."""
        return f"{address_of(1)}:{PORT}"

    def host_of(self, role: str) -> int:
        """The host, other than the first, on which the process of a role runs."""
        for number in self._holders:
            if any(role in words for _, words in self._commands(number)):
                return number
        raise SystemExit(f"no host but the first has {role}")

    def lose(self, number: int) -> None:
        """Pull the cable of a host, and kill all that runs there."""
        self.cut(number)
        for pid, _ in self._commands(number):
            _kill(pid)

    def cut(self, number: int) -> None:
        """Pull the cable of a host; its processes go on."""
        _ip(f"link set cable{number} down")

    def _commands(self, number: int) -> list[tuple[int, list[str]]]:
        """Process ids and command lines of a host, but for the one that holds its network."""
        return [each for each in _commands_beside(self._holders[number].pid) if each[0] != self._holders[number].pid]


def address_of(number: int) -> str:
    """Of a host."""
    return f"{NETWORK}.{number}"


@contextmanager
def fake_hosts(num_cpus: Sequence[int]) -> Iterator[FakeHosts]:
    """Move this process to the first of some hosts, each with so many CPUs in Ray's books; end all of them after."""
    folder = tempfile.mkdtemp(prefix="ray-")  # short: Ray puts sockets into it
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # for all that is started
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        undo.enter_context(_own_network())
        _ip("link set lo up")
        _ip("link add switch type bridge")
        _ip(f"addr add {address_of(1)}/24 dev switch")
        _ip("link set switch up")
        undo.callback(_kill_head, folder)
        _run(_ray(1, num_cpus[0], "--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}"))
        holders: dict[int, subprocess.Popen[bytes]] = {}
        hosts = FakeHosts(holders)
        for number, cpus in enumerate(num_cpus[1:], start=2):  # in turns: two that start at once take one socket
            holders[number] = undo.enter_context(subprocess.Popen(["unshare", "--net", "sleep", "infinity"]))
            undo.callback(holders[number].kill)
            _lay_cable(number, holders[number].pid)
            undo.callback(hosts.lose, number)
            _run([*_inside(holders[number].pid), *_ray(number, cpus, f"--address={hosts.address}")])
        yield hosts


def _ray(number: int, num_cpus: int, *words: str) -> list[str]:
    program = str(Path(sys.executable).with_name("ray"))
    limits = [f"--num-cpus={num_cpus}", f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"]
    return [program, "start", f"--node-ip-address={address_of(number)}", *limits, *words]


def _kill_head(folder: str) -> None:
    """Its processes name the folder; those that its raylet started end with it."""
    for pid, words in _commands_beside(os.getpid()):
        if any(folder in word for word in words):
            _kill(pid)


def _commands_beside(pid: int) -> list[tuple[int, list[str]]]:
    """Process ids and command lines of what is in the network of a process, itself included."""
    space, found = os.readlink(f"/proc/{pid}/ns/net"), []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # gone meanwhile
            if entry.name.isdecimal() and os.readlink(entry / "ns/net") == space:
                found.append((int(entry.name), (entry / "cmdline").read_text(errors="replace").split("\0")))
    return found


def _lay_cable(number: int, pid: int) -> None:
    """From the switch to the host of a process, which may take a moment to have one."""
    own = os.readlink("/proc/self/ns/net")
    end_s = time.monotonic() + START_S
    while os.readlink(f"/proc/{pid}/ns/net") == own:
        if time.monotonic() > end_s:
            raise SystemExit(f"host {number} has no network of its own after {START_S:g} s: is `unshare` allowed here?")
        time.sleep(0.01)
    _ip(f"link add cable{number} type veth peer name card netns {pid}")
    _ip(f"link set cable{number} master switch up")
    for command in ("link set lo up", f"addr add {address_of(number)}/24 dev card", "link set card up"):
        _run([*_inside(pid), "ip", *command.split()])


def _inside(pid: int) -> list[str]:
    return ["nsenter", f"--target={pid}", "--net"]


@contextmanager
def _own_network() -> Iterator[None]:
    """A network of its own for this thread and what it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before:
        if libc.unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "a network namespace needs root")
        try:
            yield
        finally:
            libc.setns(before.fileno(), CLONE_NEWNET)


def _ip(command: str) -> None:
    _run(["ip", *command.split()])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
