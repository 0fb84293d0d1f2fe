"""Reserves the blocks of a plan on a Ray cluster: all of them where they were planned, in time, or none."""

import asyncio
import contextlib
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from offbeat_actors._agent import decode
from offbeat_actors.ray._agent import AgentLocation, RayNodeAgent
from offbeat_actors.ray._cluster import Connection
from offbeat_actors.ray._link import RayLink, is_node_alive
from offbeat_core import DeadlineError, PeerFailedError, PlacementError
from offbeat_placement import Block, Node

_POLL_S: Final = 0.05
_RELEASE_S: Final = 10.0
_EXPLAIN_S: Final = 5.0
"""Time for Ray to report what a missed deadline was spent on."""
_SOME_CPU: Final = 0.001
"""Ray reserves something or nothing at all: the share of a block that needs neither devices nor CPUs of its own."""


@dataclass
class Reservation:
    """A block that is held on the cluster.

    Args:
        block: what was asked for.
        group: Ray's placement group, of one bundle.
        agent: in it, once it has been started.
        devices: ids of its devices on its node, in order.
        is_ready: the node agent has answered.
    """

    block: Block
    group: Any
    agent: RayLink | None = None
    devices: tuple[str, ...] = ()
    is_ready: bool = False

    @property
    def link(self) -> RayLink:
        """Link to the agent."""
        assert self.agent is not None  # `reserve` starts one in each block
        return self.agent


async def reserve(
    connection: Connection,
    blocks: Sequence[Block],
    nodes: Mapping[str, str],
    *,
    run_name: str,
    deadline_s: float,
    spent_s: float = 0.0,
) -> list[Reservation]:
    """Reserve blocks and start a node agent in each.

    Args:
        connection: to the cluster.
        blocks: to reserve, each as one atomic bundle on its node.
        nodes: Ray's ids of the nodes by the names that the blocks use.
        run_name: shown by Ray.
        deadline_s: for everything.
        spent_s: what of that has passed before this call.

    Raises:
        PlacementError: a node cannot hold its part at all, or Ray placed one elsewhere.
        PeerFailedError: a node was lost meanwhile.
        DeadlineError: names each block that was waited for, and what its node has free.
    """
    ray = connection.ray
    held: list[Reservation] = []
    try:
        async with asyncio.timeout(deadline_s - spent_s):
            await hold(connection, blocks, nodes, held, run_name=run_name)
            await asyncio.gather(*(_open(ray, each, nodes[each.block.node], run_name) for each in held))
    except TimeoutError:
        error = await _explain_missed(connection, held, nodes, deadline_s)
        await release(ray, held)
        raise error from None
    except BaseException:
        await release(ray, held)
        raise
    return held


async def hold(
    connection: Connection,
    blocks: Sequence[Block],
    nodes: Mapping[str, str],
    held: list[Reservation],
    *,
    run_name: str,
) -> None:
    """Reserve blocks, without node agents: see `reserve`, which bounds the wait and releases.

    What has been asked for goes into `held` before anything waits, so that it can be released whatever happens.
    """
    await asyncio.to_thread(_check_room, connection, blocks, nodes)
    held.extend(_ask(connection.ray, block, nodes[block.node], run_name) for block in blocks)
    for each in held:
        await _wait_created(connection.ray, each, nodes[each.block.node])


async def release(ray: Any, held: Sequence[Reservation]) -> None:
    """Give blocks back, end their node agents, and wait until Ray has taken note."""
    release_now(ray, held)

    async def gone(each: Reservation) -> None:
        while (await _table(ray, each)).get("state", "REMOVED") != "REMOVED":
            await asyncio.sleep(_POLL_S)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_RELEASE_S):
            await asyncio.gather(*(gone(each) for each in held))


def release_now(ray: Any, held: Sequence[Reservation]) -> None:
    """Give blocks back without waiting."""
    for each in held:
        if each.agent is not None:
            each.agent.kill()
        with contextlib.suppress(ray.exceptions.RayError):
            ray.util.remove_placement_group(each.group)


def start_agent(ray: Any, name: str, strategy: Any, **resources: Any) -> Any:
    """Start a node agent; it is ready when it first answers."""
    actor = ray.remote(RayNodeAgent).options(
        name=f"{name} {secrets.token_hex(4)}",
        scheduling_strategy=strategy,
        max_restarts=0,
        max_task_retries=0,
        **{"num_cpus": 0, **resources},
    )
    return actor.remote()


def needs_of(block: Block) -> dict[str, float]:
    """Return what Ray reserves for a block."""
    wanted = {
        block.device_kind: float(block.num_devices),
        "CPU": float(block.num_cpus),
        "memory": float(block.memory_bytes),
    }
    return {kind: amount for kind, amount in wanted.items() if kind and amount} or {"CPU": _SOME_CPU}


def find_room(block: Block, nodes: Mapping[str, Node], *, is_silent: bool) -> tuple[Block, str]:
    """Find a place for a block whose node agent is gone: its own node if that lives, else the tightest that has room.

    Args:
        block: where it was.
        nodes: that live as far as Ray knows, by its ids.
        is_silent: its own node sent no message: it may be cut off, which Ray takes a minute to notice.

    Returns:
        The block on its node, and Ray's id of that.

    Raises:
        PlacementError: no node has room, with what each is short of.
    """
    own = {node_id for node_id, node in nodes.items() if node.name == block.node}
    room = {node_id for node_id, node in nodes.items() if not _shortfall(block, node)}
    candidates = room if is_silent else room | own  # what it held there may not be reported as free yet
    if candidates:
        node_id = min(
            candidates,
            key=lambda each: ((each in own) == is_silent, nodes[each].num_free(block.device_kind), nodes[each].name),
        )
        return replace(block, node=nodes[node_id].name), node_id
    raise PlacementError(
        f"{block.name} has lost its node {block.node}, and no other has room for it:",
        tuple(sorted(_shortfall(block, node) for node in nodes.values())),
        changes=("start the node again, or another one like it",),
    )


def _check_room(connection: Connection, blocks: Sequence[Block], nodes: Mapping[str, str]) -> None:
    """Refuse what no wait can bring: Ray finds that out too, but a sum over the cluster would not."""
    wanted: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for block in blocks:
        for kind, amount in needs_of(block).items():
            wanted[block.node][kind] += amount
    totals = {node["NodeID"]: node["Resources"] for node in connection.ray.nodes() if node["Alive"]}
    short = [
        f"{name}: has {totals.get(nodes[name], {}).get(kind, 0):g} {kind}, needs {amount:g}"
        for name, needs in wanted.items()
        for kind, amount in needs.items()
        if totals.get(nodes[name], {}).get(kind, 0) < amount
    ]
    if short:
        raise PlacementError("the plan asks nodes for more than they have:", tuple(short))


def _ask(ray: Any, block: Block, node: str, run_name: str) -> Reservation:
    group = ray.util.placement_group(
        [needs_of(block)],
        strategy="STRICT_PACK",
        name=f"{run_name}/{block.name} {secrets.token_hex(4)}",
        # Exactly the node of the plan: what Ray would choose may leave no room for the next block.
        bundle_label_selector=[{"ray.io/node-id": node}],
    )
    return Reservation(block, group)


async def _wait_created(ray: Any, each: Reservation, node: str) -> None:
    while (table := await _table(ray, each))["state"] != "CREATED":
        if table["stats"]["scheduling_state"] == "INFEASIBLE":
            if not await asyncio.to_thread(is_node_alive, ray, node):
                raise PeerFailedError(each.block.name, f"its node {each.block.node} was lost")
            needs = ", ".join(f"{amount:g} {kind}" for kind, amount in needs_of(each.block).items())
            raise PlacementError(f"{each.block.name} needs {needs} on {each.block.node}, which can never have that")
        await asyncio.sleep(_POLL_S)
    if (found := table["bundles_to_node_id"][0]) != node:
        raise PlacementError(f"{each.block.name} was planned on {each.block.node}, and Ray placed it on {found}")


async def _table(ray: Any, each: Reservation) -> dict[str, Any]:
    return dict(await asyncio.to_thread(ray.util.placement_group_table, each.group))


async def _open(ray: Any, each: Reservation, node: str, run_name: str) -> None:
    """Start the node agent of a block, and check that it is where it should be and has what it should."""
    block = each.block
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        each.group, placement_group_bundle_index=0, placement_group_capture_child_tasks=False
    )
    resources: dict[str, Any] = {"resources": {block.device_kind: block.num_devices}} if block.num_devices else {}
    if block.device_kind == "GPU":  # Ray has an argument of its own for this kind
        resources = {"num_gpus": block.num_devices}
    actor = start_agent(ray, f"{run_name}/{block.name}", strategy, num_cpus=needs_of(block).get("CPU", 0), **resources)
    each.agent = RayLink(ray, actor, node, block.node)
    try:
        where = decode(await actor.whereabouts.remote(), AgentLocation)
    except ray.exceptions.RayError as error:
        raise PeerFailedError(block.name, await each.agent.explain_loss(error)) from error
    each.agent.address = where.address
    each.devices, each.is_ready = tuple(where.devices), True
    if where.node != node or len(where.devices) != block.num_devices:
        raise PlacementError(
            f"{block.name} was planned with {block.num_devices} devices on {block.node}, and its process has "
            f"{len(where.devices)} on {where.address}"
        )


async def _explain_missed(
    connection: Connection, held: Sequence[Reservation], nodes: Mapping[str, str], deadline_s: float
) -> DeadlineError:
    """Return what was waited for; Ray itself, if it does not answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_EXPLAIN_S):
            return await asyncio.to_thread(_describe_wait, connection, held, nodes, deadline_s)
    return unanswered(deadline_s)


def unanswered(deadline_s: float) -> DeadlineError:
    """Return the error to raise when Ray has not said in time what it has."""
    advice = "does the head of its cluster live, and can it be reached?"
    return DeadlineError("placing what the plan asks for", "Ray's head to answer", deadline_s, advice)


def _describe_wait(
    connection: Connection, held: Sequence[Reservation], nodes: Mapping[str, str], deadline_s: float
) -> DeadlineError:
    free = connection.nodes()
    waiting = []
    for each in held:
        state = connection.ray.util.placement_group_table(each.group)["state"]
        if state != "CREATED":
            waiting.append(f"{each.block.name} ({_explain_wait(each.block, free.get(nodes[each.block.node]))})")
    unready = [f"{each.block.name} on {each.block.node}" for each in held if not each.is_ready]
    on = ", ".join(waiting) or f"the node agents of {', '.join(unready)}"
    advice = "another run holds what is missing; everything has been released; or raise cluster.place_timeout_s"
    return DeadlineError(f"placing {len(held)} blocks", on, deadline_s, advice)


def _explain_wait(block: Block, node: Node | None) -> str:
    if node is None:
        return f"its node {block.node} is gone"
    return _shortfall(block, node) or f"its place on {block.node}"


def _shortfall(block: Block, node: Node) -> str:
    """Return what a node is short of for a block; "" when it has room."""
    if block.num_devices > (num_free := node.num_free(block.device_kind)):
        return f"{block.num_devices} {block.device_kind} on {node.name}, which has {num_free} free"
    if block.num_cpus > node.num_cpus:
        return f"{block.num_cpus:g} CPUs on {node.name}, which has {node.num_cpus:g} free"
    if block.memory_bytes > node.memory_bytes:
        return f"{block.memory_bytes / 2**30:.1f} GiB on {node.name}, which has {node.memory_bytes / 2**30:.1f} free"
    return ""
