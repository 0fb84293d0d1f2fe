"""Builds the head of this process: everything it waits in, and where its threads stand."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Final

from offbeat_liveness._process import flight_recorder, process_groups, torch_calls
from offbeat_liveness._process.head import Collective, GroupHead, Head, OutsideWait, ThreadHead, Wait
from offbeat_liveness._process.ledger import LEDGER, Entry
from offbeat_liveness._process.motion import Motion
from offbeat_liveness._process.outside import outside_wait
from offbeat_liveness._process.proc import HOST
from offbeat_liveness._process.stacks import main_thread_ident, stack_of, thread_frames
from offbeat_liveness._process.torch_calls import TorchCall

ROOTED: Final = ("broadcast", "reduce", "gather", "scatter")


def read_head(
    motion: Motion, *, name: str, world: str, rank: int | None, world_size: int, stall_after_s: float
) -> Head:
    """What this process does now.

    Args:
        motion: since when it stands still.
        name: as `watch(name=)` said; "" means by rank or pid.
        world: token of the world, "" before it is known.
        rank: in the default group, or what the environment promises; None outside.
        world_size: likewise.
        stall_after_s: an operation pending for twice as long counts, whatever its thread does.
    """
    groups = process_groups.group_heads(motion.recorder.entries()) if process_groups.default_group() is not None else ()
    with contextlib.closing(_Threads(motion, stall_after_s)) as threads:
        return _read_head(motion, threads, groups, name=name, world=world, rank=rank, world_size=world_size)


def _read_head(
    motion: Motion,
    threads: "_Threads",
    groups: tuple[GroupHead, ...],
    *,
    name: str,
    world: str,
    rank: int | None,
    world_size: int,
) -> Head:
    worker = threads.worker(groups)
    waits = [*_collective_waits(groups, threads), *_stack_waits(groups, threads), *_ledger_waits(threads)]
    return Head(
        key=f"{HOST}:{os.getpid()}",
        name=name or (f"rank {rank}" if rank is not None else f"pid {os.getpid()}"),
        rank=rank,
        world=world,
        world_size=world_size,
        pid=os.getpid(),
        host=HOST,
        time_s=time.time(),
        still_s=motion.still_s(worker),
        busy=motion.busy(worker),
        waits=tuple(sorted(waits, key=lambda wait: -wait.age_s)),
        groups=groups,
        threads=threads.heads(worker, {wait.thread for wait in waits}),
        notes=_notes(bool(groups)),
    )


class _Threads:
    """All threads of the process at one moment."""

    def __init__(self, motion: Motion, stall_after_s: float) -> None:
        self._motion, self._stall_after_s = motion, stall_after_s
        known = threading.enumerate()
        names = {each.ident: each.name for each in known}
        self._native_ids = {each.ident: each.native_id for each in known}
        self._frames = thread_frames()
        self._names = {ident: names.get(ident, f"thread {ident}") for ident in self._frames}
        self.calls = {ident: torch_calls.torch_call(frame) for ident, frame in self._frames.items()}

    def close(self) -> None:
        """Let go of all frames: where the main thread looks at itself, its own is among them."""
        self._frames.clear()

    def __iter__(self) -> Iterator[tuple[int, TorchCall]]:
        return iter([(ident, call) for ident, call in self.calls.items() if call is not None])

    def frame(self, ident: int) -> FrameType | None:
        """Of a thread; of the main thread if it has no Python frame (autograd's, for one)."""
        return self._frames.get(ident) or self._frames.get(main_thread_ident())

    def name(self, ident: int) -> str:
        return self._names.get(ident, "MainThread")

    def standing_s(self, ident: int) -> float:
        """How long a thread has shown no new line."""
        return self._motion.thread_still_s(ident)

    def still_s(self, ident: int, since_s: float) -> float:
        """How long an operation that began `since_s` seconds ago has held up its thread, or the main thread."""
        watched_s = time.monotonic() - self._motion.watched_since_s
        if min(since_s, watched_s) >= 2 * self._stall_after_s:
            return min(since_s, watched_s)
        return min(since_s, max(self._motion.thread_still_s(each) for each in (ident, main_thread_ident())))

    def worker(self, groups: Sequence[GroupHead]) -> int:
        """The thread that issued the newest collective, if it is still there; else the main thread."""
        newest = max(
            (each for group in groups for each in group.recent), key=lambda each: each.created_ns, default=None
        )
        return newest.thread if newest is not None and newest.thread in self._frames else main_thread_ident()

    def heads(self, worker: int, names: set[str]) -> tuple[ThreadHead, ...]:
        """The worker first, then the main thread, then the named ones."""
        named = (each for each in self._frames if self._names[each] in names)
        chosen = dict.fromkeys([worker, main_thread_ident(), *named])
        return tuple(
            ThreadHead(
                name=self.name(ident),
                still_s=self._motion.thread_still_s(ident),
                stack=stack_of(self.frame(ident)),
                outside=self._outside(ident),
            )
            for ident in chosen
        )

    def _outside(self, ident: int) -> OutsideWait | None:
        """What a thread waits for outside torch; not told of one that stands in a call of torch.distributed."""
        if self.calls.get(ident) is not None:
            return None
        return outside_wait(self._frames.get(ident), self._native_ids.get(ident))


def _collective_waits(groups: Sequence[GroupHead], threads: _Threads) -> Iterator[Wait]:
    """The oldest collective of each group that was issued and is not over."""
    for group in groups:
        entry = next((each for each in group.recent if not each.done), None)
        if entry is None:
            continue
        since_s = max(0.0, time.time() - entry.created_ns / 1e9)
        yield Wait(
            kind="collective",
            what=entry.op,
            age_s=threads.still_s(entry.thread, since_s),
            thread=threads.name(entry.thread),
            group=group.name,
            seq=entry.seq,
            root=_root(threads.calls.get(entry.thread), entry),
            stack=stack_of(threads.frame(entry.thread)),
        )


def _root(call: TorchCall | None, entry: Collective) -> int | None:
    return call.peer if call and entry.op in ROOTED and entry.op in call.function else None


def _stack_waits(groups: Sequence[GroupHead], threads: _Threads) -> Iterator[Wait]:
    """Calls that only the stack tells: rendezvous, monitored_barrier, and collectives while the recorder is off."""
    recorded = {group.name for group in groups if group.recent}
    written_down = {entry.thread for entry in LEDGER.open_waits() if entry.kind == "p2p"}
    for ident, call in threads:
        group = _group_name(call.group)
        kind: Any = None
        peers: tuple[int, ...] = ()
        if call.function in torch_calls.RENDEZVOUS:
            kind, group, peers = "rendezvous", "", _invited(call)
        elif call.function == "monitored_barrier":
            kind = "barrier"
        elif call.function in torch_calls.COLLECTIVES and group not in recorded:
            kind = "collective"
        elif call.function in ("send", "recv") and ident not in written_down and call.peer is not None:
            kind, peers = "p2p", (call.peer,)
        if kind is not None:
            head = next((each for each in groups if each.name == group), None)
            yield Wait(
                kind=kind,
                what=call.function,
                age_s=threads.standing_s(ident),
                thread=threads.name(ident),
                group=group,
                seq=head.entered or 0 if head and kind == "collective" else 0,
                peers=peers,
                root=call.peer,
                stack=stack_of(threads.frame(ident)),
            )


def _ledger_waits(threads: _Threads) -> Iterator[Wait]:
    """What was written down: declared waits, store waits, point-to-point."""
    for entry in LEDGER.open_waits():
        call = threads.calls.get(entry.thread)
        covered = call is not None and (entry.kind == "store" or call.function not in torch_calls.POINT_TO_POINT)
        if entry.kind != "declared" and covered:
            continue
        age_s = time.monotonic() - entry.since_s
        yield Wait(
            kind=entry.kind,
            what=entry.what,
            age_s=age_s if entry.kind == "declared" else threads.still_s(entry.thread, age_s),
            thread=threads.name(entry.thread),
            group=_group_name(entry.group) if entry.kind == "p2p" else "",
            peers=_peer(entry),
            on=entry.on,
            deadline_s=entry.deadline_s,
            stack=stack_of(threads.frame(entry.thread)),
        )


def _peer(entry: Entry) -> tuple[int, ...]:
    """Global rank of the other side of a point-to-point operation."""
    if entry.kind != "p2p" or entry.peer < 0:
        return ()
    members = process_groups.group_members(entry.group)
    return (members[entry.peer],) if entry.peer < len(members) else ()


def _invited(call: TorchCall) -> tuple[int, ...]:
    """Who must come to a rendezvous, if not the whole world."""
    if call.arguments.get("use_local_synchronization") and call.arguments.get("ranks"):
        return tuple(call.arguments["ranks"])
    return ()


def _group_name(group: Any) -> str:
    chosen = process_groups.default_group() if group is None else group
    name = getattr(chosen, "group_name", "") if chosen is not None else ""
    return str(name)


def _notes(has_groups: bool) -> tuple[str, ...]:
    if has_groups and flight_recorder.is_off():
        return ("torch's flight recorder is off (TORCH_FR_BUFFER_SIZE=0): only sequence numbers and stacks are known",)
    return ()
