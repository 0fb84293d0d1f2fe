"""A verdict: what is stuck, which process waits for which, where each stands, and what to change."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from offbeat_liveness._printable import printable
from offbeat_liveness._process.snapshot import CallSite, to_data
from offbeat_liveness._process.stacks import is_own

VerdictKind = Literal[
    "missing-member",
    "different-op",
    "different-order",
    "shape-mismatch",
    "dead-peer",
    "wait-cycle",
    "starved",
    "straggler",
    "blocked-loop",
    "stuck-call",
    "standstill",
]
Certainty = Literal["proof", "suspicion"]
FORMAT: Final = 1
NEVER_ENDED: Final = {
    "straggler": "a process that moves is never ended",
    "blocked-loop": "a process that computes is never ended",
}
MAX_PARTIES: Final = 16
MAX_RUNS: Final = 16
RANK_NAME: Final = re.compile(r"rank (\d+)")


@dataclass(frozen=True, kw_only=True)
class Party:
    """One process and its part in a stall.

    Args:
        name: "rank 3", or as `watch(name=)` said.
        rank: global rank, if it has one.
        part: "waits", "missing", "dead", "moving" (slow), or "idle".
        doing: one line.
        for_s: how long it has stood so.
        stack: innermost first.
    """

    name: str
    rank: int | None
    part: Literal["waits", "missing", "dead", "moving", "idle"]
    doing: str
    for_s: float = 0.0
    stack: tuple[CallSite, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Link:
    """One edge of the wait-for graph: `waiter` cannot continue before `on` acts, because of `what`."""

    waiter: str
    on: str
    what: str
    group: str = ""
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Verdict on what is stuck, and why. `str(verdict)` is the text; `to_data()` follows `verdict.schema.json`.

    Args:
        kind: missing-member (a member is in no call of the group), different-op (another operation at the same place
            of the sequence),
            different-order (collectives of several groups wait for each other), shape-mismatch, dead-peer (killed,
            left, raised or
            stopped), wait-cycle (a cycle that passes over something else than collectives), starved (a producer does
            nothing),
            straggler (slow, but moving), blocked-loop (one callback holds up the event loop of a process that waits for
            others), stuck-call (all members are in it, and it does not end), standstill (no process is in a call of
            torch, and none moves).
        certainty: a proof cannot clear by waiting, and is acted upon at once; a suspicion may be a pause that is as it
            should be, and is acted upon at the timeout of what is waited in.
        fate: of a dead peer, how it ended: killed, crashed, raised, exited.
        due_in_s: seconds until that timeout; None where there is none.
        due_to: whose timeout that is.
        headline: one line.
        stalled_s: how long the longest wait has lasted.
        time_s: when it was found, seconds since the epoch.
        group, axes, members: torch's name of the group, its mesh axes if known, its global ranks; empty if no group is
            involved.
        op, seq: the operation and its number in the group.
        arrived, missing: names of processes that are in the call, and of those that it waits for.
        parties: processes that take part in the stall; the guilty first.
        links: the wait-for graph, as far as it matters.
        advice: what to change, one line.
        notes: what could not be seen.
        directory: where the dumps are.
        cleared_after_s: how long the stall had lasted when the run moved again; None while it stands.
    """

    kind: VerdictKind
    headline: str
    stalled_s: float
    time_s: float
    group: str = ""
    axes: tuple[str, ...] = ()
    members: tuple[int, ...] = ()
    op: str = ""
    seq: int = 0
    arrived: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    parties: tuple[Party, ...] = ()
    links: tuple[Link, ...] = ()
    advice: str = ""
    notes: tuple[str, ...] = ()
    directory: str = ""
    certainty: Certainty = "suspicion"
    fate: str = ""
    due_in_s: float | None = None
    due_to: str = ""
    cleared_after_s: float | None = None

    @property
    def topic(self) -> tuple[Any, ...]:
        """Return what a recurring pause has in common each time: neither the number of the call nor the late rank."""
        return self.group, self.members, self.op

    @property
    def is_proof(self) -> bool:
        """Return whether waiting longer cannot help."""
        return self.certainty == "proof"

    @property
    def key(self) -> tuple[Any, ...]:
        """Two verdicts with one key say the same thing, maybe later; a death is one, in whatever call it is met."""
        if self.is_proof and self.kind == "dead-peer":
            return self.certainty, self.kind, self.missing
        return self.certainty, self.kind, self.group, self.seq, self.op, self.missing

    @property
    def may_end(self) -> bool:
        """Return whether it may ever end a run: a process that is slow and moves, or computes, is never ended."""
        return self.kind not in NEVER_ENDED

    @property
    def text(self) -> str:
        """Text for a person: what is stuck, which processes, where, since when, and what to change."""
        return printable("\n".join(_lines(self)))

    def __str__(self) -> str:
        return self.text

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"format": FORMAT, **to_data(self), "text": self.text}


def join_names(names: Iterable[str]) -> str:
    """Names in one line, ranks as runs: "ranks 0-3, 7, trainer"."""
    ranks, others = [], []
    for name in names:
        match = RANK_NAME.fullmatch(name)
        if match:
            ranks.append(int(match[1]))
        else:
            others.append(name)
    if not ranks:
        return ", ".join(others)
    word = "rank" if len(ranks) == 1 else "ranks"
    return ", ".join([f"{word} {join_ranks(ranks)}", *others])


def join_ranks(ranks: Iterable[int]) -> str:
    """Ranks in one line, what is regular in short: "0-3, 7, 16-1008 by 16"."""
    left = sorted(set(ranks))
    parts: list[str] = []
    while left and len(parts) < MAX_RUNS:
        run = _regular_start(left)
        left = left[len(run) :]
        step = f" by {run[1] - run[0]}" if len(run) > 1 and run[1] - run[0] > 1 else ""
        parts.append(f"{run[0]}-{run[-1]}{step}" if len(run) > 2 else str(run[0]))
    return ", ".join(parts) + (f" and {len(left)} more" if left else "")


def _regular_start(ranks: list[int]) -> list[int]:
    """Return the first ranks that follow each other by one step: three by 1, four by more, else the first alone."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    length = 1
    while length < len(ranks) and ranks[length] - ranks[length - 1] == step:
        length += 1
    return ranks[:length] if length >= (3 if step == 1 else 4) else ranks[:1]


def name_of_group(name: str, axes: Sequence[str]) -> str:
    """Return a group for people: its axes if known, else torch's name."""
    if axes:
        return f"the {'×'.join(axes)} group"
    return "the default group" if name == "0" else f"group {name!r}"


def _lines(verdict: Verdict) -> list[str]:
    certainty = "" if verdict.is_proof else "suspicion: "
    lines = [f"offbeat liveness: {certainty}{verdict.kind}: {verdict.headline}", f"  since: {_since(verdict)}"]
    if not verdict.is_proof:
        lines.append(f"  {_due(verdict)}")
    if verdict.group:
        number = f", collective {verdict.seq} of it" if verdict.seq else ""
        members = f"ranks {join_ranks(verdict.members)}"
        lines.append(f"  group: {name_of_group(verdict.group, verdict.axes)} ({members}){number}")
    if verdict.arrived:
        lines.append(f"  arrived: {join_names(verdict.arrived)}")
    if verdict.missing:
        lines.append(f"  missing: {join_names(verdict.missing)}")
    lines += _party_lines(verdict.parties)
    lines += [f"  {each.waiter} waits for {each.on}: {each.what}" for each in verdict.links[:MAX_PARTIES]]
    lines += [f"  note: {each}" for each in verdict.notes]
    if verdict.directory:
        lines.append(f"  dumps: {verdict.directory} (read them with: offbeat-liveness show {verdict.directory})")
    if verdict.advice:
        lines.append(f"  what to change: {verdict.advice}")
    if verdict.cleared_after_s is not None:
        lines.append(f"  it moved again after {verdict.cleared_after_s:.0f} s")
    return lines


def _since(verdict: Verdict) -> str:
    began = datetime.fromtimestamp(verdict.time_s - verdict.stalled_s).astimezone()
    return f"{began:%Y-%m-%d %H:%M:%S}, {verdict.stalled_s:.0f} s"


def _due(verdict: Verdict) -> str:
    if not verdict.may_end:
        return f"not acted upon: {NEVER_ENDED[verdict.kind]}"
    if verdict.due_in_s is None:
        return "not acted upon: nothing that is waited in has a timeout that is known"
    if verdict.due_in_s <= 0:
        return f"acted upon now, {verdict.due_to}"
    when = datetime.fromtimestamp(verdict.time_s + verdict.due_in_s).astimezone()
    return f"not acted upon before {when:%Y-%m-%d %H:%M:%S} (in {verdict.due_in_s:.0f} s), {verdict.due_to}"


def _party_lines(parties: Sequence[Party]) -> list[str]:
    together: dict[tuple[str, tuple[CallSite, ...]], list[Party]] = {}
    for party in parties:
        together.setdefault((party.doing, party.stack), []).append(party)
    lines = []
    for (doing, stack), same in list(together.items())[:MAX_PARTIES]:
        longest_s = max(each.for_s for each in same)
        since = f" for {longest_s:.{0 if longest_s >= 10 else 1}f} s" if longest_s >= 0.1 else ""
        lines.append(f"  {join_names(each.name for each in same)}: {doing}{since}")
        lines += [f"      {site}" for site in _sites_to_show(stack)]
    hidden = len(together) - MAX_PARTIES
    return [*lines, f"  and {hidden} more; see the JSON"] if hidden > 0 else lines


def _sites_to_show(stack: tuple[CallSite, ...]) -> list[CallSite]:
    """Return the innermost line, and the two innermost lines of the user's own files."""
    own = [each for each in stack if is_own(each.file)][:3]
    return own if not stack or stack[0] in own else [stack[0], *own[:2]]
