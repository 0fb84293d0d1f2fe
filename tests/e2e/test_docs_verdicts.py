"""A verdict that a page shows and no machine of ours can bring about is what the code says of such a run."""

from pathlib import Path
from typing import Any

from doc_blocks import blocks

from offbeat_liveness._diagnosis import find_verdict
from offbeat_liveness._diagnosis.graph import WaitGraph
from offbeat_liveness._process.flight_recorder import parse_entries
from offbeat_liveness._process.snapshot import CallSite, GroupSnapshot, ProcessSnapshot, ThreadSnapshot, Wait

PAGE, SEQ, AGE_S = Path("docs/liveness.md"), 4812, 63.0
GATHERS = ("_all_gather_base", [4096, 1024], "BFloat16", (88, "gather_layer"), (140, "step"))
REDUCES = ("all_reduce", [1], "Float", (131, "log_loss"), (132, "log_loss"))


def entry(op: str, size: list[int], dtype: str, line: int, function: str) -> dict[str, Any]:
    """Return an entry of torch's recorder of nccl, as torch 2.11 to 2.13 write it."""
    return {
        "collective_seq_id": SEQ, "p2p_seq_id": 0, "is_p2p": False, "record_id": SEQ, "op_id": SEQ, "pg_id": 0,
        "process_group": ["0", "default_pg"], "profiling_name": f"nccl:{op}", "state": "scheduled", "retired": False,
        "frames": [{"filename": "/job/train.py", "line": line, "name": function}], "thread_id": "77",
        "input_dtypes": [dtype], "input_sizes": [size], "output_dtypes": [dtype], "output_sizes": [size],
        "time_created_ns": SEQ,
    }  # fmt: skip


def rank_of_eight(rank: int) -> ProcessSnapshot:
    op, size, dtype, (line, function), (stands_at, stands_in) = GATHERS if rank == 5 else REDUCES
    recent = tuple(parse_entries([entry(op, size, dtype, line, function)]))
    group = GroupSnapshot(name="0", ranks=tuple(range(8)), backend="nccl", entered=SEQ, recent=recent)
    stack = tuple(
        CallSite(file="/job/train.py", line=at, function=name) for at, name in ((stands_at, stands_in), (190, "main"))
    )
    wait = Wait(kind="collective", what=recent[0].op, age_s=AGE_S, group="0", seq=SEQ, stack=stack)
    thread = ThreadSnapshot(name="MainThread", still_s=AGE_S, stack=stack)
    return ProcessSnapshot(
        key=f"node:{rank}", name=f"rank {rank}", rank=rank, world="w", world_size=8, pid=rank, host="node",
        groups=(group,), waits=(wait,), still_s=AGE_S, threads=(thread,),
    )  # fmt: skip


def test_the_verdict_over_nccl_is_what_eight_ranks_would_get() -> None:
    [shown] = [each.text for each in blocks(PAGE) if f"collective {SEQ} of the default group is" in each.text]
    verdict = find_verdict(WaitGraph(heads=[rank_of_eight(rank) for rank in range(8)], stall_after_s=60.0))
    assert verdict is not None
    assert verdict.is_proof
    assert without_dates(shown) == without_dates(verdict.text)


def without_dates(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("  since: ")]
