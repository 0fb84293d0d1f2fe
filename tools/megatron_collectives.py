"""Every collective of a training step, a validation, an export, a checkpoint: where offbeat-engine-megatron may hang.

    python tools/megatron_collectives.py [--only WORD] [--json]

Each rank of a layout reports what torch's flight recorder and the point-to-point calls have recorded, phase by phase.
Then the tool proves that no rank can wait for another rank that never arrives:

- all members of a group issue the same collectives on it, in the same order, with tensors of the same shapes;
- the orders in which ranks come to the collectives of different groups fit together: laid end to end they have
  no cycle, so there is an order that works for all ranks even if each collective blocks;
- every message between two ranks that is sent is received, in the same order with the same shape.
"""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from bench.harness import on_ranks, parser_of, show
from megatron_layouts import Layout, engine_config, make_model
from megatron_yardstick import make_sequences, policy_loss

from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_liveness import recent_collectives
from offbeat_mesh import Mesh

LAYOUTS: Final = (
    Layout(axes={"tp": 2, "cp": 2}),
    Layout(axes={"pp": 2, "dp": 2}),
    Layout(axes={"cp": 2, "dp": 2}, options={"overlap_grad_reduce": True, "overlap_param_gather": True}),
    Layout(axes={"pp": 2, "dp": 2}, options={"virtual_pipeline": 2}),
    Layout(axes={"pp": 2}, options={"virtual_pipeline": 2, "overlap_p2p": True}),
    Layout(axes={"pp": 2, "cp": 2}, options={"mtp_layers": 1}),
    Layout(axes={"tp": 2, "cp": 2, "pp": 2}, options={"mtp_layers": 1}),
    Layout(model="qwen3-moe", axes={"tp": 2, "dp": 2, "ep": 2}),
)
PHASES: Final = ("training step", "validation", "weight export", "checkpoint")
UNEQUAL: Final = ("all_to_all", "alltoall", "alltoall_base", "gather", "scatter")
"""Members of these may bring tensors of different shapes."""

RECORDED: Final = 2000
"""Entries that the flight recorder keeps."""

Call = tuple[str, int, str, str]
"""Group, number within it, operation, shapes."""

Message = tuple[int, int, str]
"""Sender, receiver, shape."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Collectives that one rank has issued in one phase, in its order.

    Args:
        calls: collectives.
        sent: messages to others.
        received: messages from others.
    """

    calls: list[Call]
    sent: list[Message]
    received: list[Message]


def walk(engine: MegatronTrainEngine, folder: Path) -> dict[str, Seen]:
    """Run all phases twice, and return what was issued in the second turn; all ranks call it."""

    def checkpoint(turn: int) -> None:
        engine.save(folder)
        engine.load(folder)

    phases: dict[str, Callable[[int], Any]] = {
        "training step": lambda turn: (engine.forward_backward(make_sequences(turn), policy_loss), engine.step()),
        "validation": lambda turn: engine.logprobs(make_sequences(7 + turn)),
        "weight export": lambda turn: sum(1 for _ in engine.weights()),
        "checkpoint": checkpoint,
    }
    assert tuple(phases) == PHASES
    seen = {}
    for turn in range(2):
        for name, run in phases.items():
            before_ns = _last_ns()
            with _messages() as (sent, received):
                run(turn)
            seen[name] = Seen(calls=_since(before_ns), sent=sent, received=received)
    return seen


def _last_ns() -> int:
    return max((each.created_ns for each in recent_collectives()), default=0)


def _since(before_ns: int) -> list[Call]:
    """By time: names and numbers come again in a process that, or whose parent, has had other groups before."""
    new = [each for each in recent_collectives() if each.created_ns > before_ns]
    assert len(new) < RECORDED, "the recorder has forgotten the beginning of the phase"
    return [(each.group, each.seq, each.op, "" if each.op in UNEQUAL else " ".join(each.inputs)) for each in new]


@contextmanager
def _messages() -> Iterator[tuple[list[Message], list[Message]]]:
    """Write down what is sent and received between two ranks, which the flight recorder leaves out on gloo."""
    sent: list[Message] = []
    received: list[Message] = []
    own, kind = dist.get_rank(), dist.ProcessGroup
    originals = kind.send, kind.recv

    def send(group: Any, tensors: list[Any], peer: int, *rest: Any) -> Any:
        sent.append((own, dist.get_process_group_ranks(group)[peer], str(list(tensors[0].shape))))
        return originals[0](group, tensors, peer, *rest)

    def receive(group: Any, tensors: list[Any], peer: int, *rest: Any) -> Any:
        received.append((dist.get_process_group_ranks(group)[peer], own, str(list(tensors[0].shape))))
        return originals[1](group, tensors, peer, *rest)

    kind.send, kind.recv = send, receive  # type: ignore[method-assign, assignment]
    try:
        yield sent, received
    finally:
        kind.send, kind.recv = originals  # type: ignore[method-assign]


def members_of_groups() -> dict[str, list[int]]:
    """Return the global ranks of each group that this rank is in, by torch's name of it."""
    from torch.distributed.distributed_c10d import _world

    return {
        _world.pg_names[each]: sorted(ranks) for each, ranks in _world.pg_group_ranks.items() if each in _world.pg_names
    }


def prove(phase: str, seen: Mapping[int, Seen], members: Mapping[int, Mapping[str, Sequence[int]]]) -> None:
    """Raise AssertionError if a rank might wait in vain.

    Args:
        phase: for the error.
        seen: of each rank.
        members: of each rank's groups.
    """
    by_group: dict[tuple[str, tuple[int, ...]], dict[int, list[Call]]] = defaultdict(dict)
    for rank, found in seen.items():
        for group in {call[0] for call in found.calls}:
            key = group, tuple(members[rank][group])
            by_group[key][rank] = [call for call in found.calls if call[0] == group]
    for (group, ranks), calls in by_group.items():
        assert set(calls) == set(ranks), f"{phase}: group {group} of {ranks} was used by {sorted(calls)} alone"
        first = calls[ranks[0]]
        for rank in ranks[1:]:
            assert calls[rank] == first, (
                f"{phase}: rank {rank} differs on group {group}: {_difference(first, calls[rank])}"
            )
    _prove_no_circle(phase, seen, members)
    _prove_messages(phase, seen)


def _difference(one: list[Call], other: list[Call]) -> str:
    pairs = zip([*one, None], [*other, None], strict=False)
    return next((f"{a} against {b}" for a, b in pairs if a != b), f"{len(one)} calls against {len(other)}")


def _prove_no_circle(phase: str, seen: Mapping[int, Seen], members: Mapping[int, Mapping[str, Sequence[int]]]) -> None:
    before: dict[Any, set[Any]] = defaultdict(set)
    for rank, found in seen.items():
        nodes = [(group, tuple(members[rank][group]), number) for group, number, *_ in found.calls]
        for earlier, later in pairwise(nodes):
            before[later].add(earlier)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        raise AssertionError(f"{phase}: ranks come to these in opposite orders: {error.args[1]}") from error


def _prove_messages(phase: str, seen: Mapping[int, Seen]) -> None:
    sent = {rank: found.sent for rank, found in seen.items()}
    for rank, found in seen.items():
        for source in {message[0] for message in found.received} | {s for s, each in sent.items() if each}:
            came = [message for message in found.received if message[0] == source]
            went = [message for message in sent[source] if message[1] == rank]
            assert came == went, f"{phase}: rank {source} sent {went[:3]}… to rank {rank}, which received {came[:3]}…"


def count(seen: Mapping[int, Seen], members: Mapping[int, Mapping[str, Sequence[int]]]) -> tuple[int, int]:
    """Count collectives, each once however many members it has, and messages."""
    nodes = {
        (group, tuple(members[rank][group]), number) for rank, each in seen.items() for group, number, *_ in each.calls
    }
    return len(nodes), sum(len(each.sent) for each in seen.values())


def measure(layout: Layout, folder: Path) -> dict[str, tuple[int, int]]:
    """Walk a layout on forked ranks, prove it, and count.

    Raises:
        RuntimeError: a rank failed; its error is on standard error.
        AssertionError: a rank might wait in vain.
    """

    def look(rank: int, shared: Path) -> dict[str, Any]:
        engine = MegatronTrainEngine.create(engine_config(folder, layout), Mesh(**layout.axes))
        reported = notify(walk(engine, shared / "saved"))
        engine.close()
        return reported

    return judge(on_ranks(layout.num_ranks, look))


def judge(reports: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Prove all phases from the reports of the ranks (see `notify`), and count."""
    members = {rank: each["members"] for rank, each in enumerate(reports)}
    counts = {}
    for phase in PHASES:
        seen = {
            rank: Seen(**{name: [tuple(item) for item in items] for name, items in each["phases"][phase].items()})
            for rank, each in enumerate(reports)
        }
        prove(phase, seen, members)
        counts[phase] = count(seen, members)
    return counts


def notify(seen: Mapping[str, Seen]) -> dict[str, Any]:
    """Return what one rank reports to the others, as plain data."""
    phases = {
        phase: {name: [list(item) for item in items] for name, items in vars(each).items()}
        for phase, each in seen.items()
    }
    return {"members": members_of_groups(), "phases": phases}


def main() -> None:
    """Walk all layouts, or those whose name contains a word."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="walk layouts whose name holds this")
    args = parser.parse_args()
    from offbeat_engine_megatron._megatron import load_megatron

    torch.set_num_threads(1)
    load_megatron()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        models = {name: make_model(Path(folder) / name, name) for name in {each.model for each in LAYOUTS}}
        for layout in (each for each in LAYOUTS if args.only in str(each)):
            counts = measure(layout, models[layout.model])
            cells = {phase: f"{calls} + {messages} messages" for phase, (calls, messages) in counts.items()}
            rows.append({"layout": str(layout), **cells})
    show(rows, as_json=args.json)


if __name__ == "__main__":
    main()
