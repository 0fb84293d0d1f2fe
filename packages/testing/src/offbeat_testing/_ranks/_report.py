"""What one rank tells the test's process: plain data, sent as a line of JSON."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["passed", "failed", "expected", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a rank, as torch's flight recorder has it.

    Args:
        group: the group's name in torch; equal on all its members.
        sequence: its number within the group, from 1.
        op: its name.
        inputs, outputs: shapes with dtypes.
        site: where it was called.
        finished: whether torch has seen its end.
    """

    group: str
    sequence: int
    op: str
    inputs: list[str]
    outputs: list[str]
    site: str
    finished: bool

    def __str__(self) -> str:
        tensors = ", ".join(self.inputs or self.outputs)
        return f"{self.op}({tensors}) at {self.site}"


@dataclass(frozen=True, kw_only=True)
class RankState:
    """Where a rank stands: its collectives, the members of its groups and the stacks of its threads.

    Args:
        collectives: None while a thread of the rank used its groups, so that they could not be read.
        members: global ranks, by group.
        stacks: of its threads.
    """

    collectives: list[Collective] | None = field(default_factory=list)
    members: dict[str, list[int]] = field(default_factory=dict)
    stacks: str = ""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """How the body ended on one rank.

    Args:
        outcome: `expected` is a failure that the test's xfail mark allows.
        text: traceback, or reason of a skip.
        at_s: when, on the clock that all processes share.
        state: where it stood.
    """

    outcome: Outcome
    text: str
    at_s: float
    state: RankState


@dataclass(frozen=True, kw_only=True)
class RankVerdict:
    """What the liveness monitor says of all ranks, asked on one of them; empty if it sees nothing stuck."""

    text: str


Message = RankReport | RankState | RankVerdict


def to_line(message: Message) -> bytes:
    """One line for the pipe."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode() + b"\n"


def from_line(line: bytes) -> Message:
    """What `to_line` wrote."""
    fields = json.loads(line)
    kind = fields.pop("kind")
    if kind == "RankVerdict":
        return RankVerdict(**fields)
    if kind == "RankState":
        return _state(fields)
    return RankReport(**{**fields, "state": _state(fields["state"])})


def _state(fields: dict[str, Any]) -> RankState:
    read = fields["collectives"]
    return RankState(**{**fields, "collectives": None if read is None else [Collective(**one) for one in read]})
