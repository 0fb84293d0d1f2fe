"""The `local` launcher: every role a process of this machine."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from offbeat_actors._actor import ActorHandle
from offbeat_actors._launcher import Launcher, child_command, drop_settings, open_log, own_environment
from offbeat_actors._processes.orphans import MARK, adopt_orphans, end_orphans, end_session, reap_orphans
from offbeat_actors._processes.output import OnOutput, RoleOutput
from offbeat_actors._processes.reaper import ReaperPipe
from offbeat_actors._spec import ClusterConfig, RolePlace, RoleSpec
from offbeat_actors._wire import Channel, SocketStream
from offbeat_core import PlacementError, RoleName, load_backend
from offbeat_placement import Node, Plan, RankGroup, local_node, process_of

_WORDS: Final = {
    "T": "its process is stopped (SIGSTOP, or a debugger): continue it with SIGCONT, or kill it",
    "t": "its process is stopped by a debugger",
    "D": "its process waits for a disk or a device",
    "Z": "its process has ended",
}


def describe_process(pid: int) -> str:
    """Words for a state that explains silence; "" when nothing is odd, or on a system without /proc.

    Source: proc_pid_stat(5), field 3.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # Field 2 is the program's name in parentheses, which may itself hold ")" and spaces.
    return _WORDS.get(stat.rpartition(")")[2].split()[0], "")


LOOPBACK: Final = "127.0.0.1"

_KILL_S: Final = 20.0
"""After SIGKILL: how long a process may take to end. The memory of a large one is given back in seconds."""


class LocalProcess:
    """Implements `RoleProcess` for a child process that leads a process group of its own.

    Args:
        process: the child.
        reaper: of its group, where it has one.
        output: reads what it prints, where its log is bounded.
        address: of this machine, as the machines of other roles see it.
    """

    place = ""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reaper: ReaperPipe | None = None,
        output: RoleOutput | None = None,
        address: str = LOOPBACK,
    ) -> None:
        self._process, self._reaper, self._output, self.address = process, reaper, output, address
        self._killed = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once it has been seen to end."""
        return self._process.returncode is None

    async def wait(self) -> int | str:
        """Wait for its end: its exit code, or minus the signal that killed it; words when SIGKILL does not end it."""
        ended = asyncio.ensure_future(self._process.wait())
        killed = asyncio.ensure_future(self._killed.wait())
        try:
            await asyncio.wait({ended, killed}, return_when=asyncio.FIRST_COMPLETED)
            # Limited after SIGKILL alone: one that waits for a disk or a device may not end by it.
            await asyncio.wait({ended}, timeout=_KILL_S)
            if ended.done():
                return ended.result()
        finally:
            ended.cancel()
            killed.cancel()
            await self._end_group()
        doing = describe_process(self.pid) or "it holds its devices and memory until it does"
        return f"its process {self.pid} has not ended {_KILL_S:g} s after SIGKILL: {doing}"

    async def _end_group(self) -> None:
        """End what a process has started: it must not outlive it."""
        if self._reaper is not None:
            self.send_signal(signal.SIGKILL)
            # After SIGKILL to the group, which ends the reaper as well: `close` waits for its end.
            await self._reaper.close()
            await end_session(self.pid)
        if self._output is not None:
            await self._output.close()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        if number == signal.SIGKILL:
            self._killed.set()

    async def state(self) -> str:
        """Return what it is doing, when that is odd."""
        return describe_process(self.pid)


class LocalLauncher(Launcher):
    """Starts roles as child processes, and talks to them over socket pairs: no ports, no files, no pickle.

    Children die with this process, however it dies, and what they have started with them. What has left its role's
    process group is ended by `close`; it stays where this process is killed.

    Args:
        run_name: passed to every role as the environment variable OFFBEAT_RUN.
        config: deadlines; the defaults when None.
        on_output: is called when a role with `max_log_bytes` first prints.
    """

    reserves = False

    def __init__(
        self, run_name: str, config: ClusterConfig | None = None, *, on_output: OnOutput | None = None
    ) -> None:
        super().__init__(run_name, config)
        self._on_output = on_output
        self._shown: dict[RoleName, dict[str, str]] = {}
        self._places: dict[RoleName, RolePlace] = {}
        self._mark, self._pids = secrets.token_hex(8), set[int]()
        self._reaping: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Loopback: all roles are here."""
        return LOOPBACK

    @classmethod
    def nodes(cls, config: ClusterConfig) -> list[Node]:
        """Return the machine that it runs on, alone. Its accelerators are the device seam's to count."""
        return [local_node()]

    async def place(self, plan: Plan, groups: Sequence[RankGroup], *, deadline_s: float | None = None) -> None:
        """Check that the plan asks for this machine alone. Nothing is reserved; each role is shown its own devices.

        Args:
            plan: its devices are counted as this process counts them.
            groups: their kinds of accelerator are those of the device seam, such as "cuda".
            deadline_s: nothing is waited for.

        Raises:
            PlacementError: it asks for several nodes.
            BackendError: for devices of a kind that is not installed.
        """
        nodes = sorted({rank.node for rank in plan.ranks})
        if len(nodes) > 1:
            raise PlacementError(
                f'cluster.launcher = "local" has this machine alone, and the plan takes {", ".join(nodes)}',
                changes=('set cluster.launcher = "ray"',),
            )
        self._shown |= _shown_devices(plan, groups)
        self._places |= _plan_places(plan, groups, self._home_name, time.time())

    async def start(self, spec: RoleSpec, *, deadline_s: float | None = None) -> ActorHandle:
        """Start a role, which sees no other devices than those of its place."""
        placed = replace(spec, env={**self._shown.get(spec.role, {}), **spec.env})
        return await super().start(placed, deadline_s=deadline_s)

    async def close(self, deadline_s: float | None = None) -> None:
        """Stop every role, as every launcher does, and end what has escaped them."""
        await super().close(deadline_s)
        if self._reaping is not None:
            self._reaping.cancel()
            await asyncio.gather(self._reaping, return_exceptions=True)
            self._reaping = None
        if self._pids:
            await end_orphans(self._mark, frozenset(self._pids))

    def _role_places(self) -> dict[RoleName, RolePlace]:
        return self._places

    @property
    def _home_name(self) -> str:
        return local_node().name

    async def _spawn(self, spec: RoleSpec) -> ActorHandle:
        ours, theirs = socket.socketpair()
        reaper = ReaperPipe()
        # Before the child starts anything: what outlives its own parent is then a child of this process.
        adopt_orphans()
        try:
            output, log = await self._open_output(spec)
            try:
                process = await asyncio.create_subprocess_exec(
                    *child_command(theirs.fileno(), reaper.theirs, spec.name),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=drop_settings(
                        {**os.environ, **own_environment(spec, self._run_name, self.address), MARK: self._mark},
                        spec.dropped_settings,
                    ),
                    pass_fds=(theirs.fileno(), reaper.theirs),
                    # A session of its own: Ctrl-C in the terminal reaches the driver only, and one signal to the
                    # group ends whatever processes the role has started.
                    start_new_session=True,
                )
            finally:
                if log is not None:
                    # The child has its own: the reader of a pipe sees its end only when no process holds it open.
                    os.close(log)
        except BaseException:
            ours.close()
            reaper.abandon()
            raise
        finally:
            # Likewise: the end of the child shows as the end of its socket only if this process lets go of it.
            theirs.close()
            reaper.hand_over()
        self._pids.add(process.pid)
        if self._reaping is None:
            self._reaping = asyncio.create_task(reap_orphans())
        return ActorHandle(
            spec, LocalProcess(process, reaper, output, self.address), Channel(SocketStream(ours)), self._config
        )

    async def _open_output(self, spec: RoleSpec) -> tuple[RoleOutput | None, int | None]:
        """Return the reader of a role's output, where its log is bounded, and what it prints to; None: as here."""
        if spec.max_log_bytes:
            output = RoleOutput(spec.name, spec.log_path, spec.max_log_bytes, self._on_output)
            return output, await output.start()
        return None, open_log(spec.log_path, spec.name) if spec.log_path else None


def _plan_places(plan: Plan, groups: Sequence[RankGroup], node: str, now_s: float) -> dict[RoleName, RolePlace]:
    """Return the place of each role of a plan on this machine."""
    by_role = {group.role: group for group in groups}
    held: dict[RoleName, list[str]] = defaultdict(list)
    for rank in plan.ranks:
        devices = held[process_of(rank, by_role[rank.role])]
        if rank.device is not None:
            devices.append(f"{by_role[rank.role].accelerator} {rank.device}")
    return {
        role: RolePlace(role=role, node=node, devices={node: tuple(devices)} if devices else {}, since_s=now_s)
        for role, devices in held.items()
    }


def _shown_devices(plan: Plan, groups: Sequence[RankGroup]) -> dict[RoleName, dict[str, str]]:
    """Return for each role with devices the variable that shows it these, and no others of the kind."""
    by_role = {group.role: group for group in groups}
    kinds: dict[RoleName, str] = {}
    held: dict[RoleName, list[int]] = defaultdict(list)
    for rank in plan.ranks:
        if rank.device is not None:
            role = process_of(rank, by_role[rank.role])
            kinds[role] = by_role[rank.role].accelerator
            held[role].append(rank.device)
    return {role: show_devices(kinds[role], devices) for role, devices in held.items()}


def show_devices(kind: str, devices: Sequence[int]) -> dict[str, str]:
    """Return the variable that shows a process these devices, and no others of the kind.

    Args:
        kind: as the device seam calls it.
        devices: ordinals among those that this process sees.
    """
    variable = load_backend("offbeat.device", kind).visible_variable
    seen = os.environ.get(variable, "")  # what this process is shown of the machine, by whatever names
    names = seen.split(",") if seen else [str(device) for device in range(max(devices) + 1)]
    return {variable: ",".join(names[device] for device in devices)}
