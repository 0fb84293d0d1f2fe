"""Time of placement on a large cluster, and how often it is exact there.

    python tools/bench/placement.py [--nodes 512] [--repeats 5] [--random 1000] [--json]

A time is that of `plan_placement` as a user calls it: search, numbering of every rank and the independent check of the
plan; for a refusal the search for changes that would fit. The median of the repeats counts. With `--random N` as many
clusters and demands are drawn: 64 to N nodes, free at random or whole, two to four widths of 1 to 8 or 16, with nine
tenths to all of the devices asked for, or cut so that nothing is left over, or one unit more than that; half of them
with CPUs a rank, a third with groups that share devices. Counted is how many were decided: a plan, or a proof that
there is none.
"""

import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.harness import parser_of, show

from offbeat_core import PlacementError
from offbeat_placement import Node, RankGroup, grid_nodes, plan_placement
from offbeat_placement._planner import find_plan

Case = tuple[str, list[Node], list[RankGroup]]


def group(role: str, num_replicas: int, width: int, **more: object) -> RankGroup:
    """Return a group of replicas of one stage."""
    return RankGroup(role=role, num_replicas=num_replicas, tensor_parallel=width, **more)  # type: ignore[arg-type]


def partly_free(num_nodes: int, rng: random.Random, size: int = 8) -> list[Node]:
    """Make nodes with some devices in use, and with CPUs and memory that differ on each."""
    return [
        Node(
            name=f"node-{number}",
            free={"GPU": tuple(sorted(rng.sample(range(size), rng.randint(0, size))))},
            total={"GPU": size},
            num_cpus=rng.randint(16, 128),
            memory_bytes=rng.randint(2**36, 2**40),
        )
        for number in range(num_nodes)
    ]


def cases(num_nodes: int) -> list[Case]:
    """Return what is timed."""
    nodes, half = grid_nodes(num_nodes, 8), num_nodes // 2
    taken = partly_free(num_nodes, random.Random(0))
    fours = sum(node.num_free("GPU") // 4 for node in taken)
    ones = sum(node.num_free("GPU") % 4 for node in taken)
    shared = {"shares_devices_with": "trainer"}
    return [
        (
            "trainer and engines of 4, all devices",
            nodes,
            [group("trainer", 8 * half, 1), group("rollout", 2 * half, 4)],
        ),
        (
            "colocated, engines of 8",
            nodes,
            [group("trainer", num_nodes * 8, 1), group("rollout", num_nodes, 8, **shared)],
        ),
        ("taken at random, nothing left over", taken, [group("trainer", ones, 1), group("rollout", fours, 4)]),
        ("taken at random, one engine too many", taken, [group("trainer", ones, 1), group("rollout", fours + 1, 4)]),
        ("taken at random, 4 CPUs a rank", taken, [group("rollout", fours // 2, 4, cpus_per_rank=4)]),
        ("widths 3 + 5, nothing left over", nodes, [group("a", num_nodes, 5), group("b", num_nodes, 3)]),
        ("widths 3 + 5, one too many", nodes, [group("a", num_nodes, 5), group("b", num_nodes + 1, 3)]),
        ("widths 5, 3, 2", nodes, [group("a", half, 5), group("b", num_nodes, 3), group("c", half, 2)]),
        (
            "engines of 16 on whole nodes",
            nodes,
            [group("trainer", 8 * half, 1), group("x", half // 2, 16, spans_nodes=True)],
        ),
        ("engines of 16, not asked for", nodes, [group("trainer", 8 * half, 1), group("x", half // 2, 16)]),
    ]


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Time one case."""
    name, nodes, groups = case
    seconds, outcome = [], ""
    for _ in range(repeats):
        start_s = time.perf_counter()
        try:
            plan_placement(nodes, groups)
            outcome = "plan"
        except PlacementError as error:
            outcome = f"refused, {len(error.changes)} changes that fit"
        seconds.append(time.perf_counter() - start_s)
    num_ranks = sum(each.num_ranks for each in groups)
    return {"case": name, "ranks": num_ranks, "outcome": outcome, "median_s": statistics.median(seconds)}


def random_case(rng: random.Random, most_nodes: int) -> tuple[list[Node], list[RankGroup]]:
    """Return a cluster, and widths that nearly fill it."""
    size = rng.choice([8, 8, 16])
    num_nodes = rng.randint(min(64, most_nodes), most_nodes)
    nodes = partly_free(num_nodes, rng, size) if rng.random() < 0.5 else grid_nodes(num_nodes, size)
    widths = rng.sample(range(1, size + 1), rng.randint(2, 4))
    counts = (_cut_up if rng.random() < 0.5 else _nearly_all)(rng, nodes, widths)
    cpus = rng.choice([0, 0, 2, 6])
    return nodes, [
        group(
            f"w{width}",
            max(1, count),
            width,
            cpus_per_rank=cpus,
            shares_devices_with=f"w{widths[0]}" if place and rng.random() < 0.2 else "",
        )
        for place, (width, count) in enumerate(zip(widths, counts, strict=True))
    ]


def _cut_up(rng: random.Random, nodes: Sequence[Node], widths: Sequence[int]) -> list[int]:
    counts = [0] * len(widths)
    for node in nodes:
        left = node.num_free("GPU")
        while fitting := [place for place, width in enumerate(widths) if width <= left]:
            place = rng.choice(fitting)
            counts[place] += 1
            left -= widths[place]
    if rng.random() < 0.5:
        counts[rng.randrange(len(counts))] += 1
    return counts


def _nearly_all(rng: random.Random, nodes: Sequence[Node], widths: Sequence[int]) -> list[int]:
    free = sum(node.num_free("GPU") for node in nodes) * rng.choice([0.9, 0.97, 1.0])
    parts = [rng.random() for _ in widths]
    return [int(free * part / sum(parts) / width) for part, width in zip(parts, widths, strict=True)]


def decide(num_cases: int, most_nodes: int) -> tuple[Counter[str], float]:
    """Return the outcomes of random cases, and the longest time of one."""
    rng, outcomes, longest_s = random.Random(0), Counter[str](), 0.0
    for _ in range(num_cases):
        nodes, groups = random_case(rng, most_nodes)
        start_s = time.perf_counter()
        found = find_plan(nodes, groups)
        longest_s = max(longest_s, time.perf_counter() - start_s)
        outcomes["plan" if found.plan else "proven impossible" if found.proven else "undecided"] += 1
    return outcomes, longest_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser_of(__doc__, nodes=512, repeats=5, random=1000).parse_args(arguments)
    show([measure(case, options.repeats) for case in cases(options.nodes)], as_json=options.json)
    outcomes, longest_s = decide(options.random, options.nodes)
    show([{**outcomes, "longest_s": longest_s}], as_json=options.json, title=f"{options.random} random cases")


if __name__ == "__main__":
    main()
