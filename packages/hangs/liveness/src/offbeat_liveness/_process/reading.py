"""Reads the snapshot of this process: everything it waits in, and where its threads stand."""

import contextlib
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final

from offbeat_liveness._process import flight_recorder, ledger, process_groups
from offbeat_liveness._process.exceptions import exception_in_flight
from offbeat_liveness._process.ledger import LEDGER, Entry
from offbeat_liveness._process.nccl_recorder import NCCL
from offbeat_liveness._process.outside import may_act, outside_wait, peek
from offbeat_liveness._process.proc import HOST, birth, listening_ports
from offbeat_liveness._process.process_groups import TorchCall, seconds_of
from offbeat_liveness._process.progress import ProgressTracker
from offbeat_liveness._process.snapshot import (
    Collective,
    GroupSnapshot,
    OutsideWait,
    ProcessSnapshot,
    ThreadSnapshot,
    Wait,
    leading,
)
from offbeat_liveness._process.stacks import main_thread_ident, native_ids, stack_of, stands_in_torch, thread_frames

NUM_TRIES: Final = 2  # a new store of torch 2.13 gives the first try to reach its host all of its time, and tries again
POLL_S: Final = 0.5  # a sleep that ends within this may be one of many that ask whether an operation is over
OFF: Final = "torch's flight recorder is off (TORCH_FR_BUFFER_SIZE=0): only sequence numbers and stacks are known"
SILENT: Final = "torch's recorder of nccl did not answer: of its groups only sequence numbers are known"
LOCKED: Final = 0.25  # share of stall_after_s after which a thread before a lock is reported
MAX_LOCKED: Final = 8
ROOTED: Final = ("broadcast", "reduce", "gather", "scatter")


def read_snapshot(
    progress: ProgressTracker, *, name: str, world: str, rank: int | None, world_size: int, stall_after_s: float
) -> ProcessSnapshot:
    """Return what this process does now.

    `world`, `rank` and `world_size` are of the default group, or as the environment promises. An operation that has
    been pending for twice `stall_after_s` counts, whatever its thread does.
    """
    groups = process_groups.group_snapshots(progress.recorder.entries()) if process_groups.has_groups() else ()
    with contextlib.closing(_Threads(progress, stall_after_s)) as threads:
        worker = threads.worker(groups)
        groups = tuple(dataclasses.replace(each, worker=threads.issuer(each)) for each in groups)
        kinds = (_collective_waits, _transfer_waits, _stack_waits, _ledger_waits)
        waits = [wait for waits_of in kinds for wait in waits_of(groups, threads)]
        names = {wait.thread for wait in waits}
        heads, free_threads = threads.heads(worker, names), threads.free(names)
        held_up_s = progress.held_up_s() if threads.may_compute(main_thread_ident()) else 0.0
    waits += [_outside_wait(each) for each in leading(heads) if each.outside is not None and each.name not in names]
    return ProcessSnapshot(
        key=f"{HOST}:{os.getpid()}",
        name=name or (f"rank {rank}" if rank is not None else f"pid {os.getpid()}"),
        rank=rank,
        world=world,
        world_size=world_size,
        pid=os.getpid(),
        born=birth(os.getpid()),
        host=HOST,
        time_s=time.time(),
        still_s=progress.still_s(worker),
        busy=progress.busy(worker),
        tree_busy=progress.tree_busy(),
        held_up_s=held_up_s,
        waits=tuple(sorted(waits, key=lambda wait: -wait.age_s)),
        groups=groups,
        threads=heads,
        free_threads=free_threads,
        listens=listening_ports(),
        notes=_notes(bool(groups)),
    )


class _Threads:
    def __init__(self, progress: ProgressTracker, stall_after_s: float) -> None:
        self.progress, self._stall_after_s = progress, stall_after_s
        names = peek.thread_names()
        self._native_ids = native_ids()
        self._frames = thread_frames()
        self._names = _unlike({ident: names.get(ident, f"thread {ident}") for ident in self._frames})
        self.calls = {ident: process_groups.torch_call(frame) for ident, frame in self._frames.items()}

    def close(self) -> None:
        """Let go of all frames and of their locals: where the main thread looks at itself, its own is among them."""
        self._frames.clear()
        self.calls.clear()

    def __iter__(self) -> Iterator[tuple[int, TorchCall]]:
        return iter([(ident, call) for ident, call in self.calls.items() if call is not None])

    def has(self, ident: int) -> bool:
        return ident in self._frames

    def frame(self, ident: int) -> FrameType | None:
        """Return the frame of a thread, or of the main thread if it has no Python frame (autograd's, for one)."""
        return self._frames.get(ident) or self._frames.get(main_thread_ident())

    def name(self, ident: int) -> str:
        return self._names.get(ident, "MainThread")

    def still_s(self, ident: int, since_s: float) -> float:
        """Return how long an operation that began `since_s` seconds ago has held up its thread, or the main thread."""
        watched_s = time.monotonic() - self.progress.watched_since_s
        if min(since_s, watched_s) >= 2 * self._stall_after_s:
            return min(since_s, watched_s)
        return min(since_s, max(self.progress.thread_still_s(each) for each in (ident, main_thread_ident())))

    def worker(self, groups: Sequence[GroupSnapshot]) -> int:
        newest = max(
            (each for group in groups for each in group.recent), key=lambda each: each.created_ns, default=None
        )
        return newest.thread if newest is not None and newest.thread in self._frames else main_thread_ident()

    def issuer(self, group: GroupSnapshot) -> str:
        """Name of the thread that issued a group's newest collective, if it is still there.

        "" as well where a thread has begun since that may take the group over.
        """
        newest = max(group.recent, key=lambda each: each.created_ns, default=None)
        if newest is None or newest.thread not in self._frames:
            return ""
        since_s = self.progress.stamped_s(newest.created_ns)
        others = (ident for ident in self._frames if ident != newest.thread)
        native = self._native_ids
        began = (each for each in others if self.progress.has_begun_since(each, native.get(each, 0), since_s))
        return "" if any(may_act(self._frames[ident]) for ident in began) else self.name(newest.thread)

    def free(self, waiting: set[str]) -> tuple[str, ...]:
        """Threads that stand in no wait and may set another free."""
        return tuple(
            self.name(ident)
            for ident, frame in self._frames.items()
            if self.name(ident) not in waiting and may_act(frame) and not self._joins(ident, waiting)
        )

    def _joins(self, ident: int, waiting: set[str]) -> bool:
        """Return whether a thread joins another that waits itself."""
        outside = self._outside(ident) if waiting else None
        return outside is not None and outside.kind == "thread" and not outside.timeout_s and outside.on in waiting

    def may_compute(self, ident: int) -> bool:
        """Return whether a thread stands in nothing that is known to wait."""
        return self.calls.get(ident) is None and self._outside(ident) is None

    def _outside(self, ident: int) -> OutsideWait | None:
        """Return what a thread waits for that stands in no call of torch.distributed."""
        if self.calls.get(ident) is not None:
            return None
        return outside_wait(self._frames.get(ident), self._native_ids.get(ident))

    def is_elsewhere(self, ident: int, backend: str) -> bool:
        """Return whether a thread that has posted an operation stands in something else: it may never wait for it.

        For a device's, a thread that waits for the device cannot be distinguished from one that computes.
        """
        frame = self.frame(ident)
        if frame is None or stands_in_torch(frame):
            return False
        return not self.polls(ident) and (backend.startswith("gloo") or self._outside_of(ident) is not None)

    def polls(self, ident: int) -> bool:
        """Return whether a thread sleeps for moments, as one that asks again and again whether an operation is over."""
        outside = self._outside_of(ident)
        if outside is None or outside.kind != "sleep":
            return False
        return outside.timeout_s is not None and outside.timeout_s <= POLL_S

    def _outside_of(self, ident: int) -> OutsideWait | None:
        """Return what a thread waits for; the main thread if it has no Python frame."""
        return self._outside(ident if ident in self._frames else main_thread_ident())

    def _locked(self) -> list[int]:
        """Threads that have stood for a while before a lock: what they were to do may be what others wait for."""
        least_s = LOCKED * self._stall_after_s
        standing = (each for each in self._frames if self.progress.thread_still_s(each) >= least_s)
        waits = ((each, self._outside(each)) for each in standing)
        return [ident for ident, wait in waits if wait is not None and wait.kind == "lock" and wait.on][:MAX_LOCKED]

    def heads(self, worker: int, names: set[str]) -> tuple[ThreadSnapshot, ...]:
        named = (each for each in self._frames if self._names[each] in names)
        chosen = dict.fromkeys([worker, main_thread_ident(), *named, *self._locked()])
        return tuple(
            ThreadSnapshot(
                name=self.name(ident),
                still_s=self.progress.thread_still_s(ident),
                stack=stack_of(self.frame(ident)),
                outside=self._outside(ident),
                in_flight=exception_in_flight(ident),
            )
            for ident in chosen
        )


def _unlike(names: Mapping[int, str]) -> dict[int, str]:
    """Return names of threads, with their ident where several share one: threads are identified by name."""
    counts = Counter(names.values())
    return {ident: name if counts[name] == 1 else f"{name} ({ident})" for ident, name in names.items()}


def _outside_wait(thread: ThreadSnapshot) -> Wait:
    assert thread.outside is not None
    return Wait(
        kind="outside", what=thread.outside.kind, age_s=thread.still_s, thread=thread.name, stack=thread.stack,
        outside=thread.outside,
    )  # fmt: skip


def _collective_waits(groups: Sequence[GroupSnapshot], threads: _Threads) -> Iterator[Wait]:
    for group in groups:
        entry = next((each for each in group.recent if not each.done), None)
        if entry is not None and not threads.is_elsewhere(entry.thread, group.backend):
            root = None if group.is_foreign else _root(threads.calls.get(entry.thread), group, entry)
            yield dataclasses.replace(_recorded_wait(group, entry, threads), seq=entry.seq, root=root)


def _transfer_waits(groups: Sequence[GroupSnapshot], threads: _Threads) -> Iterator[Wait]:
    """The oldest point-to-point operations of each group that were launched together and are not over."""
    for group in groups:
        if not group.transfers or threads.is_elsewhere(group.transfers[0].thread, group.backend):
            continue
        first = group.transfers[0]
        batch = [each for each in group.transfers if each.seq == first.seq]
        peers = tuple(dict.fromkeys(each.peer for each in batch if each.peer is not None))
        what = first.op if len(batch) == 1 else "batch_isend_irecv"
        yield dataclasses.replace(_recorded_wait(group, first, threads), kind="p2p", what=what, peers=peers)


def _recorded_wait(group: GroupSnapshot, entry: Collective, threads: _Threads) -> Wait:
    own_s = seconds_of(ledger.timeout_of_wait(threads.frame(entry.thread)))
    return Wait(
        kind="collective",
        what=entry.op,
        age_s=threads.still_s(entry.thread, time.monotonic() - threads.progress.stamped_s(entry.created_ns)),
        thread=threads.name(entry.thread),
        group=group.name,
        timeout_s=group.timeout_s if own_s is None else own_s,
        stack=stack_of(threads.frame(entry.thread)),
        is_posted=threads.polls(entry.thread),
        has_own_deadline=own_s is not None,
    )


def _root(call: TorchCall | None, group: GroupSnapshot, entry: Collective) -> int | None:
    """Return the root of the call that a thread is in, if that is the one: it may be a later one beside it."""
    if call is None or entry.op not in ROOTED or entry.op not in call.function:
        return None
    is_last = entry.seq == max(each.seq for each in group.recent if each.thread == entry.thread)
    return call.peer if is_last and group.name.partition(" (")[0] == _group_name(call.group) else None


def _stack_waits(groups: Sequence[GroupSnapshot], threads: _Threads) -> Iterator[Wait]:
    """Yield calls that only the stack shows: rendezvous, monitored_barrier, and collectives without the recorder."""
    recorded = {group.name for group in groups if group.recent}
    written_down = {entry.thread: entry for entry in LEDGER.open_waits()}
    for ident, call in threads:
        head = _snapshot_of_group(groups, call.group)
        entry = written_down.get(ident)
        peer = None if head and head.is_foreign else call.peer  # there it is no rank of this world
        group = head.name if head else _group_name(call.group)
        found: dict[str, Any] = {}
        if call.file in OTHER_CALLS:
            found = OTHER_CALLS[call.file](call)
        elif call.function in process_groups.RENDEZVOUS:
            found = _rendezvous(call, entry)
        elif call.function == "monitored_barrier":
            found = {"kind": "barrier", "group": group}
        elif call.function in process_groups.COLLECTIVES and group not in recorded:
            seq = head.entered or 0 if head else 0
            found = {"kind": "collective", "group": group, "seq": seq, "root": peer}
        elif call.function in ("send", "recv") and peer is not None and not (entry and entry.kind == "p2p"):
            found = {"kind": "p2p", "group": group, "peers": (peer,)}
        if found:
            given_s = _given_timeout_s(call)
            own_s = given_s or (head.timeout_s if head else None)
            age_s = threads.progress.thread_still_s(ident)
            if entry is not None and entry.kind == "rendezvous":  # one of many tries, maybe, at the same lines
                age_s, own_s = min(age_s, time.monotonic() - entry.since_s), _timeout_s(entry, head) or own_s
            elif call.function in process_groups.RENDEZVOUS and ident in LEDGER.met_s:
                age_s = min(age_s, time.monotonic() - LEDGER.met_s[ident])
            yield Wait(
                age_s=age_s,
                thread=threads.name(ident),
                timeout_s=own_s,
                has_own_deadline=given_s is not None and call.function not in process_groups.RENDEZVOUS,
                stack=stack_of(threads.frame(ident)),
                **{"what": call.function, **found},
            )


def _given_timeout_s(call: TorchCall) -> float | None:
    """Return the timeout of one call. In torch 2.11 to 2.13 only the first rank minds that of a `monitored_barrier`."""
    group = process_groups.default_group() if call.group is None else call.group
    if call.function == "monitored_barrier" and group is not None and group.rank() != 0:
        return None
    return seconds_of(call.arguments.get("timeout"))


def _rendezvous(call: TorchCall, entry: Entry | None) -> dict[str, Any]:
    """Return a wait in making or ending groups; `on` is where a world meets, or the ranks asked into a group."""
    place = (entry.on if entry is not None and entry.kind == "rendezvous" else "") or call.place
    asked = f"ranks {_in_short(call.invited)}" if call.invited and not place else ""
    ends = call.function == "destroy_process_group"
    return {
        "kind": "rendezvous",
        "what": call.function.lstrip("_"),
        "peers": process_groups.group_members(call.group) if ends and call.group is not None else call.invited,
        "on": place or asked,
    }


def _in_short(ranks: Sequence[int]) -> str:
    """Return the same text for the same ranks, on whatever rank: "0-3" where they follow each other."""
    ordered = sorted(set(ranks))
    if len(ordered) > 1 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{ordered[0]}-{ordered[-1]}"
    return ", ".join(map(str, ordered))


def _store_rendezvous(call: TorchCall) -> dict[str, Any]:
    return {"kind": "rendezvous", "what": "rendezvous", "on": call.place}


def _remote_call(call: TorchCall) -> dict[str, Any]:
    """Return the call of torch.distributed.rpc, whose workers are not ranks of a group."""
    if call.function == "rpc_sync":
        return {"kind": "declared", "what": f"rpc_sync to {call.arguments.get('to')}"}
    return {"kind": "rendezvous", "what": f"rpc.{call.function.lstrip('_')}"}


def _stateless(call: TorchCall) -> dict[str, Any]:
    """Return the wait of vLLM's StatelessProcessGroup, which torch has no table of; its members count by themselves."""
    group, other = call.arguments.get("self"), call.peer
    place = f"rank {getattr(group, 'rank', '?')} of {getattr(group, 'world_size', '?')}"
    text = f"StatelessProcessGroup.{call.function} as {place}" + (f" with {other}" if other is not None else "")
    store = getattr(group, "store", None)
    return {"kind": "store", "what": text, "on": process_groups.store_place(store) if store is not None else ""}


OTHER_CALLS: Final = {
    "torch/distributed/rendezvous.py": _store_rendezvous,
    "torch/distributed/rpc/__init__.py": _remote_call,
    "torch/distributed/rpc/api.py": _remote_call,
    "vllm/distributed/utils.py": _stateless,
}


def _ledger_waits(groups: Sequence[GroupSnapshot], threads: _Threads) -> Iterator[Wait]:
    """Yield what was written down: declared waits, store waits, new stores, and the p2p handles of a wait."""
    for entry in LEDGER.open_waits():
        call = threads.calls.get(entry.thread)
        covered = call is not None and (entry.kind != "p2p" or call.function not in process_groups.POINT_TO_POINT)
        if entry.kind != "declared" and (covered or not threads.has(entry.thread)):
            continue
        age_s = time.monotonic() - entry.since_s
        group = entry.group()
        head = _snapshot_of_group(groups, group) if group is not None else None
        yield Wait(
            kind=entry.kind,
            what=entry.what,
            age_s=age_s if entry.kind == "declared" else threads.still_s(entry.thread, age_s),
            thread=threads.name(entry.thread),
            group=head.name if head else "",
            peers=_peer(entry),
            on=entry.on,
            deadline_s=entry.deadline_s,
            timeout_s=_timeout_s(entry, head),
            stack=stack_of(threads.frame(entry.thread)),
            has_own_deadline=entry.kind in ("p2p", "store") and seconds_of(entry.timeout) is not None,
        )


def _timeout_s(entry: Entry, head: GroupSnapshot | None) -> float | None:
    """Return what torch gives an open wait: as the call says, else as its group or its store does."""
    if (given := seconds_of(entry.timeout)) is not None:
        return given * (NUM_TRIES if entry.kind == "rendezvous" else 1)
    return head.timeout_s if head else seconds_of(getattr(entry.source, "timeout", None))


def _peer(entry: Entry) -> tuple[int, ...]:
    group = entry.group()
    if group is None or entry.peer < 0:
        return ()
    members = process_groups.group_members(group)
    return (members[entry.peer],) if entry.peer < len(members) else ()


def _snapshot_of_group(groups: Sequence[GroupSnapshot], group: Any) -> GroupSnapshot | None:
    name = _group_name(group)
    named = [each for each in groups if each.name == name or each.name.startswith(f"{name} (")]
    return next((each for each in named if each.backend == "gloo"), named[0] if named else None)


def _group_name(group: Any) -> str:
    return str(getattr(process_groups.default_group() if group is None else group, "group_name", ""))


def _notes(has_groups: bool) -> tuple[str, ...]:
    is_off = has_groups and flight_recorder.is_off()
    return (OFF,) * is_off + (SILENT,) * (NCCL.asked_at_s is not None)
