"""Reports of a rank to the test's process, as lines of JSON: how it ended, where it is; where two ranks part ways."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from offbeat_liveness import Collective, settled_collectives

Outcome = Literal["passed", "failed", "expected", "skipped"]


class RankState(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """State of a rank: its collectives, the members of its groups and the stacks of its threads.

    `collectives` is None while a thread of the rank used its groups, so that they could not be read.
    """

    collectives: list[Collective] | None = []
    members: dict[str, list[int]] = {}
    stacks: str = ""


class RankReport(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """End of the body on one rank, when on the clock that all share, and the rank's state.

    `text` is the traceback or the reason of a skip; "expected" is a failure that the test's xfail mark allows.
    """

    outcome: Outcome
    text: str
    at_s: float
    state: RankState


class RankVerdict(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Verdict of the liveness monitor about all ranks, asked on one of them; empty if it sees nothing stuck."""

    text: str


Message = RankReport | RankState | RankVerdict
DECODER: Final = msgspec.json.Decoder(Message)


def to_line(message: Message) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def from_line(line: bytes) -> Message:
    message: Message = DECODER.decode(line)
    return message


PATIENCE_S: Final = 0.5
# Ops whose members may hold tensors of different shapes, and what of them must agree all the same.
AGREES = {"gather": "inputs", "scatter": "outputs", "all_to_all": "", "alltoall": "", "alltoall_base": ""}
# How many collectives torch's flight recorder keeps.
RECORDED = int(os.environ.get("TORCH_FR_BUFFER_SIZE", "2000"))
# torch's C++ names.
DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Int": "int32", "Long": "int64", "Char": "int8"}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first collective of a group at which two ranks differ; None for a rank that never came to it."""

    group: str
    members: list[int]
    sequence: int
    by_rank: dict[int, Collective | None]

    def __str__(self) -> str:
        name = f"group {self.group!r}" + (f" (ranks {self.members})" if self.members else "")
        lines = [f"first difference of the collectives: number {self.sequence} of {name}"]
        for rank, collective in self.by_rank.items():
            lines.append(f"  rank {rank}: {_call_text(collective) if collective else 'never came to it'}")
        return "\n".join(lines)


def _call_text(call: Collective) -> str:
    """Return it with Python's dtypes and a relative path: all_reduce(float32[3]) at test_it.py:7 in step."""
    tensors = [text.partition("[") for text in call.inputs or call.outputs]
    shapes = ", ".join(f"{DTYPES.get(dtype, dtype.lower())}[{shape}" for dtype, _, shape in tensors)
    site = str(call.call_site).removeprefix(f"{os.getcwd()}/") if call.call_site else "an unknown place"
    return f"{call.op}({shapes}) at {site}"


def first_difference(states: Mapping[int, RankState]) -> Difference | None:
    """Return the earliest difference between the members of a group, or None."""
    states = {rank: state for rank, state in states.items() if state.collectives is not None}
    groups = sorted({collective.group for state in states.values() for collective in state.collectives or ()})
    found = (_difference_of(group, states) for group in groups)
    return next((difference for difference in found if difference), None)


def waiting_for_the_finished(states: Mapping[int, RankState], finished: set[int]) -> str:
    """Says which rank is in a collective that a rank which has come to the end will never join; empty if none is."""
    read = {rank for rank, state in states.items() if state.collectives is not None}
    for rank, state in states.items():
        for one in state.collectives or () if rank not in finished else ():
            if one.done:
                continue
            members = set(state.members.get(one.group, ())) & finished & read
            absent = sorted(
                member for member in members if max(_numbered(one.group, states[member]), default=0) < one.seq
            )
            if absent:
                return f"rank {rank} waits for ranks {absent}, which came to the end of the test without {one.op}"
    return ""


def _difference_of(group: str, states: Mapping[int, RankState]) -> Difference | None:
    by_rank = {rank: _numbered(group, state) for rank, state in states.items()}
    known = [state.members[group] for state in states.values() if group in state.members]
    members = known[0] if known else [rank for rank, calls in by_rank.items() if calls]
    present = {rank: by_rank[rank] for rank in members if rank in by_rank}
    if any(not calls and len(states[rank].collectives or ()) >= RECORDED for rank, calls in present.items()):
        return None  # its calls in this group may have been there, and are forgotten
    # The recorder keeps the last ones only: start where all ranks still have them.
    first = max((min(calls) for calls in present.values() if calls), default=1)
    last = max((max(calls) for calls in present.values() if calls), default=0)
    for sequence in range(first, last + 1):
        calls = {rank: numbered.get(sequence) for rank, numbered in present.items()}
        if len({_signature(call) for call in calls.values()}) > 1:
            return Difference(group=group, members=members, sequence=sequence, by_rank=calls)
    return None


def _numbered(group: str, state: RankState) -> dict[int, Collective]:
    return {one.seq: one for one in state.collectives or () if one.group == group}


def _signature(call: Collective | None) -> tuple[str, ...]:
    if call is None:
        return ()
    compared = AGREES.get(call.op, "inputs")
    return (call.op, *(getattr(call, compared) if compared else ()))


def recorded_collectives(since_ns: int = 0, *, patience_s: float = PATIENCE_S) -> list[Collective] | None:
    """Return the collectives of this process since a `time.time_ns`, as far back as torch's flight recorder goes.

    A fork has its parent's older ones too, whose groups may have had the same names. None when there was no moment in
    which no thread makes or uses a group: torch allows no read while another thread writes.
    """
    entries = settled_collectives(patience_s=patience_s)
    return entries and [each for each in entries if each.created_ns >= since_ns and each.peer is None]


def group_members() -> dict[str, list[int]]:
    """Global ranks of each group that this process is in, by torch's name of the group."""
    from torch.distributed.distributed_c10d import _world

    # A group without this process has a placeholder for its key, and no name.
    return {_world.pg_names[it]: sorted(ranks) for it, ranks in _world.pg_group_ranks.items() if it in _world.pg_names}
