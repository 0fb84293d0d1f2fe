"""A Ray cluster of several nodes on this machine, with accelerators that exist in Ray's books only."""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat_cluster import ClusterConfig
from offbeat_cluster.ray import RayLauncher
from offbeat_cluster.ray._connection import Connection
from offbeat_cluster.ray._import import import_ray
from offbeat_cluster.ray._keeper import Keeper
from offbeat_cluster.ray._messages import Whereabouts, decode
from offbeat_cluster.ray._remote_process import KeeperLink

NUM_GPUS = 8


@dataclass
class RayNodes:
    """The cluster, to which this process is connected.

    Args:
        ray: the module.
        cluster: as ray.cluster_utils has it.
        home: a keeper on the driver's node for the tests to share: to start one for each would take a second each.
    """

    ray: Any
    cluster: Any
    home: KeeperLink | None = None

    @property
    def address(self) -> str:
        """host:port of the head."""
        return str(self.cluster.address)

    def add_node(self, number: int, num_gpus: int = NUM_GPUS) -> Any:
        """Start a node with the address 127.0.0.NUMBER."""
        address = f"127.0.0.{number}"
        return _patiently(
            lambda: self.cluster.add_node(node_ip_address=address, num_cpus=8, num_gpus=num_gpus, wait=False), address
        )

    def held_groups(self) -> list[str]:
        """Names of the placement groups that are not removed."""
        table = self.ray.util.placement_group_table()
        return sorted(group["name"] for group in table.values() if group["state"] != "REMOVED")

    def free_gpus(self) -> dict[str, int]:
        """Free accelerators by the address of their node."""
        config = ClusterConfig(launcher="ray", address=self.address)
        return {node.address: node.num_free("GPU") for node in Connection(config).nodes().values() if node.total}

    def wait_free_gpus(self, expected: dict[str, int], deadline_s: float = 60) -> None:
        """Wait until so many are free on these nodes, which report to the head about ten times a second."""
        end_s = time.monotonic() + deadline_s
        while not expected.items() <= (free := self.free_gpus()).items():
            assert time.monotonic() < end_s, f"free are {free}, not {expected}"
            time.sleep(0.05)


@contextlib.contextmanager
def start_ray_nodes(num_nodes: int) -> Iterator[RayNodes]:
    """Start a head without accelerators, and nodes at 127.0.0.2 and on; stop all of them after the block."""
    ray = import_ray()
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-")  # short: Ray puts sockets into it
    head = {"num_cpus": 4, "include_dashboard": False, "temp_dir": folder}
    switches = {"prestart_worker_first_driver": False}
    cluster = Cluster()
    try:
        _patiently(lambda: cluster.add_node(**head, _system_config=switches), folder)
        fake = RayNodes(ray, cluster)
        for number in range(num_nodes):
            fake.add_node(2 + number)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield fake
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _patiently(start: Callable[[], Any], mark: str) -> Any:
    """Start a node, again when it took longer than the 30 s that Ray gives it: the machine may be busy.

    Args:
        start: starts it.
        mark: in the command lines of its processes, of which a failed start leaves some behind.
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


class SharedHomeLauncher(RayLauncher):
    """A launcher whose roles without a plan go to the keeper that the tests share.

    Args:
        cluster: with the keeper.
        config: deadlines.
    """

    def __init__(self, cluster: RayNodes, config: ClusterConfig) -> None:
        super().__init__("test-run", config)
        self._cluster = cluster

    async def close(self, deadline_s: float | None = None) -> None:
        """Leave the keeper to the next test."""
        self._home = None
        await super().close(deadline_s)

    async def _open_home(self) -> KeeperLink:
        connection = await self._connect()
        if self._cluster.home is None or self._cluster.home.lost:
            affinity = connection.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            strategy = affinity(connection.own_node, soft=False)
            actor = connection.ray.remote(Keeper).options(num_cpus=0, scheduling_strategy=strategy).remote()
            where = decode(await actor.whereabouts.remote(), Whereabouts)
            self._cluster.home = KeeperLink(connection.ray, actor, where.node, where.address)
        return self._cluster.home
