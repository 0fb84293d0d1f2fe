"""Forks Python programs from one process that has imported what they begin with.

`import openai` takes a second and 60 MB; an episode often takes less. The process is single, as forks need: it imports,
then forks for each request, which comes with the standard streams of the program and a pipe for its exit code.
"""

import asyncio
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from grpo_async_app._roles.agent_streams import Streams, key_variables
from offbeat_core import ConfigError

_READY: Final = b"ready"
_LONGEST_REQUEST: Final = 192 * 1024
"""Bytes of one message; the environment of a program is the most of it."""
_PR_SET_PDEATHSIG: Final = 1
_TAKEN_S: Final = 5.0
"""For the other process to take a request; it does nothing but take them and fork. After it, it is replaced."""


class ForkServer:
    """The other process, as the role sees it. It ends with the role.

    Args:
        modules: imported before anything is forked.
        deadline_s: for these imports.
    """

    def __init__(self, modules: Sequence[str], deadline_s: float) -> None:
        self._modules, self._deadline_s = list(modules), deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket
        self._starting = asyncio.Lock()

    def start(self) -> None:
        """Start it, and wait for its imports.

        Raises:
            ConfigError: a module cannot be imported; the log says why.
        """
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, "-m", __name__, str(theirs.fileno()), *self._modules]
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        names = ", ".join(self._modules)
        self._socket.settimeout(self._deadline_s)
        try:
            if self._socket.recv(len(_READY)) != _READY:
                raise ConfigError(f"agent.preload: importing {names} failed; see the log of agent-0")
        except TimeoutError:
            raise ConfigError(
                f"agent.preload: importing {names} takes more than agent.preload_deadline_s = {self._deadline_s:g}"
            ) from None
        finally:
            self._socket.settimeout(_TAKEN_S)

    async def run(self, command: Sequence[str], environment: Mapping[str, str], group: int, streams: Streams) -> int:
        """Run a file or -m and a module, with arguments: the exit code, or minus the signal that ended it.

        Args:
            command: the arguments of `python`.
            environment: of the program.
            group: process group that it joins.
            streams: of the program.
        """
        async with self._starting:  # of many that find it gone, one starts it
            if self._process is None or self._process.poll() is not None:
                await asyncio.to_thread(self.start)
        message = json.dumps({"command": list(command), "environment": dict(environment), "group": group}).encode()
        if len(message) > _LONGEST_REQUEST:
            raise OSError(f"command and environment have {len(message)} bytes, and may have {_LONGEST_REQUEST}")
        ended, exit_pipe = os.pipe()
        try:
            fds = [streams.stdin, streams.stdout, streams.stderr, exit_pipe, *streams.keys]
            socket.send_fds(self._socket, [message], fds)
        except TimeoutError:
            os.close(ended)
            self.close()  # calls that wait for its programs return; the next one starts another
            raise OSError(f"the process that forks programs has taken none for {_TAKEN_S:g} s") from None
        except OSError:
            os.close(ended)
            raise
        finally:
            os.close(exit_pipe)
        code = await _read(ended)
        return int(code) if code else -signal.SIGKILL  # its whole group was killed

    def close(self) -> None:
        if self._process is not None:
            self._socket.close()
            self._process.kill()
            self._process.wait()


async def _read(fd: int) -> bytes:
    """Return all that comes through a pipe; closed here."""
    reader = asyncio.StreamReader()
    pipe = os.fdopen(fd, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        return await reader.read()
    finally:
        transport.close()


def _serve(requests: socket.socket, modules: Sequence[str]) -> None:
    """Import, then fork for every request until the role is gone."""
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # a collection in a fork would copy what all share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no fork is waited for: a pipe brings its exit code
    requests.send(_READY)
    while True:
        message, fds, _, _ = socket.recv_fds(requests, _LONGEST_REQUEST, 5)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            _watch(json.loads(message), fds)
        for fd in fds:
            os.close(fd)


def _watch(request: dict[str, Any], fds: Sequence[int]) -> None:
    """Fork the program, wait for its end and report it. Does not return in this process; it does in the program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stdin, stdout, stderr, exit_pipe, *keys = fds
    os.set_inheritable(exit_pipe, False)
    try:
        os.setpgid(0, request["group"])
    except OSError:  # it was killed meanwhile: the program is no longer needed
        os._exit(1)
    watcher, program = os.getpid(), os.fork()
    if program:
        _, status = os.waitpid(program, 0)
        with contextlib.suppress(OSError):
            os.write(exit_pipe, str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    os.close(exit_pipe)
    _end_with(watcher)
    for number, fd in enumerate((stdin, stdout, stderr)):
        os.dup2(fd, number)
        os.close(fd)
    _become(request["command"], request["environment"] | key_variables(keys[0] if keys else None))


def _end_with(watcher: int) -> None:
    """Have the kernel end this process with its parent, which stays in the group, whichever this one goes to."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != watcher:  # it was killed before it could be followed
        os._exit(1)


def _become(command: list[str], environment: Mapping[str, str]) -> None:
    """Be the program: does what `python` does with these words, and ends the process as that does."""
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as role:
        _serve(role, sys.argv[2:])
