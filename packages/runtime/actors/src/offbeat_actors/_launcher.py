"""The work of every launcher: start roles within a deadline, stop them all together, kill them."""

import asyncio
import logging
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from offbeat_actors._actor import ActorHandle
from offbeat_actors._spec import ClusterConfig, RolePlace, RoleSpec, Wait
from offbeat_actors._wire import MAIN_THREAD, START_ID, Bytes, FrameWriter, Start
from offbeat_core import ConfigError, DeadlineError, PeerFailedError, RoleName, RunFolderError, require_backend
from offbeat_liveness import current_monitor
from offbeat_placement import Node, Plan, RankGroup

_log: Final = logging.getLogger(__name__)


class Launcher(ABC):
    """Starts each role as a process of its own; where, its subclasses say. Found by entry point `offbeat.launcher`.

    Args:
        run_name: passed to every role as the environment variable OFFBEAT_RUN.
        config: deadlines; the defaults when None.

    Attributes:
        reserves: devices and CPUs of a plan belong to the run alone once it is placed.
    """

    reserves: bool

    def __init__(self, run_name: str, config: ClusterConfig | None = None) -> None:
        self._run_name = run_name
        self._config = config or ClusterConfig()
        self._actors: dict[RoleName, ActorHandle] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    @abstractmethod
    def address(self) -> str:
        """IP address of the driver's machine, as the machines of its roles see it; known once one has been started."""

    @classmethod
    @abstractmethod
    def nodes(cls, config: ClusterConfig) -> list[Node]:
        """Return the machines that roles can be started on, and what is free there now.

        Raises:
            ConfigError: no cluster answers at `address`.
            DeadlineError: it did not in `connect_timeout_s`.
        """

    @classmethod
    def drive(cls, config: Any, work: Callable[[], int]) -> int:
        """Work as the driver of a run: see `run_on_driver`. Others than torchrun have no other process yet.

        Raises:
            ConfigError: torchrun has started several processes, each of which would be a run of its own.
        """
        number = os.environ.get("WORLD_SIZE", "1")
        if "TORCHELASTIC_RUN_ID" in os.environ and number != "1":
            raise ConfigError(
                f'torchrun has started {number} processes, and cluster.launcher = "{config.cluster.launcher}" would '
                "begin a run in each: add --cluster.launcher torchrun, or start the program without torchrun"
            )
        return work()

    @abstractmethod
    async def place(self, plan: Plan, groups: Sequence[RankGroup], *, deadline_s: float | None = None) -> None:
        """Reserve what a plan asks for, and check that it lies as planned. `start` then puts each role in its place.

        A role with devices sees these alone, so to itself its first is number 0. A role that no plan names shares its
        machine with the driver. A role may be placed again, by another plan, once its process is gone.

        Args:
            plan: of roles named after their group: "trainer-3" is rank 3 of group "trainer"; where one process drives
                a replica, "rollout-1" is the process of replica 1.
            groups: that the plan was made for.
            deadline_s: for all of it; None: `place_timeout_s`.

        Raises:
            PlacementError: a node cannot hold its part at all, or does not lie as planned. Nothing stays reserved.
            DeadlineError: nodes are busy, or do not answer, by name. Nothing stays reserved.
        """

    async def start(self, spec: RoleSpec, *, deadline_s: float | None = None) -> ActorHandle:
        """Start a role, and return when its constructor, and its `start()` if it has one, are done.

        Raises:
            OffbeatError: the constructor raised it, with the same type and text.
            PeerFailedError: the constructor raised another error, or the process died.
            DeadlineError: not ready in time; the process has been ended.
            ConfigError: the target is not "package.module:Class", or a role of this name is running.
        """
        deadline_s = self._config.start_timeout_s if deadline_s is None else deadline_s
        self._check(spec)
        first_frame = write_start(spec)
        actor: ActorHandle | None = None
        try:
            async with asyncio.timeout(deadline_s):
                actor = self._actors[spec.role] = await self._spawn(spec)
                await actor.request(START_ID, first_frame)
                actor.mark_ready()
        except TimeoutError:
            if actor is not None:
                await actor.destroy()
            log = actor.log if actor else spec.log_path or "its output"
            advice = f"see {log}, or raise cluster.start_timeout_s"
            raise DeadlineError(f"starting {spec.name}", spec.name, deadline_s, advice) from None
        except BaseException:
            if actor is not None:
                await actor.destroy()
            raise
        return actor

    def waits(self) -> list[Wait]:
        """Calls to all roles that have not been answered, the longest first."""
        waits = [wait for actor in self._actors.values() for wait in actor.waits()]
        return sorted(waits, key=lambda wait: -wait.lasted_s)

    def places(self) -> list[RolePlace]:
        """Return where each role is that has been placed or started, and the state of its process, by name."""
        placed, places = self._role_places(), []
        for role in sorted({*placed, *self._actors}):
            place = placed.get(role) or RolePlace(role=role, node=self._home_name)
            if (actor := self._actors.get(role)) is not None:
                state, since_s, reason = actor.state
                place = replace(place, pid=actor.pid, state=state, since_s=since_s, reason=reason)
            places.append(place)
        return places

    async def cluster_loss(self) -> PeerFailedError:
        """Wait until what runs the roles is lost: for ever, where each is a child of the driver.

        The roles still work then, for as long as it takes to save what they hold; after that each fails with this.
        """
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    @abstractmethod
    def _role_places(self) -> dict[RoleName, RolePlace]:
        """Return the places that a plan has given to roles."""

    @property
    @abstractmethod
    def _home_name(self) -> str:
        """Name of the node of roles that no plan has placed: the driver's."""

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
            if actor.alive:  # the process id of a dead one may belong to another process by now
                actor.kill()

    @abstractmethod
    async def _spawn(self, spec: RoleSpec) -> ActorHandle:
        """Start the process. When cancelled or failing it leaves none behind."""

    def _check(self, spec: RoleSpec) -> None:
        module, _, name = spec.target.partition(":")
        if not module or not name:
            raise ConfigError(f"{spec.name}: a target reads 'package.module:Class', got {spec.target!r}")
        if (actor := self._actors.get(spec.role)) and actor.alive:
            raise ConfigError(f"a role named {spec.name!r} is running already: stop it first or choose another name")


def run_on_driver(config: Any, work: Callable[[], int]) -> int:
    """Do the work of a command in the driver's process alone, and return its exit code.

    Where the launcher has processes on several nodes from the beginning (torchrun), every other one serves its node
    instead, until the driver ends, and returns the driver's exit code.

    Args:
        config: of the run, with a section `cluster`; the same in all processes.
        work: of the driver; returns the exit code.

    Raises:
        ConfigError: the program was started otherwise than the launcher needs.
        DeadlineError: processes of the job have not found each other in `cluster.start_timeout_s`.
        OffbeatError: whatever the work raises.
    """
    launcher = require_backend("offbeat.launcher", config.cluster.launcher)
    return int(launcher.drive(config, work))


_THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

_PASSIVE_WAITS: Final = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Threads that wait for the others of a product sleep. By default they spin, and take the cores of the other roles: two
roles with all cores each then get a third of what they get so. GNU's and Intel's OpenMP."""


def child_command(fd: int, reaper_fd: int, name: str) -> list[str]:
    """Command line of the process of a role.

    Args:
        fd: socket that it inherits and talks over.
        reaper_fd: its end of the pipe of its reaper, inherited.
        name: of the role.
    """
    return [sys.executable, "-P", "-m", "offbeat_actors._server", str(fd), str(reaper_fd), name]


def own_environment(spec: RoleSpec, run_name: str, driver_address: str) -> Mapping[str, str]:
    """Variables of this role, to be added to those of the process that starts it.

    Args:
        spec: of the role.
        run_name: of the run.
        driver_address: IP address of this machine, as the role's machine sees it.
    """
    threads = dict.fromkeys(_THREAD_VARIABLES, str(spec.num_threads)) if spec.num_threads else {}
    passive = _PASSIVE_WAITS if spec.shares_cpus else {}
    waits = {name: os.environ.get(name, value) for name, value in passive.items()}
    run = {"PYTHONUNBUFFERED": "1", "OFFBEAT_RUN": run_name, "OFFBEAT_ROLE": spec.name}
    if spec.main_thread:
        run[MAIN_THREAD] = "1"
    monitor = current_monitor()
    invitation = monitor.invite(driver_address, policy=spec.liveness_policy) if monitor else {}
    return {**run, **invitation, **threads, **waits, **spec.env}


_BETWEEN_SETTINGS: Final = re.compile(r",(?![^\[]*\])")
"""A comma outside of brackets, which hold the list of one setting's values."""


def drop_settings(env: Mapping[str, str], dropped: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return environment variables without some settings; a variable that has no others is left out.

    Args:
        env: variables.
        dropped: see `RoleSpec.dropped_settings`.
    """
    kept = dict(env)
    for variable in dropped.keys() & env.keys():
        settings = _BETWEEN_SETTINGS.split(env[variable])
        left = [each for each in settings if each.partition(":")[0].strip() not in dropped[variable]]
        if left == settings:
            continue
        del kept[variable]
        if any(left):
            kept[variable] = ",".join(left)
    return kept


def write_start(spec: RoleSpec) -> Bytes:
    """Return the first frame: what to import and how to construct it.

    Raises:
        TypeError: an argument is neither plain data, nor a dataclass, nor an array.
    """
    writer = FrameWriter()
    kwargs = {key: writer.pack(value) for key, value in spec.kwargs.items()}
    return writer.finish(Start(spec.target, list(sys.path), kwargs))


def open_log(path: Path, role: str) -> int:
    """Open a log file to append to it; its folder is made.

    Raises:
        RunFolderError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunFolderError(f"{role} needs a log file at {path}: {error.strerror}") from error
