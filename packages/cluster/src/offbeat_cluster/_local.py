"""The `local` launcher: every role a process of this machine."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any, Final

from offbeat_cluster._channel import Channel
from offbeat_cluster._frames import START_ID, FrameWriter, Start
from offbeat_cluster._local_actor import LocalActor
from offbeat_cluster._specs import ClusterConfig, RoleSpec
from offbeat_types import ConfigError, DeadlineError, RunFolderError

_log: Final = logging.getLogger(__name__)
_THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


class LocalLauncher:
    """Starts roles as child processes, and talks to them over socket pairs: no ports, no files, no pickle.

    Children die with this process, however it dies.

    Args:
        run_name: told to every role as the environment variable OFFBEAT_RUN.
        config: deadlines; the defaults when None.
    """

    def __init__(self, run_name: str, config: ClusterConfig | None = None) -> None:
        self._run_name = run_name
        self._config = config or ClusterConfig()
        self._actors: dict[str, LocalActor] = {}

    async def __aenter__(self) -> "LocalLauncher":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self, spec: RoleSpec, *, deadline_s: float | None = None) -> LocalActor:
        """Start a role, and return when its constructor, and its `start()` if it has one, are done.

        Raises:
            OffbeatError: the constructor raised it, with the same type and text.
            PeerFailedError: the constructor raised another error, or the process died.
            DeadlineError: not ready in time; the process has been ended.
            ConfigError: the target is not "package.module:Class", or a role of this name is running.
        """
        deadline_s = self._config.start_timeout_s if deadline_s is None else deadline_s
        self._check(spec)
        first_frame = _write_start(spec)
        actor = self._actors[spec.name] = await self._spawn(spec)
        try:
            async with asyncio.timeout(deadline_s):
                await actor.request(START_ID, first_frame)
        except TimeoutError:
            await actor.destroy()
            raise DeadlineError(
                f"starting {spec.name}", spec.name, deadline_s, f"see {actor.log}, or raise cluster.start_timeout_s"
            ) from None
        except BaseException:
            await actor.destroy()
            raise
        return actor

    async def close(self, deadline_s: float | None = None) -> None:
        """Stop every role that is still there, all at once. What goes wrong is logged: the run has ended anyway.

        Args:
            deadline_s: for all of them together; None: `stop_timeout_s`.
        """
        actors = list(self._actors.values())
        outcomes = await asyncio.gather(*(actor.stop(deadline_s) for actor in actors), return_exceptions=True)
        self._actors.clear()
        for actor, outcome in zip(actors, outcomes, strict=True):
            if isinstance(outcome, Exception):
                _log.warning("%s did not close well: %s", actor.name, outcome)

    def kill(self) -> None:
        """End every role now. A `close` that runs, or comes after it, has nothing left to wait for."""
        for actor in self._actors.values():
            if actor.alive:  # the process id of another may belong to somebody else by now
                actor.kill()

    def _check(self, spec: RoleSpec) -> None:
        module, _, name = spec.target.partition(":")
        if not module or not name:
            raise ConfigError(f"{spec.name}: a target reads 'package.module:Class', got {spec.target!r}")
        if (actor := self._actors.get(spec.name)) and actor.alive:
            raise ConfigError(f"a role named {spec.name!r} is running already: stop it first or choose another name")

    async def _spawn(self, spec: RoleSpec) -> LocalActor:
        ours, theirs = socket.socketpair()
        try:
            log = _open_log(spec)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "offbeat_cluster._child", str(theirs.fileno()), spec.name),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=_child_environment(spec, self._run_name),
                    pass_fds=(theirs.fileno(),),
                    # A session of its own: Ctrl-C in the terminal reaches the driver only, and one signal to the
                    # group ends whatever processes the role has started.
                    start_new_session=True,
                )
            finally:
                if log is not None:
                    os.close(log)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return LocalActor(spec, process, Channel(ours), self._config)


def _write_start(spec: RoleSpec) -> Any:
    writer = FrameWriter()
    kwargs = {key: writer.pack(value) for key, value in spec.kwargs.items()}
    return writer.finish(Start(spec.target, list(sys.path), kwargs))


def _open_log(spec: RoleSpec) -> int | None:
    if spec.log_path is None:
        return None
    try:
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunFolderError(f"{spec.name} needs a log file at {spec.log_path}: {error.strerror}") from error


def _child_environment(spec: RoleSpec, run_name: str) -> Mapping[str, str]:
    threads = dict.fromkeys(_THREAD_VARIABLES, str(spec.num_threads)) if spec.num_threads else {}
    own = {"PYTHONUNBUFFERED": "1", "OFFBEAT_RUN": run_name, "OFFBEAT_ROLE": spec.name}
    return {**os.environ, **own, **threads, **spec.env}
