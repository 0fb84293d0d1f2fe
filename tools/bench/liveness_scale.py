"""Cost of the leader's look in pure code, at real sizes: snapshots written and read as JSON, the graph, the verdict.

    python tools/bench/liveness_scale.py [--ranks 1024] [--groups 8 30] [--json]

One rank never comes to an all_reduce of the world; all others wait in it. `full_s` reads all heads in full, as a small
run does; `brief_s` reads all in brief and the few that matter in full. `answer_ms` is what one process spends on its
own answer. No network: bodies are handed over in memory.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.harness import parser_of, show

from offbeat_liveness._diagnosis import find_verdict
from offbeat_liveness._diagnosis.graph import WaitGraph
from offbeat_liveness._network.survey import choose_few, read_summary, summary_data
from offbeat_liveness._process.snapshot import (
    CallSite,
    Collective,
    GroupSnapshot,
    ProcessSnapshot,
    ThreadSnapshot,
    Wait,
    from_data,
    to_data,
)

STALL_AFTER_S = 60.0
RECENT = 32
USED_GROUPS = 6


def a_stack(depth: int) -> tuple[CallSite, ...]:
    """Make frames as long as those of a training script."""
    return tuple(
        CallSite(file=f"/home/user/project/src/training/module_{each}.py", line=each, function=f"Trainer.step_{each}")
        for each in range(depth)
    )


def a_group(name: str, ranks: tuple[int, ...], *, entered: int, is_used: bool, is_pending: bool) -> GroupSnapshot:
    """Return one that has had many collectives, or none."""
    recent = tuple(
        Collective(
            group=name,
            seq=seq,
            op="all_reduce",
            inputs=("Float[4096, 4096]",),
            outputs=("Float[4096, 4096]",),
            done=seq < entered or not is_pending,
            created_ns=1_700_000_000_000_000_000 + seq,
            thread=7,
            backend="nccl",
            call_site=a_stack(1)[0],
        )
        for seq in range(max(1, entered - RECENT + 1), entered + 1)
    )
    return GroupSnapshot(
        name=name, ranks=ranks, axes=("dp",), backend="nccl", entered=entered if is_used else 0, timeout_s=600.0,
        recent=recent if is_used else (), size=len(ranks),
    )  # fmt: skip


def a_head(rank: int, size: int, num_groups: int, absent: int) -> ProcessSnapshot:
    """Make the snapshot of one rank: the world, and groups of 8 neighbours or of each eighth."""
    everybody, near = tuple(range(size)), tuple(range(rank - rank % 8, rank - rank % 8 + 8))
    far = tuple(range(rank % 8, size, 8))
    is_waiting = rank != absent
    groups = [a_group("0", everybody, entered=500 if is_waiting else 499, is_used=True, is_pending=is_waiting)]
    for number in range(1, num_groups):
        ranks = near if number % 2 else far
        groups.append(a_group(str(number), ranks, entered=400, is_used=number < USED_GROUPS, is_pending=False))
    stack = a_stack(12)
    wait = Wait(kind="collective", what="all_reduce", age_s=75.0, group="0", seq=500, stack=stack)
    return ProcessSnapshot(
        key=f"host-{rank // 8}:{1000 + rank}", name=f"rank {rank}", rank=rank, world="w", world_size=size,
        pid=1000 + rank, host=f"host-{rank // 8}", time_s=1.7e9, still_s=75.0, waits=(wait,) if is_waiting else (),
        groups=tuple(groups), threads=(ThreadSnapshot(name="MainThread", still_s=75.0, stack=stack),),
    )  # fmt: skip


def look_in_full(bodies: Sequence[str]) -> tuple[Any, int]:
    """Read all heads, and decide; the verdict and the number of bytes."""
    heads = [from_data(ProcessSnapshot, json.loads(each)) for each in bodies]
    return find_verdict(WaitGraph(heads=heads, stall_after_s=STALL_AFTER_S)), sum(map(len, bodies))


def look_in_brief(briefs: Sequence[str], bodies: Sequence[str]) -> tuple[Any, int]:
    """Return the same in two rounds; `bodies` are read only where they are asked for."""
    heads = [read_summary(json.loads(each))[0] for each in briefs]
    few = set(choose_few(WaitGraph(heads=heads, stall_after_s=STALL_AFTER_S)))
    full = [
        from_data(ProcessSnapshot, json.loads(bodies[number])) if head.name in few else head
        for number, head in enumerate(heads)
    ]
    num_bytes = sum(map(len, briefs)) + sum(
        len(bodies[number]) for number, head in enumerate(heads) if head.name in few
    )
    return find_verdict(WaitGraph(heads=full, stall_after_s=STALL_AFTER_S)), num_bytes


def measure(num_ranks: int, num_groups: int) -> dict[str, float]:
    """Return one row.

    Raises:
        AssertionError: the two ways do not come to the same verdict.
    """
    absent = num_ranks // 2 + 1
    heads = [a_head(rank, num_ranks, num_groups, absent) for rank in range(num_ranks)]
    bodies = [json.dumps(to_data(head)) for head in heads]
    began_s = time.perf_counter()
    briefs = [json.dumps(summary_data(head)) for head in heads]
    answered_s = time.perf_counter()
    in_brief, brief_bytes = look_in_brief(briefs, bodies)
    brief_s = time.perf_counter() - answered_s
    began_full_s = time.perf_counter()
    in_full, full_bytes = look_in_full(bodies)
    full_s = time.perf_counter() - began_full_s
    assert in_full is not None
    assert in_brief is not None
    assert (
        (in_full.kind, in_full.missing) == (in_brief.kind, in_brief.missing) == ("missing-member", (f"rank {absent}",))
    )
    return {
        "ranks": num_ranks,
        "groups": num_groups,
        "full_s": full_s,
        "full_mb": full_bytes / 1e6,
        "brief_s": brief_s,
        "brief_mb": brief_bytes / 1e6,
        "answer_ms": (answered_s - began_s) / num_ranks * 1e3,
    }


def main() -> None:
    """Print one row for each number of groups."""
    parser = parser_of(__doc__, ranks=1024)
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 30])
    options = parser.parse_args()
    show([measure(options.ranks, each) for each in options.groups], as_json=options.json)


if __name__ == "__main__":
    main()
