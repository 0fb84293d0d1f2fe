"""The `local` launcher: every role a process of this machine."""

import asyncio
import os
import socket
from collections.abc import Sequence

from offbeat_cluster._channel import Channel, SocketStream
from offbeat_cluster._launching import ProcessLauncher
from offbeat_cluster._local_process import LocalProcess
from offbeat_cluster._role_actor import RoleActor
from offbeat_cluster._spawn import child_command, open_log, own_environment
from offbeat_cluster._specs import ClusterConfig, RoleSpec
from offbeat_cluster.placement import Node, Plan, RankGroup, local_node
from offbeat_types import PlacementError


class LocalLauncher(ProcessLauncher):
    """Starts roles as child processes, and talks to them over socket pairs: no ports, no files, no pickle.

    Children die with this process, however it dies.

    Args:
        run_name: told to every role as the environment variable OFFBEAT_RUN.
        config: deadlines; the defaults when None.
    """

    reserves = False
    address = LocalProcess.address

    @classmethod
    def nodes(cls, config: ClusterConfig) -> list[Node]:
        """The machine that it runs on, alone."""
        return [local_node()]

    async def place(self, plan: Plan, groups: Sequence[RankGroup], *, deadline_s: float | None = None) -> None:
        """Check that the plan asks for this machine alone; there is nothing to reserve.

        Raises:
            PlacementError: it asks for several nodes.
        """
        nodes = sorted({rank.node for rank in plan.ranks})
        if len(nodes) > 1:
            raise PlacementError(
                f'cluster.launcher = "local" has this machine alone, and the plan takes {", ".join(nodes)}',
                changes=('set cluster.launcher = "ray"',),
            )

    async def _spawn(self, spec: RoleSpec) -> RoleActor:
        ours, theirs = socket.socketpair()
        try:
            log = open_log(spec.log_path, spec.name) if spec.log_path else None
            try:
                process = await asyncio.create_subprocess_exec(
                    *child_command(theirs.fileno(), spec.name),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **own_environment(spec, self._run_name, self.address)},
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
        return RoleActor(spec, LocalProcess(process), Channel(SocketStream(ours)), self._config)
