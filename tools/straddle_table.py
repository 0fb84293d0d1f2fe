"""Counts engines that straddle nodes when Ray packs one bundle per device, and when offbeat places each as one block.

    python tools/straddle_table.py [--trials 5] [--seed 0]

Starts a Ray cluster of ten nodes of 8 accelerators on this machine (processes of Ray, accelerators in its books only).
Takes some minutes, of which most is starting the nodes.
"""

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from offbeat_actors import ClusterConfig
from offbeat_actors.ray._cluster import Connection, import_ray
from offbeat_actors.ray._reservation import Reservation, hold, release
from offbeat_placement import RankGroup, plan_blocks, plan_placement
from offbeat_testing import ray_nodes
from offbeat_types import PlacementError

NUM_NODES = 10
PER_NODE = 8
TENSOR_PARALLEL = 4
NUM_BUNDLES = (16, 17, 24, 32, 64)
DEADLINE_S = 30.0


@dataclass
class Row:
    """What happened to placements of one size, summed over the trials.

    Args:
        num_bundles: devices wanted, one bundle each when packed.
        occupied: whether part of the cluster was taken, at random.
    """

    num_bundles: int
    occupied: bool
    trials: int = 0
    engines: int = 0
    packed_straddling: int = 0
    packed_bad: int = 0
    ours_engines: int = 0
    ours_straddling: int = 0
    ours_refused: int = 0

    def __str__(self) -> str:
        cells = (
            self.num_bundles,
            "at random" if self.occupied else "none",
            f"{self.packed_straddling} of {self.engines}",
            f"{self.packed_bad} of {self.trials}",
            f"{self.ours_straddling} of {self.ours_engines}",
            self.ours_refused,
        )
        return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5, help="placements of each size with random occupancy")
    parser.add_argument("--seed", type=int, default=0, help="of the occupancy")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    print("| bundles | taken before | PACK: engines that straddle | placements hit | blocks: straddle | refused |")
    print("|---|---|---|---|---|---|")
    with cluster() as connection:
        for num_bundles in NUM_BUNDLES:
            for occupied in (False, True):
                row = Row(num_bundles, occupied)
                for _ in range(options.trials if occupied else 1):
                    spare = NUM_NODES * PER_NODE - num_bundles
                    with taken(connection, occupy(chance, spare) if occupied else {}):
                        try_both(connection, row)
                print(row, flush=True)


@contextmanager
def cluster() -> Iterator[Connection]:
    """A connection to a cluster of nodes at 127.0.0.2 and on."""
    ray = import_ray()
    with ray_nodes(NUM_NODES, num_gpus=PER_NODE) as nodes:
        try:
            ray.init(address=nodes.address, log_to_driver=False, configure_logging=False)
            yield Connection(ClusterConfig(launcher="ray", address=nodes.address))
        finally:
            ray.shutdown()


def occupy(chance: random.Random, spare: int) -> dict[str, int]:
    """How many devices of each node another run holds: at random, and together no more than can be spared."""
    held: Counter[str] = Counter()
    for _ in range(chance.randint(1, spare)):
        held[f"127.0.0.{2 + chance.randrange(NUM_NODES)}"] += 1
    return {address: min(number, PER_NODE) for address, number in held.items()}


@contextmanager
def taken(connection: Connection, held: dict[str, int]) -> Iterator[None]:
    """Hold devices as another run would."""
    util = connection.ray.util
    groups = [util.placement_group([{"GPU": number, f"node:{address}": 0.01}]) for address, number in held.items()]
    try:
        wait_created(groups)
        yield
    finally:
        give_back(connection.ray, groups)


def try_both(connection: Connection, row: Row) -> None:
    """Place engines in both ways, one after the other, and count."""
    num_engines = row.num_bundles // TENSOR_PARALLEL
    util = connection.ray.util
    packed = util.placement_group([{"GPU": 1}] * row.num_bundles, strategy="PACK")
    try:
        wait_created([packed])
        where = util.placement_group_table(packed)["bundles_to_node_id"]
    finally:
        give_back(connection.ray, [packed])
    starts = range(0, num_engines * TENSOR_PARALLEL, TENSOR_PARALLEL)
    straddling = sum(len({where[start + rank] for rank in range(TENSOR_PARALLEL)}) > 1 for start in starts)
    row.trials += 1
    row.engines += num_engines
    row.packed_straddling += straddling
    row.packed_bad += straddling > 0
    placed = asyncio.run(place(connection, num_engines))
    row.ours_refused += placed is None
    row.ours_engines += len(placed or [])
    row.ours_straddling += sum(num_nodes > 1 for num_nodes in placed or [])


async def place(connection: Connection, num_engines: int) -> list[int] | None:
    """Nodes of each engine, placed as blocks; None when the planner refuses."""
    group = RankGroup(
        role="rollout", num_replicas=num_engines, tensor_parallel=TENSOR_PARALLEL, process_per_replica=True
    )
    nodes = connection.nodes()
    try:
        plan = plan_placement(list(nodes.values()), [group])
    except PlacementError:
        return None
    held: list[Reservation] = []
    try:
        async with asyncio.timeout(DEADLINE_S):
            ids = {node.name: node_id for node_id, node in nodes.items()}
            await hold(connection, plan_blocks(plan, [group]), ids, held, run_name="table")
        table = connection.ray.util.placement_group_table
        return [len(set(table(each.group)["bundles_to_node_id"].values())) for each in held]
    finally:
        await release(connection.ray, held)
        settle(connection)


def wait_created(groups: list[Any]) -> None:
    """Wait until Ray has reserved all of them."""
    for group in groups:
        if not group.wait(DEADLINE_S):
            raise SystemExit(f"Ray did not place {group.bundle_specs} in {DEADLINE_S:g} s")


def give_back(ray: Any, groups: list[Any]) -> None:
    """Release groups, and wait until the nodes have said so."""
    for group in groups:
        ray.util.remove_placement_group(group)
    settle(Connection(ClusterConfig(launcher="ray")))


def settle(connection: Connection) -> None:
    """Wait until what the nodes report as free is what the living groups leave."""
    table = connection.ray.util.placement_group_table
    for _ in range(600):
        living = [group for group in table().values() if group["state"] != "REMOVED"]
        held = sum(bundle.get("GPU", 0) for group in living for bundle in group["bundles"].values())
        free = sum(node.num_free("GPU") for node in connection.nodes().values())
        if free == NUM_NODES * PER_NODE - held:
            return
        time.sleep(0.05)
    raise SystemExit("the nodes do not report what is free")


if __name__ == "__main__":
    main()
