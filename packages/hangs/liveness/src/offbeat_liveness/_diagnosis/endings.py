"""The end of a stall: did the ranks that waited continue, and did the rank that they waited for come? Pure."""

from dataclasses import dataclass
from typing import Final

from offbeat_liveness._diagnosis.build import fate_text, in_order
from offbeat_liveness._diagnosis.graph import AbsentProcess, WaitGraph
from offbeat_liveness._diagnosis.verdict import Verdict, join_names
from offbeat_liveness._process.snapshot import ProcessSnapshot

ENDED_WELL: Final = "it moves again: the call ended"
CIRCLES: Final = ("wait-cycle", "different-order")  # in which all wait
FAILED: Final = ("raised", "crashed", "killed")


@dataclass(frozen=True)
class Ending:
    """The end of a stall.

    Args:
        what: for people, to be followed by how long it took: "it moves again: rank 0 came".
        why: the rest of that sentence.
        has_failed: an error has ended those that waited, such as torch's own at its timeout.
        is_open: the wait is over, but what has ended it may not have been reported yet: an error of the waiters, or the
            orderly end of one that is gone.
    """

    what: str
    why: str = ""
    has_failed: bool = False
    is_open: bool = False


def is_over(graph: WaitGraph, verdict: Verdict) -> bool:
    """Return whether the ranks that waited have answered, and wait no more."""
    place = (verdict.op, verdict.group, verdict.seq)
    heads = [head for head in graph.heads if head.name in verdict.arrived]
    waits = [wait for head in heads for wait in head.waits if (wait.what, wait.group, wait.seq) == place]
    has_answered = not heads or any(head.has_answered and not head.is_stand_in for head in heads)
    return has_answered and all(wait.age_s < graph.stall_after_s for wait in waits)


def how_it_ended(graph: WaitGraph, verdict: Verdict) -> Ending:
    """Return how a stall that is over has ended: maybe by an error of those that waited, or without the missing one."""
    failed = _failed(graph, verdict)
    others = {*verdict.missing} - {each.name for each in failed}
    away = in_order(name for name in others if _has_not_come(graph, name, verdict))
    if failed:
        has = "has" if len(away) == 1 else "have"
        rest = f"; {join_names(away)} {has} not come" if away else ""
        # A process that is gone without a word may have ended well: on a busy machine its word comes late.
        is_open = failed[0].fate == "killed"
        return Ending(what="the wait has failed", why=f": {fate_text(failed)}{rest}", has_failed=True, is_open=is_open)
    if away:
        what = f"it moves again: {join_names(verdict.arrived)} went on without {join_names(away)}"
        return Ending(what=what, is_open=True)
    if not verdict.missing:
        # No process can be asked whether the producer came, and a call's own timeout looks like its end until the error
        # that it raises has left the program.
        return Ending(what=ENDED_WELL, is_open=verdict.due_in_s is not None)
    return Ending(what=f"it moves again: {join_names(verdict.missing)} came")


def _failed(graph: WaitGraph, verdict: Verdict) -> list[AbsentProcess]:
    """Return the ranks that waited and were ended in the same way, so that one sentence can name them."""
    waited = {*verdict.arrived, *(verdict.missing if verdict.kind in CIRCLES else ())}
    gone = [each for each in graph.absent if each.name in waited and each.fate in FAILED]
    gone += [
        AbsentProcess(name=head.name, rank=head.rank, fate="raised", text=head.error, head=head)
        for head in graph.heads
        if head.name in waited and head.state == "failed"
    ]
    return [each for each in gone if each.fate == gone[0].fate]


def _has_not_come(graph: WaitGraph, name: str, verdict: Verdict) -> bool:
    """Return whether a process is known to be where it was; in doubt it has come."""
    absent = graph.absent_by_name.get(name)
    head = absent.head if absent is not None else graph.by_name.get(name)
    if head is None:
        return True
    if (entered := _entered(head, verdict)) is not None:
        return entered < verdict.seq
    return absent is None and head.has_answered and head.still_s >= graph.stall_after_s


def _entered(head: ProcessSnapshot, verdict: Verdict) -> int | None:
    """Number of the last collective that a process has entered in the group of a verdict, None where that is open."""
    groups = (each for each in head.groups if (each.name, each.ranks) == (verdict.group, verdict.members))
    return next((each.entered for each in groups), None) if verdict.seq else None
