"""Starts programs as users do: torchrun, the wrapper of liveness and the script, in interpreters of their own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from fault_runs import HEADLINE, POINTER

ALONE: Final = ("--standalone", "--local-addr=127.0.0.1")


class Torchrun:
    """An agent and its ranks, which print into a file.

    Args:
        folder: for the file.
        name: of the file.
        script: what the ranks run.
        options: of torchrun.
        environment: variables set beside those of this process.
    """

    def __init__(
        self, folder: Path, name: str, script: Path, *options: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = folder / f"{name}.log"
        settings = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "attempts:0"}
        if sys.platform == "linux":
            settings["GLOO_SOCKET_IFNAME"] = "lo"
        command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "offbeat_liveness", "run"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(script)],
                env=os.environ | settings | dict(environment or {}),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=folder,
            )

    @property
    def output(self) -> str:
        """Return what was printed so far."""
        return self.log.read_text(errors="replace")

    def end(self) -> None:
        """Kill the agent, and those of its ranks that still run."""
        for rank in _children_of(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def ended_at_last(agents: list[Torchrun]) -> Iterator[None]:
    """End all agents, however the body ends."""
    try:
        yield
    finally:
        for agent in agents:
            agent.end()


def wait_until(happens: Callable[[], bool], what: str, agents: list[Torchrun], limit_s: float) -> None:
    """Wait, but only until a deadline.

    Raises:
        AssertionError: it has not come; with all that was printed.
    """
    until_s = time.monotonic() + limit_s
    while not happens():
        if time.monotonic() >= until_s:
            outputs = "\n".join(f"--- {agent.log.name}\n{agent.output}" for agent in agents)
            raise AssertionError(f"{what} has not come within {limit_s:.0f} s\n{outputs}")
        time.sleep(0.1)


def headlines(text: str) -> list[str]:
    """Return the first lines of the monitors' reports, without those that point to another report."""
    return [line for line in text.splitlines() if HEADLINE in line and POINTER not in line]


def _children_of(pid: int) -> list[int]:
    """Return the agent puts each rank into a session of its own."""
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]
    return []
