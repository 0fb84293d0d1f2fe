"""The finding that a rule reports."""

from dataclasses import dataclass
from typing import Literal

Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True)
class Step:
    """One place on the way from a guard to the collective behind it."""

    path: str
    line: int
    what: str


@dataclass(frozen=True)
class Finding:
    """One place where members of a group may part, or a wait that may not end.

    Attributes:
        rule: "HL" and three digits.
        path: relative to the root that was given.
        line: 1-based, of the statement that is to change; `end_line` is inclusive, `column` 1-based.
        function: qualified within its module ("Class.method"), "<module>" outside of any.
        message: what hangs, in one sentence.
        ranks: which ranks go where.
        steps: from guard to collective.
        advice: the change that mends it.
    """

    rule: str
    confidence: Confidence
    path: str
    line: int
    end_line: int
    column: int
    function: str
    message: str
    ranks: str
    steps: tuple[Step, ...]
    advice: str
