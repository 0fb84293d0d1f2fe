"""A run on two nodes of torchrun that are both this machine."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final, Self

_POLL_S: Final = 0.2


class TorchrunNodes:
    """Two agents of torchrun start a command, each with one CPU, so that neither node has room for two roles.

    Args:
        module: of the command.
        words: of the command, the same on both nodes.
        logs: folder for what both print.
        num_processes: that torchrun starts on each node.
        only: further words for one of the nodes, by its number.

    Attributes:
        agents: processes of torchrun.
    """

    def __init__(
        self,
        module: str,
        *words: object,
        logs: Path,
        num_processes: int = 1,
        only: Mapping[int, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self._mark = f"OFFBEAT_TEST={secrets.token_hex(8)}"  # all that they start inherits it
        self._logs = [logs / f"node-{number}.log" for number in range(2)]
        name, _, value = self._mark.partition("=")
        cpus = sorted(os.sched_getaffinity(0))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.agents: list[subprocess.Popen[bytes]] = []
        for number, log in enumerate(self._logs):
            line = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"),
                *(f"--nproc-per-node={num_processes}", "--master-addr=127.0.0.1", f"--master-port={port}"),
                *("-m", module, *map(str, words), *only.get(number, [])),
            ]
            env = {**os.environ, name: value}
            with log.open("wb") as output:
                agent = subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=env)
            os.sched_setaffinity(agent.pid, {cpus[number % len(cpus)]})
            self.agents.append(agent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pid in [*self.processes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self.agents:
            agent.wait()

    def wait(self, deadline_s: float) -> list[int]:
        """Return the exit codes of both agents.

        Raises:
            TimeoutError: one still runs; with what both have printed.
        """
        try:
            return [agent.wait(deadline_s) for agent in self.agents]
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"torchrun still runs after {deadline_s:g} s:\n{self.output}") from error

    def wait_until(self, is_so: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Wait for something while the first node runs.

        Raises:
            TimeoutError: it has not come, or the node has ended; with what both have printed.
        """
        end_s = time.monotonic() + deadline_s
        while not is_so():
            if time.monotonic() > end_s or self.agents[0].poll() is not None:
                raise TimeoutError(f"no {what}:\n{self.output}")
            time.sleep(_POLL_S)

    @property
    def output(self) -> str:
        """Lines that both nodes have printed."""
        return "\n".join(log.read_text() for log in self._logs)

    def processes(self) -> dict[int, dict[str, str]]:
        """Return the environment of each process on the nodes, torchrun's among them, by process id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it is gone, or another user's
                variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                if self._mark in variables:
                    found[int(folder.name)] = dict(each.split("=", 1) for each in variables if "=" in each)
        return found
