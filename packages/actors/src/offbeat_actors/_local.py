"""The `local` launcher: every role a process of this machine."""

import asyncio
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from offbeat_actors._channel import Channel, SocketStream
from offbeat_actors._guardian import GuardianPipe
from offbeat_actors._launching import ProcessLauncher
from offbeat_actors._local_process import LocalProcess
from offbeat_actors._role_actor import RoleActor
from offbeat_actors._spawn import child_command, open_log, own_environment
from offbeat_actors._specs import ClusterConfig, RoleSpec
from offbeat_placement import Node, Plan, RankGroup, local_node, process_of
from offbeat_types import PlacementError, load_backend


class LocalLauncher(ProcessLauncher):
    """Starts roles as child processes, and talks to them over socket pairs: no ports, no files, no pickle.

    Children die with this process, however it dies, and what they have started with them.

    Args:
        run_name: told to every role as the environment variable OFFBEAT_RUN.
        config: deadlines; the defaults when None.
    """

    reserves = False
    address = LocalProcess.address

    def __init__(self, run_name: str, config: ClusterConfig | None = None) -> None:
        super().__init__(run_name, config)
        self._shown: dict[str, dict[str, str]] = {}

    @classmethod
    def nodes(cls, config: ClusterConfig) -> list[Node]:
        """The machine that it runs on, alone. Its accelerators are the device seam's to count."""
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

    async def start(self, spec: RoleSpec, *, deadline_s: float | None = None) -> RoleActor:
        """Start a role, which sees no other devices than those of its place: see `Launcher.start`."""
        placed = replace(spec, env={**self._shown.get(spec.name, {}), **spec.env})
        return await super().start(placed, deadline_s=deadline_s)

    async def _spawn(self, spec: RoleSpec) -> RoleActor:
        ours, theirs = socket.socketpair()
        guardian = GuardianPipe()
        try:
            log = open_log(spec.log_path, spec.name) if spec.log_path else None
            try:
                process = await asyncio.create_subprocess_exec(
                    *child_command(theirs.fileno(), guardian.theirs, spec.name),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **own_environment(spec, self._run_name, self.address)},
                    pass_fds=(theirs.fileno(), guardian.theirs),
                    # A session of its own: Ctrl-C in the terminal reaches the driver only, and one signal to the
                    # group ends whatever processes the role has started.
                    start_new_session=True,
                )
            finally:
                if log is not None:
                    os.close(log)
        except BaseException:
            ours.close()
            guardian.abandon()
            raise
        finally:
            theirs.close()
            guardian.hand_over()
        return RoleActor(spec, LocalProcess(process, guardian), Channel(SocketStream(ours)), self._config)


def _shown_devices(plan: Plan, groups: Sequence[RankGroup]) -> dict[str, dict[str, str]]:
    """For each role with devices the variable that shows it these, and no others of the kind."""
    by_role = {group.role: group for group in groups}
    kinds: dict[str, str] = {}
    held: dict[str, list[int]] = defaultdict(list)
    for rank in plan.ranks:
        if rank.device is not None:
            name = process_of(rank, by_role[rank.role])
            kinds[name] = by_role[rank.role].accelerator
            held[name].append(rank.device)
    return {name: _show(kinds[name], devices) for name, devices in held.items()}


def _show(kind: str, devices: Sequence[int]) -> dict[str, str]:
    variable = load_backend("offbeat.device", kind).visible_variable
    seen = os.environ.get(variable, "")  # what this process is shown of the machine, by whatever names
    names = seen.split(",") if seen else [str(device) for device in range(max(devices) + 1)]
    return {variable: ",".join(names[device] for device in devices)}
