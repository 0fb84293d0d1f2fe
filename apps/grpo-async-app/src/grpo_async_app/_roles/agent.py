"""The agent role: starts the programs of section `agent`, many at once, and leaves none of them behind.

Each program leads a life in a process group of its own, which ends as one: when the program has ended, at its deadline,
when its call is cancelled, and also when this process is gone, whatever has ended it. For the last a shell in the group
waits for the end of a pipe that only this process holds. What leaves the group on purpose (`setsid`) is not followed.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, Final, Literal

from grpo_async_app._config.agent import PROMPT_FILE, AgentConfig
from grpo_async_app._roles.agent_forks import ForkServer

_REAPER: Final = "trap '' HUP INT QUIT TERM; read _; kill -KILL 0"
_KEPT_BYTES: Final = 64 * 1024
"""Of the end of each output."""
_SECRETS: Final = ("OFFBEAT_SERVE_TOKEN",)
"""Environment variables that are not the program's."""


@dataclass(frozen=True, kw_only=True)
class AgentExit:
    """How a program has ended.

    Args:
        how: `well`: with exit code 0.
        detail: the exit code, the signal or the deadline, and the end of what it has printed as its errors.
        printed: the end of its output.
    """

    how: Literal["well", "failed", "timed_out"]
    detail: str = ""
    printed: str = ""


class AgentRole:
    """Runs programs, each with a session of the policy."""

    def __init__(self, *, config: AgentConfig) -> None:
        self._config = config
        self._forks = ForkServer(config.preload, config.preload_deadline_s) if config.preload else None

    async def start(self) -> None:
        """Import what episodes begin with, where there is something."""
        if self._forks is not None:
            await asyncio.to_thread(self._forks.start)

    async def run(self, row: dict[str, Any], base_url: str, key: str) -> AgentExit:
        """Run the program for one episode, until it ends or its time is over; ended too when this is cancelled."""
        config = self._config
        environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
        environment |= {**config.variables, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key}
        with (
            _given(config, row) as (command, stdin),
            tempfile.TemporaryFile() as printed,
            tempfile.TemporaryFile() as errors,
            _process_group() as group,
        ):
            try:
                async with asyncio.timeout(config.deadline_s):
                    code = await self._end_of(command, environment, group, (stdin, printed, errors))
            except TimeoutError:
                return AgentExit(how="timed_out", detail=f"it ran for agent.deadline_s = {config.deadline_s:g} s")
            except OSError as error:
                return AgentExit(how="failed", detail=f"{command[0]} cannot be started: {error}")
            if code:
                said = _end(errors).strip()
                how = f"exit code {code}" if code > 0 else f"signal {-code}"
                return AgentExit(how="failed", detail=f"{how}{': ' if said else ''}{said[-1000:]}")
            return AgentExit(how="well", printed=_end(printed))

    async def _end_of(
        self, command: list[str], environment: Mapping[str, str], group: int, streams: tuple[IO[bytes], ...]
    ) -> int:
        """The exit code, or minus the signal that ended it."""
        if self._forks is not None:
            return await self._forks.run(command[1:], environment, group, streams)
        stdin, stdout, stderr = streams
        process = await asyncio.create_subprocess_exec(
            *command, stdin=stdin, stdout=stdout, stderr=stderr, env=environment, process_group=group
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
                await process.wait()

    async def close(self) -> None:
        if self._forks is not None:
            self._forks.close()


@contextlib.contextmanager
def _given(config: AgentConfig, row: Mapping[str, Any]) -> Iterator[tuple[list[str], IO[bytes]]]:
    """The command and the standard input of a program that shall find the row there, or in a file."""
    text = json.dumps(row, ensure_ascii=False).encode()
    if config.prompt_in == "stdin":
        with tempfile.TemporaryFile() as stdin:
            stdin.write(text)
            stdin.seek(0)
            yield config.command, stdin
        return
    with (
        tempfile.NamedTemporaryFile(prefix="offbeat-agent-", suffix=".json") as file,
        open(os.devnull, "rb") as stdin,
    ):
        file.write(text)
        file.flush()
        yield [word.replace(PROMPT_FILE, file.name) for word in config.command], stdin


@contextlib.contextmanager
def _process_group() -> Iterator[int]:
    """A process group for one program, with its reaper in it; gone when the block ends, and when this process is."""
    theirs, ours = os.pipe()
    try:
        reaper = subprocess.Popen(
            ["/bin/sh", "-c", _REAPER, "offbeat-agent-reaper"],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
    finally:
        os.close(theirs)
    try:
        yield reaper.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(reaper.pid, signal.SIGKILL)
        reaper.wait()
        os.close(ours)


def _end(stream: IO[bytes]) -> str:
    """The end of what was written."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(size - _KEPT_BYTES, 0))
    return stream.read().decode(errors="replace")
