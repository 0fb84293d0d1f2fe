"""The agent role: starts the programs of section `agent`, many at once, and leaves none of them behind.

Each program leads a life in a process group of its own, which ends as one: when the program has ended, at its deadline,
when its call is cancelled, and also when this process is gone, whatever has ended it. For the last a shell in the group
waits for the end of a pipe that only this process holds. What leaves the group on purpose (`setsid`) is ended with the
run.
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

from grpo_async_app._config.agent import PROMPT_FILE, AgentConfig, program_words
from grpo_async_app._roles.agent_forks import ForkServer
from grpo_async_app._roles.agent_streams import Streams, keep_end, key_pipe, key_variables
from offbeat_core import drop_secrets

_REAPER: Final = "trap '' HUP INT QUIT TERM; read _; kill -KILL 0"
_OWN_VARIABLES: Final = frozenset(
    [
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TERM",
        "TZ",
        "TMPDIR",
        "TEMP",
        "TMP",
        "LD_LIBRARY_PATH",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "OFFBEAT_RUN",
        "OFFBEAT_ROLE",
        "OFFBEAT_PROCESS",
    ]
)
_OWN_PREFIXES: Final = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_")
_OWN_SUFFIX: Final = "_VISIBLE_DEVICES"
"""Variables of the run that any program may have: a list of those that are left out would miss the next secret."""
_LONGEST_DETAIL: Final = 300
"""Characters of the last line of a program's errors, which stands in a line of the run."""
_NUM_LOGGED: Final = 20
"""Failures whose standard error is written to the log of the role; later ones are mostly the same."""


@dataclass(frozen=True, kw_only=True)
class AgentExit:
    """End of a program.

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
        drop_secrets(config.forward_env)  # what it forks programs from shows its own environment in /proc
        self._config, self._num_failed = config, 0
        self._forks = ForkServer(config.preload, config.preload_deadline_s) if config.preload else None

    async def start(self) -> None:
        """Import what episodes begin with, where there is something."""
        if self._forks is not None:
            await asyncio.to_thread(self._forks.start)

    async def run(self, row: dict[str, Any], base_url: str, key: str, reward_key: str = "") -> AgentExit:
        """Run the program for one episode, until it ends or its time is over; ended too when this is cancelled.

        Args:
            row: what it has to do.
            base_url: of the policy.
            key: of its session.
            reward_key: with which it may post its reward; empty: it may not.
        """
        config = self._config
        environment = _environment(config) | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key}
        async with keep_end() as printed, keep_end() as errors:
            try:
                async with asyncio.timeout(config.deadline_s):
                    with (
                        _given(config, row) as (command, stdin),
                        key_pipe(reward_key) as key_fd,
                        _process_group() as group,
                    ):
                        streams = Streams(stdin.fileno(), printed.fd, errors.fd, key_fd)
                        code = await self._end_of(command, environment, group, streams)
            except TimeoutError:
                return AgentExit(how="timed_out", detail=f"it ran for agent.deadline_s = {config.deadline_s:g} s")
            except OSError as error:
                return AgentExit(how="failed", detail=f"{config.command[0]} cannot be started: {error}")
            if code:
                return self._failed(code, (await errors.text()).strip())
            return AgentExit(how="well", printed=await printed.text())

    def _failed(self, code: int, errors: str) -> AgentExit:
        """Say how it ended by the last line of its errors; the log of the role gets all of them."""
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        self._num_failed += 1
        if self._num_failed <= _NUM_LOGGED:
            print(f"a program ended with {how}:\n{errors}", flush=True)
        last = errors.splitlines()[-1][-_LONGEST_DETAIL:] if errors else ""
        return AgentExit(how="failed", detail=f"{how}: {last}{_advice(last)}" if last else how)

    async def _end_of(self, command: list[str], environment: dict[str, str], group: int, streams: Streams) -> int:
        """Return the exit code, or minus the signal that ended it."""
        if self._forks is not None:
            return await self._forks.run(command[1:], environment, group, streams)
        process = await asyncio.create_subprocess_exec(
            *program_words(command),
            stdin=streams.stdin,
            stdout=streams.stdout,
            stderr=streams.stderr,
            env=environment | key_variables(streams.key),
            pass_fds=streams.keys,
            process_group=group,
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()  # it may have left the group, and would be waited for without an end
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


def _environment(config: AgentConfig) -> dict[str, str]:
    """Return the environment variables of a program, without those that name its session."""
    kept = {*_OWN_VARIABLES, *config.forward_env}
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in kept or name.startswith(_OWN_PREFIXES) or name.endswith(_OWN_SUFFIX)
    }
    return inherited | config.variables


def _advice(error: str) -> str:
    """Say how to install the client, where a program of this Python has not found it."""
    if "No module named 'openai'" not in error:
        return ""
    return '; pip install "grpo-async-app[agents]" installs it for the Python that "python" in agent.command stands for'
