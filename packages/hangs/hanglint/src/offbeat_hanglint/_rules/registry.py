"""The list of rules."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from offbeat_hanglint._program.view import FunctionView
from offbeat_hanglint._rules import exits, groups, guards, loops, shapes, submodules, waits
from offbeat_hanglint._rules.finding import Confidence, Finding

CHECKS: Final[tuple[Callable[[FunctionView], Iterator[Finding]], ...]] = (
    guards.check,
    exits.check,
    loops.check,
    groups.check,
    shapes.check,
    submodules.check,
    submodules.check_control,
    waits.check,
)


@dataclass(frozen=True)
class Rule:
    """One kind of hang.

    Attributes:
        id: "HL" and three digits; a page `docs/rules/<id>.md` explains it.
        name: a few words with dashes.
        summary: one sentence, what it reports.
        highest: the highest confidence it gives.
    """

    id: str
    name: str
    summary: str
    highest: Confidence


RULES: Final = (
    Rule(
        "HL001",
        "collective-under-rank-guard",
        "A collective runs under a condition on the axes of its own group.",
        "high",
    ),
    Rule(
        "HL002",
        "call-under-rank-guard",
        "A call that reaches a collective runs under a condition on the axes of that collective's group.",
        "high",
    ),
    Rule(
        "HL003",
        "leader-only-wrapped-model",
        "Work of one rank reaches a wrapped or sharded model, whose forward, save or generate is a collective.",
        "low",
    ),
    Rule(
        "HL004",
        "collective-under-local-condition",
        "A collective runs under a condition that each rank decides by itself: data, time, files, exceptions.",
        "medium",
    ),
    Rule(
        "HL005",
        "leader-only-slow-work",
        "One rank does long work while the others already wait in a collective with a timeout.",
        "low",
    ),
    Rule(
        "HL010", "early-exit-before-collective", "Some ranks leave before a collective that the others enter.", "high"
    ),
    Rule("HL011", "one-rank-raises", "One rank may raise alone while the others wait in a collective.", "high"),
    Rule(
        "HL012",
        "swallowed-error-between-collectives",
        "An error of one rank is swallowed, and the rank skips a collective of the others.",
        "medium",
    ),
    Rule(
        "HL013",
        "teardown-on-exception",
        "A process group is destroyed, or a barrier entered, on the way of an exception.",
        "high",
    ),
    Rule(
        "HL020", "uneven-loop", "A collective runs in a loop whose number of rounds may differ between ranks.", "medium"
    ),
    Rule(
        "HL021",
        "collective-per-local-entry",
        "A collective runs once per entry of a container that each rank fills by itself.",
        "medium",
    ),
    Rule(
        "HL022",
        "unordered-collectives",
        "Collectives follow the order of a container whose order may differ between ranks.",
        "high",
    ),
    Rule("HL030", "new-group-not-by-all", "new_group is not called by every rank, or not with the same ranks.", "high"),
    Rule(
        "HL031",
        "group-local-source",
        "A literal or group-local rank is given as global source or destination of a subgroup.",
        "high",
    ),
    Rule(
        "HL032",
        "wrong-group",
        "A collective runs over the default group, or another group than the ranks that reach it.",
        "high",
    ),
    Rule("HL033", "uneven-shapes", "Tensors whose sizes depend on data are gathered without padding.", "high"),
    Rule(
        "HL034",
        "computed-source-rank",
        "A source rank is computed from a global rank instead of read from the group.",
        "medium",
    ),
    Rule(
        "HL040",
        "sharded-module-skipped",
        "A sub-module of a sharded model runs only where the data asks for it.",
        "low",
    ),
    Rule(
        "HL041",
        "detached-output",
        "An output that stands in for a skipped module does not take part in the loss.",
        "low",
    ),
    Rule(
        "HL042",
        "collectives-from-threads",
        "Collectives run in several threads, tasks or request handlers without an order.",
        "medium",
    ),
    Rule(
        "HL050",
        "wrong-rendezvous",
        "A local rank or a number of devices is given as rank or world size of the rendezvous.",
        "high",
    ),
    Rule("HL051", "no-timeout", "A rendezvous or group has no timeout of its own.", "low"),
    Rule(
        "HL060", "unbounded-ray-wait", "ray.get, ray.wait or a placement group is waited for without a timeout.", "high"
    ),
    Rule(
        "HL061", "unbounded-wait", "A queue, event, socket, thread or process is waited for without a timeout.", "high"
    ),
    Rule("HL062", "blocking-wait-in-async", "An async function blocks its event loop while it waits.", "high"),
    Rule("HL063", "dead-peer-unnoticed", "A loop waits for a flag or an answer whose giver may be gone.", "medium"),
    Rule(
        "HL064",
        "dropped-remote-call",
        "Remote calls are started and their results dropped, so that no code waits for them or sees them fail.",
        "low",
    ),
    Rule("HL065", "unbounded-cluster-start", "A cluster is started or joined without stating its resources.", "low"),
)
