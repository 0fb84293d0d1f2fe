"""The `ray` launcher: roles on the nodes of a Ray cluster, each in the place that a plan gives it."""

import asyncio
import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from offbeat_actors._actor import ActorHandle
from offbeat_actors._launcher import Launcher, own_environment
from offbeat_actors._remote import RemoteProcess, start_remote
from offbeat_actors._spec import ClusterConfig, RolePlace, RoleSpec
from offbeat_actors._wire import Channel
from offbeat_actors.ray._cluster import Connection, check_ray_installed, cluster_nodes
from offbeat_actors.ray._head import PATIENCE_S, head_loss
from offbeat_actors.ray._link import RayLink, is_node_alive
from offbeat_actors.ray._reservation import (
    Reservation,
    find_room,
    release,
    release_now,
    reserve,
    start_agent,
    unanswered,
)
from offbeat_core import PeerFailedError, PlacementError, RoleName
from offbeat_placement import Node, PlacedDriver, PlacedRank, Plan, RankGroup, plan_blocks, process_of, verify_placed

T = TypeVar("T")

_log: Final = logging.getLogger(__name__)

_SAVING_S: Final = 28.0
"""Time from the loss of the head until all roles are given up. Polling, this, and Ray's 7 s to let go come to some
55 s: after 60 s Ray ends this process, too."""


@dataclass(frozen=True)
class _RolePlacement:
    """Placement of a role: a node agent, and ordinals among its devices; None for all of them."""

    link: RayLink
    devices: list[int] | None


class RayLauncher(Launcher):
    """Starts roles as processes on the nodes of a Ray cluster.

    On each node that a plan uses, a node agent (a Ray actor) holds a block of devices and runs the processes of its
    roles as its children. Calls go through Ray as the same frames that the local launcher sends over a socket: nothing
    of them is pickled. Everything is gone when this process is, however it dies.

    Args:
        run_name: passed to every role as the environment variable OFFBEAT_RUN, and shown by Ray.
        config: cluster and deadlines; the defaults when None.
    """

    reserves = True

    @staticmethod
    def check_installed() -> None:
        """See whether Ray is here.

        Raises:
            BackendError: it is not.
        """
        check_ray_installed()

    def __init__(self, run_name: str, config: ClusterConfig | None = None) -> None:
        super().__init__(run_name, config)
        self._connection: asyncio.Future[Connection] | None = None
        self._given_up = threading.Event()
        self._home: asyncio.Future[RayLink] | None = None
        self._held: list[Reservation] = []
        self._placements: dict[RoleName, _RolePlacement] = {}
        self._placed_s = 0.0
        self._renewing = asyncio.Lock()
        self._processes: weakref.WeakSet[RemoteProcess] = weakref.WeakSet()
        self._watching: asyncio.Task[None] | None = None
        self._loss: PeerFailedError | None = None
        self._is_lost = asyncio.Event()

    @property
    def address(self) -> str:
        """IP address of this machine as the other nodes see it; known once a role has been placed or started."""
        connection = _result(self._connection)
        assert connection is not None, "place or start something first"
        return connection.address

    @classmethod
    def nodes(cls, config: ClusterConfig) -> list[Node]:
        """Return the machines of the cluster, and what is free there now: see `cluster_nodes`."""
        return cluster_nodes(config)

    async def place(self, plan: Plan, groups: Sequence[RankGroup], *, deadline_s: float | None = None) -> None:
        """Reserve what a plan asks for, and check that it lies as planned: see `Launcher.place`.

        The deadline begins when Ray is connected, for which it has `connect_timeout_s`.
        """
        deadline_s = self._config.place_timeout_s if deadline_s is None else deadline_s
        connection = await self._connect()
        begin_s = time.monotonic()
        blocks = plan_blocks(plan, groups)
        try:
            async with asyncio.timeout(deadline_s):
                nodes = await asyncio.to_thread(connection.nodes)
                ids = _match_nodes({block.node for block in blocks}, nodes)
                await self._give_back({role for block in blocks for role in block.roles})
        except TimeoutError:
            raise unanswered(deadline_s) from None
        spent_s = time.monotonic() - begin_s
        held = await reserve(connection, blocks, ids, run_name=self._run_name, deadline_s=deadline_s, spent_s=spent_s)
        try:
            _verify(plan, groups, held, {name: nodes[node] for name, node in ids.items()})
        except PlacementError:
            await release(connection.ray, held)
            raise
        self._held += held
        self._placed_s = time.time()
        for each in reversed(held):  # of an engine on several nodes the first block is where its driver goes
            self._place(each)

    async def close(self, deadline_s: float | None = None) -> None:
        """Stop every role, give all devices back, and end a cluster of our own: see `Launcher.close`."""
        await super().close(deadline_s)
        if self._connection is not None and not self._connection.done():
            self._given_up.set()
            await asyncio.wait({self._connection})
            self._given_up = threading.Event()
        if self._watching is not None:
            self._watching.cancel()
        if (connection := _result(self._connection)) is not None:
            if self._loss is None:  # else there is no cluster to take back what was reserved
                if (home := _result(self._home)) is not None:
                    home.kill()
                await release(connection.ray, self._held)
            await asyncio.to_thread(connection.close)
        self._held, self._placements, self._home, self._connection, self._watching = [], {}, None, None, None

    def kill(self) -> None:
        """End every role now, and give all devices back."""
        super().kill()
        if self._loss is None and (connection := _result(self._connection)) is not None:
            release_now(connection.ray, self._held)

    def _role_places(self) -> dict[RoleName, RolePlace]:
        devices: dict[RoleName, dict[str, tuple[str, ...]]] = defaultdict(dict)
        nodes: dict[RoleName, str] = {}
        for each in self._held:
            for role, ordinals in each.block.roles.items():
                nodes.setdefault(role, each.block.node)  # of several the first is where the process goes
                if ordinals:
                    numbers = (each.devices[ordinal] for ordinal in ordinals)
                    devices[role][each.block.node] = tuple(f"{each.block.device_kind} {number}" for number in numbers)
        return {
            role: RolePlace(role=role, node=node, devices=devices.get(role, {}), since_s=self._placed_s)
            for role, node in nodes.items()
        }

    @property
    def _home_name(self) -> str:
        connection = _result(self._connection)
        return connection.address if connection is not None else ""

    async def cluster_loss(self) -> PeerFailedError:
        """Wait until the head of the cluster is lost: see `Launcher.cluster_loss`."""
        await self._is_lost.wait()
        assert self._loss is not None, "set before the event"
        return self._loss

    async def _watch_head(self, address: str) -> None:
        """Say that the head is lost, and give all roles up once there was time to save what they hold."""
        loss = await head_loss(address, min(self._config.silent_after_s, PATIENCE_S))
        self._loss = PeerFailedError("the head of the Ray cluster", loss)
        self._is_lost.set()
        await asyncio.sleep(_SAVING_S)
        for process in list(self._processes):
            process.abandon(str(self._loss))

    async def _spawn(self, spec: RoleSpec) -> ActorHandle:
        await self._connect()
        link = await self._link_of(spec.role)
        placement = self._placements.get(spec.role)
        devices = placement.devices if placement else None
        env = own_environment(spec, self._run_name, self.address)
        process = await start_remote(link, spec, env, self._config, devices=devices)
        self._processes.add(process)
        return ActorHandle(spec, process, Channel(process), self._config)

    async def _link_of(self, role: RoleName) -> RayLink:
        if role in self._placements:
            await self._renew(role)
            return self._placements[role].link
        home = _result(self._home)
        if self._home is None or (self._home.done() and (home is None or home.lost)):
            self._home = asyncio.ensure_future(self._open_home())
        return await asyncio.shield(self._home)

    async def _renew(self, role: RoleName) -> None:
        """Reserve the block of a role anew where its node agent is gone: on its node or, without that, on another."""
        async with self._renewing:  # roles of one block are often started at once
            link = self._placements[role].link
            if not link.lost:
                return
            connection = await self._connect()
            former = next(each for each in self._held if each.agent is link)
            await release(connection.ray, [former])
            nodes = await asyncio.to_thread(connection.nodes)
            if not await asyncio.to_thread(is_node_alive, connection.ray, link.node):
                nodes.pop(link.node, None)
            block, node = find_room(former.block, nodes, is_silent=link.is_silent)
            _log.warning("%s: %s; its block goes to %s", role, link.lost, block.node)
            deadline_s = self._config.place_timeout_s
            held = await reserve(
                connection, [block], {block.node: node}, run_name=self._run_name, deadline_s=deadline_s
            )
            self._held[self._held.index(former)] = held[0]
            self._place(held[0])

    def _place(self, each: Reservation) -> None:
        for role, ordinals in each.block.roles.items():
            self._placements[role] = _RolePlacement(each.link, list(ordinals))

    async def _open_home(self) -> RayLink:
        """Start the node agent of all roles that no plan has placed, on the driver's own node."""
        connection = await self._connect()
        affinity = connection.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        strategy = affinity(connection.own_node, soft=False)
        actor = start_agent(connection.ray, f"{self._run_name}/home", strategy)
        link = RayLink(connection.ray, actor, connection.own_node, connection.address)
        try:
            await actor.whereabouts.remote()
        except connection.ray.exceptions.RayError as error:
            raise PeerFailedError("the node agent", await link.explain_loss(error)) from error
        return link

    async def _connect(self) -> Connection:
        """Connect in a thread, once: it takes seconds, in which the driver must react to Ctrl-C.

        Raises:
            PeerFailedError: the head has been lost since.
        """
        if self._loss is not None:
            raise self._loss
        if self._connection is None or (self._connection.done() and _result(self._connection) is None):
            self._connection = asyncio.ensure_future(asyncio.to_thread(Connection, self._config, self._given_up))
        connection = await asyncio.shield(self._connection)
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch_head(connection.head))
        return connection

    async def _give_back(self, roles: set[RoleName]) -> None:
        """Release the former blocks of roles that are placed anew."""
        running = sorted(role for role in roles if (actor := self._actors.get(role)) and actor.alive)
        if running:
            raise PlacementError(f"{', '.join(map(str, running))} cannot be placed while running: stop them first")
        former = [each for each in self._held if roles & each.block.roles.keys()]
        self._held = [each for each in self._held if each not in former]
        if former:
            await release((await self._connect()).ray, former)


def _result(future: "asyncio.Future[T] | None") -> T | None:
    """Return what a future has come to; None while it is open, or when it has failed."""
    if future is None or not future.done() or future.cancelled() or future.exception() is not None:
        return None
    return future.result()


def _match_nodes(names: set[str], nodes: dict[str, Node]) -> dict[str, str]:
    """Ray's id for each node of a plan. A cluster of one node is that node, whatever the plan calls it."""
    ids = {node.name: node_id for node_id, node in nodes.items()}
    if len(names) == 1 and len(ids) == 1:
        return dict.fromkeys(names, next(iter(nodes)))
    if missing := sorted(names - ids.keys()):
        raise PlacementError(
            f"the plan uses {', '.join(missing)}, and the cluster has {', '.join(sorted(ids)) or 'no node'}: "
            "plan again with the nodes it has now"
        )
    return {name: ids[name] for name in names}


def _verify(plan: Plan, groups: Sequence[RankGroup], held: Sequence[Reservation], nodes: dict[str, Node]) -> None:
    """Hold what Ray has placed to the promises of the plan, with the devices that it has really given."""
    by_role = {group.role: group for group in groups}
    ranks: list[PlacedRank] = []
    drivers: dict[tuple[str, int], PlacedDriver] = {}
    for each in held:
        on_node = [rank for rank in plan.ranks if rank.node == each.block.node]
        own = [rank for rank in on_node if process_of(rank, by_role[rank.role]) in each.block.roles]
        planned = sorted({rank.device for rank in own if rank.device is not None})
        for rank in own:
            device = None if rank.device is None else _number(each.devices[planned.index(rank.device)])
            ranks.append(replace(rank, device=device))
            key = (rank.role, rank.replica)
            drivers.setdefault(key, PlacedDriver(role=rank.role, replica=rank.replica, node=each.block.node))
    ranks.sort(key=lambda rank: rank.rank)
    real = [
        replace(node, name=name, free={kind: tuple(range(num)) for kind, num in node.total.items()}, num_cpus=1e9)
        for name, node in nodes.items()
    ]
    verify_placed(ranks, list(drivers.values()), real, groups)


def _number(device: str) -> Any:
    return int(device) if device.isdecimal() else device
