"""A Ray cluster to which the tests are connected, and its books."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from offbeat_actors import ClusterConfig
from offbeat_actors._agent import decode
from offbeat_actors.ray import RayLauncher
from offbeat_actors.ray._agent import AgentLocation, RayNodeAgent
from offbeat_actors.ray._cluster import Connection, import_ray
from offbeat_actors.ray._link import RayLink
from offbeat_testing import RayNodes, ray_nodes

NUM_GPUS = 8


@dataclass
class RayCluster:
    """A cluster to which this process is connected.

    Args:
        ray: the module.
        nodes: of the cluster.
        home: a node agent on the driver's node for the tests to share: to start one for each would take a second each.
    """

    ray: Any
    nodes: RayNodes
    home: RayLink | None = None

    @property
    def address(self) -> str:
        """host:port of the head."""
        return self.nodes.address

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
def connected_nodes(num_nodes: int) -> Iterator[RayCluster]:
    """Start a head without accelerators, and nodes, and connect to them for the length of the block."""
    ray = import_ray()
    with ray_nodes(num_nodes, num_cpus=8, num_gpus=NUM_GPUS, head_cpus=4) as nodes:
        try:
            ray.init(address=nodes.address, log_to_driver=False, configure_logging=False)
            yield RayCluster(ray, nodes)
        finally:
            ray.shutdown()


class SharedHomeLauncher(RayLauncher):
    """A launcher whose roles without a plan go to the node agent that the tests share.

    Args:
        cluster: with the agent.
        config: deadlines.
    """

    def __init__(self, cluster: RayCluster, config: ClusterConfig) -> None:
        super().__init__("test-run", config)
        self._cluster = cluster

    async def close(self, deadline_s: float | None = None) -> None:
        """Leave the node agent to the next test."""
        self._home = None
        await super().close(deadline_s)

    async def _open_home(self) -> RayLink:
        connection = await self._connect()
        if self._cluster.home is None or self._cluster.home.lost:
            affinity = connection.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            strategy = affinity(connection.own_node, soft=False)
            actor = connection.ray.remote(RayNodeAgent).options(num_cpus=0, scheduling_strategy=strategy).remote()
            where = decode(await actor.whereabouts.remote(), AgentLocation)
            self._cluster.home = RayLink(connection.ray, actor, where.node, where.address)
        return self._cluster.home
