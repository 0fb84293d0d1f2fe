"""Reads a rank's collectives from torch's flight recorder, and finds where two ranks part ways."""

import os
import pickle
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from offbeat_testing._ranks._report import Collective, RankState

# Frames of these say how a collective was issued, not who asked for it.
LIBRARY = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/", "/torch/_", "/offbeat_mesh/", "/contextlib.py")
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
        lines = [f"first difference of the collectives: number {self.sequence} of {self._group_name()}"]
        for rank, collective in self.by_rank.items():
            lines.append(f"  rank {rank}: {collective or 'never came to it'}")
        return "\n".join(lines)

    def _group_name(self) -> str:
        return f"group {self.group!r}" + (f" (ranks {self.members})" if self.members else "")


def first_difference(states: Mapping[int, RankState]) -> Difference | None:
    """The earliest difference between the members of a group, or None."""
    groups = sorted({collective.group for state in states.values() for collective in state.collectives})
    found = (_difference_of(group, states) for group in groups)
    return next((difference for difference in found if difference), None)


def waiting_for_the_finished(states: Mapping[int, RankState], finished: set[int]) -> str:
    """Says which rank is in a collective that a rank which has come to the end will never join; empty if none is."""
    for rank, state in states.items():
        for one in state.collectives if rank not in finished else ():
            if one.finished:
                continue
            members = set(state.members.get(one.group, ())) & finished
            absent = sorted(
                member for member in members if max(_numbered(one.group, states[member]), default=0) < one.sequence
            )
            if absent:
                return f"rank {rank} waits for ranks {absent}, which came to the end of the test without {one.op}"
    return ""


def _difference_of(group: str, states: Mapping[int, RankState]) -> Difference | None:
    by_rank = {rank: _numbered(group, state) for rank, state in states.items()}
    known = [state.members[group] for state in states.values() if group in state.members]
    members = known[0] if known else [rank for rank, calls in by_rank.items() if calls]
    present = {rank: by_rank[rank] for rank in members if rank in by_rank}
    if any(not calls and len(states[rank].collectives) >= RECORDED for rank, calls in present.items()):
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
    return {one.sequence: one for one in state.collectives if one.group == group}


def _signature(call: Collective | None) -> tuple[str, ...]:
    if call is None:
        return ()
    compared = AGREES.get(call.op, "inputs")
    return (call.op, *(getattr(call, compared) if compared else ()))


def recorded_collectives(since_ns: int = 0) -> list[Collective]:
    """The collectives of this process, oldest first, as far back as torch's flight recorder reaches.

    Args:
        since_ns: of `time.time_ns`. A fork has its parent's older ones too, whose groups may have had the same names.
    """
    from torch._C import _distributed_c10d as c10d

    with _without_inductor():
        # torch's own pickle, of this process's own memory: the form without stacks is the only one in JSON.
        dump = pickle.loads(
            c10d._dump_fr_trace(includeCollectives=True, includeStackTraces=True, onlyActive=False)  # type: ignore[attr-defined]
        )
    entries = [entry for entry in dump.get("entries", []) if entry["time_created_ns"] >= since_ns]
    return [_collective(entry) for entry in entries if not entry["is_p2p"]]


def group_members() -> dict[str, list[int]]:
    """Global ranks of each group that this process is in, by torch's name of the group."""
    from torch.distributed.distributed_c10d import _world

    # A group without this process has a placeholder for its key, and no name.
    return {_world.pg_names[it]: sorted(ranks) for it, ranks in _world.pg_group_ranks.items() if it in _world.pg_names}


def _collective(entry: dict[str, object]) -> Collective:
    def tensors(side: str) -> list[str]:
        return [
            f"{DTYPES.get(str(dtype), str(dtype).lower())}{list(shape)}"
            for shape, dtype in zip(entry[f"{side}_sizes"], entry[f"{side}_dtypes"], strict=False)  # type: ignore[call-overload]
        ]

    return Collective(
        group=str(entry["process_group"][0]),  # type: ignore[index]
        sequence=int(entry["collective_seq_id"]),  # type: ignore[call-overload]
        op=str(entry["profiling_name"]).partition(":")[2],
        inputs=tensors("input"),
        outputs=tensors("output"),
        site=_site(entry["frames"]),  # type: ignore[arg-type]
        finished=bool(entry["retired"]),
    )


def _site(frames: list[dict[str, object]]) -> str:
    """The innermost frame outside of the libraries."""
    callers = [frame for frame in frames if not any(part in str(frame["filename"]) for part in LIBRARY)]
    if not (callers or frames):
        return "an unknown place"
    frame = (callers or frames)[0]
    filename = str(frame["filename"]).removeprefix(f"{os.getcwd()}/")
    return f"{filename}:{frame['line']} in {frame['name']}"


@contextmanager
def _without_inductor() -> Iterator[None]:
    """Keep torch 2.13 from importing inductor (3 s) to name the frames of compiled code, of which there are none."""
    name = "torch._inductor.codecache"
    if name in sys.modules:
        yield
        return
    parent_is_stub = "torch._inductor" not in sys.modules
    stub = types.ModuleType(name)
    stub.PyCodeCache = types.SimpleNamespace(stack_frames_for_code=lambda path, line: None)  # type: ignore[attr-defined]
    sys.modules[name] = stub
    sys.modules.setdefault("torch._inductor", types.ModuleType("torch._inductor"))
    try:
        yield
    finally:
        # The liveness monitor does the same in its thread: what it has removed is gone.
        sys.modules.pop(name, None)
        if parent_is_stub:
            sys.modules.pop("torch._inductor", None)
