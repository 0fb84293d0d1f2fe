"""The leader's look at all processes: asks them all at once, and finds out about those that do not answer.

In a small run all send full snapshots. In a large one all send a summary (what the graph needs, without what only
people read), and then the few that a verdict will be about send full ones.

A rank may hold the GIL for minutes in native code, or its host may be busy; then its monitor is silent and nothing is
wrong. So silence counts only after several looks in which neither the process nor any descendant did anything.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from offbeat_liveness._diagnosis.graph import BUSY, AbsentProcess, Fate, WaitGraph
from offbeat_liveness._network.address_book import Key
from offbeat_liveness._network.peers import Peers
from offbeat_liveness._network.side_channel import Address, ask_all, is_refused
from offbeat_liveness._process.exceptions import read_crash
from offbeat_liveness._process.proc import HOST, TreeUsage, pid_state, rates, tree_usage
from offbeat_liveness._process.snapshot import (
    Collective,
    GroupSnapshot,
    ProcessSnapshot,
    ThreadSnapshot,
    Wait,
    from_data,
    to_data,
)

NEWEST: Final = 2
FRAMES: Final = 3
MAX_FEW: Final = 64
OLDEST_WAITS: Final = 4
PATIENT_LOOKS: Final = 3
FORGOTTEN_S: Final = 60.0  # a look this long ago says nothing about now
MOVING_CORES: Final = 0.05
# A process that exists, or about which nothing is known, may be silent for a while and be well.
PATIENT_FATES: Final[frozenset[Fate]] = frozenset(("silent", "unreachable"))
FIRST_CALL_S: Final = 0.7
SECOND_CALL_S: Final = 0.5
REFUSALS_S: Final = 0.5  # to find processes that listen no more: a busy host answers late
CALL_S_PER_PEER: Final = 0.001
FEW: Final = 64  # in a run of so many all send full snapshots at once
MAX_WITH_LEFT: Final = 16
FATE_BY_PID: Final[dict[str, Fate]] = {
    "runs": "silent", "stopped": "stopped", "gone": "killed", "unknown": "unreachable",
}  # fmt: skip


def summarize(head: ProcessSnapshot) -> ProcessSnapshot:
    """Drop stacks but the innermost frames of the oldest wait, and groups that were never used."""
    waiting = {wait.thread for wait in head.waits}
    return dataclasses.replace(
        head,
        waits=tuple(
            dataclasses.replace(wait, stack=() if number else wait.stack[:FRAMES])
            for number, wait in enumerate(head.waits)
        ),
        groups=tuple(
            _summarize_group(each) for each in head.groups if each.entered != 0 or each.recent or each.transfers
        ),
        threads=tuple(
            ThreadSnapshot(name=each.name, still_s=each.still_s) for each in head.threads if each.name in waiting
        ),
        left=(),
    )


def _summarize_group(group: GroupSnapshot) -> GroupSnapshot:
    cut = max(0, len(group.recent) - NEWEST)
    kept = [*(each for each in group.recent[:cut] if not each.done), *group.recent[cut:]]
    return dataclasses.replace(group, recent=tuple(dataclasses.replace(each, call_site=None) for each in kept))


def summary_data(head: ProcessSnapshot) -> dict[str, Any]:
    """Return a summary as it is sent: defaults left out, ranks of a group as a range where they are one."""
    data = _without_defaults(summarize(head))
    for group in data.get("groups", ()):
        ranks = group.get("ranks", ())
        if len(ranks) > NEWEST and (step := _step_of(tuple(ranks))):
            group["ranks"] = {"start": ranks[0], "step": step, "num": len(ranks)}
    data["left_keys"] = [[each.host, each.pid] for each in head.left]
    return data


def read_summary(data: Mapping[str, Any]) -> tuple[ProcessSnapshot, list[tuple[str, int]]]:
    """Return a summary from its data; and the processes whose exit notices that one received, by host and pid."""
    groups = [{**each, "ranks": _ranks(each.get("ranks", ()))} for each in data.get("groups", ())]
    left = [(str(host), int(pid)) for host, pid in data.get("left_keys", ())]
    return from_data(ProcessSnapshot, {**data, "groups": groups}), left


def choose_few(graph: WaitGraph) -> list[str]:
    """Choose from a graph of summaries the processes whose snapshots are to be read in full.

    These are the ones that have waited longest, those they wait for, and those that may have differed there.
    """
    few: dict[str, None] = {}
    for head, wait in graph.stalled[:OLDEST_WAITS]:
        few[head.name] = None
        edges = [edge for edge in graph.edges_from(head.name) if edge.wait == wait]
        few.update(dict.fromkeys([name for edge in edges[:1] for name in graph.awaited(edge)][:MAX_FEW]))
        few.update(dict.fromkeys(_forgotten_by(graph, head, wait)[:MAX_FEW]))
    few.update(dict.fromkeys([head.name for head, _ in graph.stalled][:MAX_FEW]))
    return [name for name in few if name in graph.by_name]


def _forgotten_by(graph: WaitGraph, head: ProcessSnapshot, wait: Wait) -> list[str]:
    """Return members that have entered the collective of a wait so long ago that their summary does not hold it."""
    group = next((each for each in head.groups if each.name == wait.group), None)
    if wait.kind != "collective" or group is None:
        return []
    names = [graph.name_by_rank.get((head.world, rank), "") for rank in group.ranks]
    members = [graph.by_name[name] for name in names if name in graph.by_name]
    views = [(each.name, each.group(group.key)) for each in members]
    return [name for name, view in views if view and (view.entered or 0) >= wait.seq and view.at(wait.seq) is None]


@functools.lru_cache(maxsize=4096)
def _step_of(ranks: tuple[int, ...]) -> int:
    step = ranks[1] - ranks[0]
    return step if step > 0 and ranks == tuple(range(ranks[0], ranks[0] + step * len(ranks), step)) else 0


def _ranks(said: Any) -> tuple[int, ...]:
    if isinstance(said, Mapping):
        return _range(int(said["start"]), int(said["step"]), int(said["num"]))
    return tuple(said)


@functools.lru_cache(maxsize=4096)
def _range(start: int, step: int, num: int) -> tuple[int, ...]:
    """Return one tuple for all heads that have that group."""
    return tuple(range(start, start + step * min(num, 1 << 20), step))


def _without_defaults(value: Any) -> dict[str, Any]:
    """Return a dataclass as dicts, without fields that hold their defaults."""
    return {
        each.name: _plain(found)
        for each in dataclasses.fields(value)
        if (found := getattr(value, each.name)) != each.default
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        if value and isinstance(value[0], Collective | GroupSnapshot | Wait | ThreadSnapshot):
            return [_without_defaults(each) for each in value]
        return [to_data(each) if dataclasses.is_dataclass(each) else each for each in value]
    return to_data(value) if dataclasses.is_dataclass(value) else value


def states_of_pids(pids: Mapping[str, int]) -> dict[str, Any]:
    """Return this machine's account of processes of its own: births by pid in, states and usage out, as in JSON."""
    states = {pid: pid_state(int(pid), born) for pid, born in pids.items()}
    usage = {pid: asdict(tree_usage(int(pid))) for pid, state in states.items() if state == "runs"}
    return {"states": states, "usage": usage}


def read_usage(said: Mapping[str, Any]) -> dict[str, TreeUsage]:
    return {pid: from_data(TreeUsage, data) for pid, data in said.get("usage", {}).items()}


@dataclass(frozen=True)
class Silence:
    """Silence of one process: looks without an answer and without progress, and its usage at the last."""

    num_looks: int = 0
    usage: TreeUsage | None = None
    busy: float = 0.0
    is_moving: bool = False
    time_s: float = 0.0


class SilenceHistory:
    def __init__(self) -> None:
        self._by_key: dict[Key, Silence] = {}

    def note_answers(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._by_key.pop(key, None)

    def note(self, key: Key, *usages: TreeUsage | None) -> None:
        """Count one more look in which a process gave no answer, with its usage at some moments of it."""
        known, now_s = self._by_key.get(key, Silence()), time.monotonic()
        if now_s - known.time_s > FORGOTTEN_S:
            known = Silence()
        seen = [each for each in (known.usage, *usages) if each is not None and each.num_processes]
        steps = [rates(before, after) for before, after in itertools.pairwise(seen)]
        busy = max((max(step.cores, float(step.at_work)) for step in steps), default=0.0)
        is_moving = busy >= MOVING_CORES or any(step.moves_data for step in steps)
        self._by_key[key] = Silence(
            num_looks=1 if is_moving else known.num_looks + 1,
            usage=seen[-1] if seen else known.usage,
            busy=busy,
            is_moving=is_moving,
            time_s=now_s,
        )

    def is_over(self, key: Key, fate: Fate) -> bool:
        return fate not in PATIENT_FATES or self._by_key.get(key, Silence()).num_looks >= PATIENT_LOOKS

    def stand_in(self, address: Address, still_s: float, *, is_leaving: bool = False) -> ProcessSnapshot:
        """Return a snapshot for a process that does not answer: it counts as slow, not as dead.

        `still_s` is how long others have waited for it at most; `is_leaving` whether it listens no more, as a process
        that is exiting, whose monitor has ended.
        """
        known = self._by_key.get((address.machine, address.pid), Silence())
        note = f"{address.name} does not answer ({known.num_looks} of {PATIENT_LOOKS} looks)"
        if is_leaving:
            note = f"{address.name} does not answer any more, and runs: it is on its way out"
        elif known.is_moving:
            note = f"{address.name} does not answer, but computes: native code in it holds the GIL, or its host is busy"
        busy = max(known.busy, BUSY)
        has_answered = is_leaving or known.is_moving  # what it does is known although it does not answer
        return _snapshot_of(
            address,
            time_s=time.time(),
            still_s=still_s,
            busy=busy,
            notes=(note,),
            has_answered=has_answered,
            is_stand_in=True,
        )


def head_answer(head: ProcessSnapshot, *, in_brief: bool) -> dict[str, Any]:
    return {"brief": summary_data(head)} if in_brief else {"head": to_data(head)}


class Survey:
    """Survey of all processes, which remembers from look to look those that were silent."""

    def __init__(self, peers: Peers, directory: Path | None) -> None:
        self._peers, self._directory = peers, directory
        self._silences = SilenceHistory()
        self._said: dict[Key, ProcessSnapshot] = {}  # the last snapshot that each process sent of itself

    def look(
        self,
        own: ProcessSnapshot,
        left: dict[Key, ProcessSnapshot],
        error_notices: Mapping[Key, ProcessSnapshot],
        *,
        stall_after_s: float,
    ) -> WaitGraph:
        """Return the graph of the whole run, in about 1.7 s, and 2 ms more for each process.

        Args:
            own: snapshot of this process.
            left: last snapshots of processes that have ended; filled up with exit notices that the others received,
                and with the notices of those that are gone.
            error_notices: snapshots of processes that may have been about to end.
            stall_after_s: what counts as too long.
        """
        others = self._peers.others()
        heads = self._call(self._peers.running(), left, FIRST_CALL_S)
        quiet = {key: each for key, each in others.items() if key not in heads and key not in left}
        fates, before = self._ask_fates(quiet, heads)
        again = {key: each for key, each in quiet.items() if fates[key] in ("silent", "unreachable")}
        if again:
            heads |= self._call(again, left, SECOND_CALL_S)
            quiet = {key: each for key, each in again.items() if key not in heads}
            fates_now, after = self._ask_fates(quiet, heads)
            fates |= fates_now
            for key in quiet:
                self._silences.note(key, before.get(key), after.get(key))
        left.update({key: error_notices[key] for key in quiet if fates[key] == "killed" and key in error_notices})
        self._silences.note_answers(heads)
        self._said = {key: each for key, each in (self._said | heads).items() if key in others}
        heads |= self._stand_ins(quiet, fates, heads, left)
        if len(others) > FEW:
            heads |= self._few_in_full(own, heads, others, stall_after_s)
        return self._graph(own, heads, left, fates, others, stall_after_s)

    def _graph(
        self,
        own: ProcessSnapshot,
        heads: Mapping[Key, ProcessSnapshot],
        left: Mapping[Key, ProcessSnapshot],
        fates: Mapping[Key, Fate],
        others: Mapping[Key, Address],
        stall_after_s: float,
    ) -> WaitGraph:
        absent = [_absent(key, each, left, fates, self._directory) for key, each in others.items() if key not in heads]
        everybody = [own, *(head for key, head in heads.items() if key not in left)]
        absent += [_absent_by_own_word(left[key], others[key]) for key in heads if key in left]
        return WaitGraph(
            heads=everybody,
            absent=[*absent, *_unknown(self._peers, everybody)],
            stall_after_s=stall_after_s,
            time_s=time.time(),
        )

    def _call(
        self, addresses: Mapping[Key, Address], left: dict[Key, ProcessSnapshot], timeout_s: float
    ) -> dict[Key, ProcessSnapshot]:
        """Return snapshots of those that answer, summaries where they are many; fill up `left`."""
        in_brief = len(addresses) > FEW
        message = {"ask": "head", "brief": in_brief, **self._peers.introduce()}
        replies = ask_all(addresses, message, self._peers.secret, timeout_s + CALL_S_PER_PEER * len(addresses))
        heads: dict[Key, ProcessSnapshot] = {}
        with_left: dict[Key, Address] = {}
        for key, reply in replies.items():
            if "brief" in reply:
                heads[key], gone = read_summary(reply["brief"])
                if any(each not in left for each in gone) and len(with_left) < MAX_WITH_LEFT:
                    with_left[key] = addresses[key]
            elif "head" in reply:
                heads[key] = from_data(ProcessSnapshot, reply["head"])
        if with_left:
            heads |= self._call(with_left, left, SECOND_CALL_S)
        _merge_left(left, heads.values())
        return {key: self._with_own_world_name(head) for key, head in heads.items()}

    def _with_own_world_name(self, head: ProcessSnapshot) -> ProcessSnapshot:
        left = tuple(dataclasses.replace(each, world=self._own_name_of(each.world)) for each in head.left_groups)
        return dataclasses.replace(head, world=self._own_name_of(head.world), left_groups=left)

    def _own_name_of(self, world: str) -> str:
        return self._peers.world if world and self._peers.is_own_world(world) else world

    def _few_in_full(
        self,
        own: ProcessSnapshot,
        heads: Mapping[Key, ProcessSnapshot],
        others: Mapping[Key, Address],
        stall_after_s: float,
    ) -> dict[Key, ProcessSnapshot]:
        """Return full snapshots of those that a verdict may be about: the second round of a large run."""
        graph = WaitGraph(heads=[own, *heads.values()], stall_after_s=stall_after_s)
        keys = {named.name: key for key, named in zip(heads, graph.heads[1:], strict=True)}
        few = {keys[name]: others[keys[name]] for name in choose_few(graph) if name in keys}
        found: dict[Key, ProcessSnapshot] = {}
        wanted = list(few)
        for first in range(0, len(wanted), FEW):
            found |= self._call({key: few[key] for key in wanted[first : first + FEW]}, {}, FIRST_CALL_S)
        return found

    def _stand_ins(
        self,
        quiet: Mapping[Key, Address],
        fates: Mapping[Key, Fate],
        heads: Mapping[Key, ProcessSnapshot],
        left: Mapping[Key, ProcessSnapshot],
    ) -> dict[Key, ProcessSnapshot]:
        """Return snapshots for processes that have been silent in too few looks."""
        still_s = max((wait.age_s for head in heads.values() for wait in head.waits), default=0.0)
        end_s = time.monotonic() + REFUSALS_S
        return {
            key: self._as_last_seen(key)
            or self._silences.stand_in(
                address,
                still_s,
                is_leaving=fates[key] == "silent" and time.monotonic() < end_s and is_refused(address),
            )
            for key, address in quiet.items()
            if key not in left and not self._silences.is_over(key, fates[key])
        }

    def _as_last_seen(self, key: Key) -> ProcessSnapshot | None:
        """Return the last snapshot of a process if it waited in it: it still does, as far as is known."""
        head = self._said.get(key)
        if head is None or all(wait.kind == "outside" for wait in head.waits):
            return None
        return dataclasses.replace(head, has_answered=False)

    def _ask_fates(
        self, quiet: Mapping[Key, Address], heads: Mapping[Key, ProcessSnapshot]
    ) -> tuple[dict[Key, Fate], dict[Key, TreeUsage]]:
        """Return fates by pid, and the usage of those that run: read here, or by a process on the same machine."""
        fates: dict[Key, Fate] = {}
        usage: dict[Key, TreeUsage] = {}
        for machine in {each.machine for each in quiet.values()}:
            pids = {str(each.pid): each.born for each in quiet.values() if each.machine == machine}
            said = self._ask_states(machine, pids, heads)
            states = said.get("states", {})
            fates |= {(machine, int(pid)): FATE_BY_PID[states.get(pid, "unknown")] for pid in pids}
            usage |= {(machine, int(pid)): used for pid, used in read_usage(said).items()}
        return fates, usage

    def _ask_states(
        self, machine: str, pids: Mapping[str, int], heads: Mapping[Key, ProcessSnapshot]
    ) -> Mapping[str, Any]:
        if machine == HOST:
            return states_of_pids(pids)
        others = self._peers.others()
        someone = next((key for key in heads if key[0] == machine and key in others), None)
        if someone is None:
            return {}
        question = {"ask": "pids", "pids": dict(pids)}
        return ask_all({0: others[someone]}, question, self._peers.secret, SECOND_CALL_S).get(0, {})


def _merge_left(left: dict[Key, ProcessSnapshot], heads: Iterable[ProcessSnapshot]) -> None:
    for head in heads:
        for each in head.left:
            left.setdefault((each.host, each.pid), each)


def _absent(
    key: Key, address: Address, left: Mapping[Key, ProcessSnapshot], fates: Mapping[Key, Fate], directory: Path | None
) -> AbsentProcess:
    if key in left:
        return _absent_by_own_word(left[key], address)
    text = f"pid {address.pid} on {address.machine}"
    fate, head = fates[key], None
    reason, stack = read_crash(directory, address.machine, address.pid) if fate == "killed" else ("", ())
    if reason:
        fate, head = "crashed", _snapshot_of(address, state="failed", error=reason, error_stack=stack)
        text += f", {reason}"
    return AbsentProcess(
        name=address.name,
        rank=address.rank,
        world=address.world,
        fate=fate,
        text=text,
        pid=address.pid,
        head=head,
    )


def _snapshot_of(address: Address, **said: Any) -> ProcessSnapshot:
    """Make the snapshot of a process that does not answer."""
    head = ProcessSnapshot(
        key=f"{address.machine}:{address.pid}", name=address.name, rank=address.rank, world=address.world
    )
    return dataclasses.replace(head, pid=address.pid, born=address.born, host=address.machine, **said)


def _absent_by_own_word(head: ProcessSnapshot, address: Address) -> AbsentProcess:
    fate: Fate = "raised" if head.state == "failed" else "exited"
    return AbsentProcess(
        name=address.name, rank=address.rank, world=address.world, fate=fate, text=head.error, head=head
    )


def _unknown(peers: Peers, heads: Sequence[ProcessSnapshot]) -> list[AbsentProcess]:
    """Return ranks without an address: the world cannot have formed without them, unless they run no monitor."""
    fate: Fate = "unwatched" if any(head.groups for head in heads) else "never-came"
    return [
        AbsentProcess(name=f"rank {rank}", rank=rank, world=peers.world, fate=fate)
        for rank in sorted(peers.unknown_ranks())
    ]
