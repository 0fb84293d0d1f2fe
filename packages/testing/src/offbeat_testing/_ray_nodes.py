"""A Ray cluster of several nodes on this machine, with accelerators that exist in Ray's books only."""

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

READY_S: Final = 180.0
"""Time for all nodes to join: the machine may be busy."""


@dataclass(frozen=True, kw_only=True)
class RayNodes:
    """A head at an address of this machine, and nodes at 127.0.0.2 and on.

    Args:
        cluster: ray.cluster_utils.Cluster.
        num_cpus: of each node, in Ray's books.
        num_gpus: likewise.
    """

    cluster: Any
    num_cpus: int
    num_gpus: int

    @property
    def address(self) -> str:
        """host:port of the head."""
        return str(self.cluster.address)

    def add_node(self, number: int) -> Any:
        """Start a node with the address 127.0.0.NUMBER."""
        address, sizes = f"127.0.0.{number}", {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        return _patiently(lambda: self.cluster.add_node(node_ip_address=address, wait=False, **sizes), address)

    def wait_ready(self) -> None:
        """Until every node has joined."""
        self.cluster.wait_for_nodes(timeout=READY_S)


@contextlib.contextmanager
def ray_nodes(
    num_nodes: int, *, num_cpus: int = 1, num_gpus: int = 8, head_cpus: int = 1, head_gpus: int = 0
) -> Iterator[RayNodes]:
    """Start a head and nodes, and stop all of them after the block; their files are gone with them.

    Ray writes the head's address into its usual folder too, wherever the head has its own files, and fails where there
    is none: on a fresh machine. So that folder is one of this cluster, for the length of the block (RAY_TMPDIR).

    Args:
        num_nodes: beside the head.
        num_cpus: of each node.
        num_gpus: of each node.
        head_cpus: of the head.
        head_gpus: of the head.
    """
    from ray.cluster_utils import Cluster  # imported late: an extra of offbeat-actors

    folder = tempfile.mkdtemp(prefix="ray-")  # short: Ray puts sockets into it
    head: dict[str, Any] = {"num_cpus": head_cpus, "num_gpus": head_gpus, "include_dashboard": False}
    switches = {"prestart_worker_first_driver": False}
    cluster = Cluster()
    with pytest.MonkeyPatch.context() as patch:  # restores this variable alone: a test may set others meanwhile
        patch.setenv("RAY_TMPDIR", folder)
        try:
            _patiently(lambda: cluster.add_node(**head, _system_config=switches), folder)
            nodes = RayNodes(cluster=cluster, num_cpus=num_cpus, num_gpus=num_gpus)
            for number in range(2, 2 + num_nodes):
                nodes.add_node(number)
            nodes.wait_ready()
            yield nodes
        finally:
            cluster.shutdown()  # type: ignore[no-untyped-call]
            shutil.rmtree(folder, ignore_errors=True)


def _patiently(start: Callable[[], Any], mark: str) -> Any:
    """Start a node, again when it took longer than the 30 s that Ray gives it: the machine may be busy.

    Args:
        start: starts it.
        mark: in the command lines of its processes, some of which a failed start leaves behind.
    """
    for _ in range(4):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            if mark in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(int(pid), signal.SIGKILL)
    return start()
