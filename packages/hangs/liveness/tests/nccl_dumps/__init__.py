"""Dumps as nccl's recorder writes them, made without a device.

The format is "2.10" in torch 2.11 as in 2.13: the fields and their order of `getCollectiveTrace` and `dump` in
torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, the entries as `collective`, `pointToPoint`, `endCoalescing` and
`initWork` of torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp record them: calls within a coalesced region without
events (so "scheduled" for ever), then one entry that closes it, which has the events, no tensors, the `op_id` of the
last call, and is no p2p even where its calls are.
"""

from dataclasses import dataclass, field
from typing import Any

VERSION = "2.10"
CREATED_NS = 1_700_000_000_000_000_000
THREAD = 140168719653760
SHAPE = [4, 8]

Dump = dict[str, Any]


@dataclass
class GroupCounters:
    seq: int = 0
    p2p: int = 0
    op: int = 0


@dataclass
class RankRecorder:
    """Writes the dump of one rank.

    Args:
        rank: global.
        groups: global ranks of the members by torch's name of the group.
    """

    rank: int
    groups: dict[str, list[int]]
    entries: list[dict[str, Any]] = field(default_factory=list)
    counters: dict[str, GroupCounters] = field(default_factory=dict)

    def collective(self, op: str, group: str = "0", *, state: str = "completed", shape: list[int] = SHAPE) -> None:
        count = self._count(group)
        count.seq += 1
        count.op += 1
        self._record(group, op, state=state, shape=shape)

    def transfer(self, op: str, peer: int, group: str = "0", *, state: str = "completed") -> None:
        """One send or recv by itself; `peer` counts within the group."""
        count = self._count(group)
        count.p2p += 1
        count.op += 1
        self._record(group, self._way(op, peer, group), state=state, is_p2p=True)

    def batch(self, *calls: tuple[str, int], group: str = "0", state: str = "completed") -> None:
        count = self._count(group)
        count.p2p += 1
        for op, peer in calls:
            count.op += 1
            self._record(group, self._way(op, peer, group), state="scheduled", is_p2p=True, has_events=False)
        self._record(group, "coalesced", state=state, shape=None)

    def coalesced(self, *ops: str, group: str = "0", state: str = "completed") -> None:
        count = self._count(group)
        count.seq += 1
        for op in ops:
            count.op += 1
            self._record(group, op, state="scheduled", has_events=False)
        self._record(group, "coalesced", state=state, shape=None)

    def dump(self) -> Dump:
        """What `_dump_nccl_trace` returns, unpickled."""
        own = {name: ranks for name, ranks in self.groups.items() if self.rank in ranks}
        config = {name: {"name": name, "desc": _desc(name), "ranks": str(ranks)} for name, ranks in own.items()}
        return {
            "version": VERSION,
            "pg_config": config,
            "comm_lib_version": "2.27.5",
            "pg_status": {},
            "entries": self.entries,
        }

    def _count(self, group: str) -> GroupCounters:
        return self.counters.setdefault(group, GroupCounters())

    def _way(self, op: str, peer: int, group: str) -> str:
        own = self.groups[group].index(self.rank)
        return f"{op} {own}{'->' if op == 'send' else '<-'}{peer}"

    def _record(
        self,
        group: str,
        op: str,
        *,
        state: str,
        shape: list[int] | None = SHAPE,
        is_p2p: bool = False,
        has_events: bool = True,
    ) -> None:
        count, number = self._count(group), len(self.entries)
        is_over = state == "completed" and has_events
        sizes, dtypes = ([shape], ["Float"]) if shape else ([], [])
        created_ns = CREATED_NS + number
        self.entries.append(
            {
                "frames": [],
                "record_id": number,
                "pg_id": list(self.groups).index(group),
                "process_group": (group, _desc(group)),
                "thread_name": "python",
                "thread_id": str(THREAD),
                "collective_seq_id": count.seq,
                "p2p_seq_id": count.p2p,
                "op_id": count.op,
                "profiling_name": f"nccl:{op}",
                "time_created_ns": created_ns,
                "input_sizes": sizes,
                "input_dtypes": dtypes,
                "output_sizes": sizes,
                "output_dtypes": dtypes,
                "state": state,
                "time_discovered_started_ns": created_ns if state != "scheduled" else None,
                "time_discovered_completed_ns": created_ns if is_over else None,
                "retired": is_over,
                "timeout_ms": 600000,
                "is_p2p": is_p2p,
            }
        )


def _desc(group: str) -> str:
    return "default_pg" if group == "0" else f"mesh_{group}"


def ranks_of(size: int, **groups: list[int]) -> list[RankRecorder]:
    all_groups = {"0": list(range(size)), **groups}
    return [RankRecorder(rank, all_groups) for rank in range(size)]


def missing_member() -> list[Dump]:
    """Rank 2 has never come to the fourth all_reduce."""
    ranks = ranks_of(3)
    for each in ranks:
        for _ in range(3):
            each.collective("all_reduce")
        if each.rank != 2:
            each.collective("all_reduce", state="scheduled")
    return [each.dump() for each in ranks]


def crossed_groups() -> list[Dump]:
    """Rank 0 is in its second call of "tp" and rank 1 in its second of "dp", which comes first for no other."""
    ranks = ranks_of(2, tp=[0, 1], dp=[0, 1])
    for each in ranks:
        each.collective("all_reduce", "tp")
        each.collective("all_reduce", "dp")
    ranks[0].collective("all_gather", "tp", state="scheduled")
    ranks[1].collective("all_gather", "dp", state="scheduled")
    return [each.dump() for each in ranks]


def different_ops() -> list[Dump]:
    """Rank 1 reduces where the others gather."""
    ranks = ranks_of(3)
    for each in ranks:
        each.collective("all_reduce")
        each.collective("broadcast" if each.rank == 1 else "all_reduce", state="scheduled")
    return [each.dump() for each in ranks]


def hung_batch() -> list[Dump]:
    """Ranks 0 and 1 of a pipeline exchange with rank 2, which has stopped after the collective before."""
    ranks = ranks_of(3, pp=[0, 1, 2])
    for each in ranks:
        each.collective("all_reduce", "pp")
    ranks[0].batch(("send", 1), ("recv", 1), group="pp")
    ranks[1].batch(("recv", 0), ("send", 0), group="pp")
    ranks[1].batch(("send", 2), ("recv", 2), group="pp", state="scheduled")
    return [each.dump() for each in ranks]


def missing_in_coalesced() -> list[Dump]:
    """Rank 2 has never come to a coalesced region of two collectives; another region went well before."""
    ranks = ranks_of(3)
    for each in ranks:
        each.coalesced("all_reduce", "all_reduce")
        if each.rank != 2:
            each.coalesced("all_reduce", "all_reduce", state="scheduled")
    return [each.dump() for each in ranks]


def started_and_stuck() -> list[Dump]:
    """Every member has begun the same call, and none has ended it."""
    ranks = ranks_of(2)
    for each in ranks:
        each.collective("all_reduce")
        each.collective("all_reduce", state="started")
    return [each.dump() for each in ranks]
