"""Score of hanglint: bugs of a corpus against its findings, and recall over many."""

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offbeat_hanglint import Finding

DATA: Final = Path(__file__).parent / "hanglint"
NEAR_LINES: Final = 10
BY: Final = ("class", "pattern", "statically_detectable")


@dataclass(frozen=True)
class Bug:
    """A hang that its project fixed, and the places that were at fault.

    Attributes:
        record: its line of the corpus.
        functions: (path, qualified name) of each faulty function.
        spans: (path, first line, last line) at the parent commit.
    """

    record: Mapping[str, Any]
    functions: tuple[tuple[str, str], ...]
    spans: tuple[tuple[str, int, int], ...]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Bug":
        """Read `path::Class.method` and `path:first-last`."""
        functions = tuple((path, name) for path, _, name in (text.partition("::") for text in record["functions"]))
        spans = []
        for text in record["lines"]:
            path, _, lines = text.rpartition(":")
            first, _, last = lines.partition("-")
            spans.append((path, int(first), int(last or first)))
        return cls(record, functions, tuple(spans))

    @property
    def id(self) -> str:
        """Its name in the corpus."""
        return str(self.record["id"])

    @property
    def tree(self) -> str:
        """The folder of the repository at the commit before the mend."""
        return f"{self.record['repo'].replace('/', '+')}@{self.record['parent_commit'][:10]}"

    @property
    def half(self) -> str:
        """Return whether it is "open" to learn from or "hidden", by the first digit of the identifier's SHA-1."""
        return "open" if hashlib.sha1(self.id.encode()).hexdigest() < "8" else "hidden"

    def is_at(self, finding: Finding) -> bool:
        """Return whether a finding lies in a named function, a function inside of it, or near the named lines."""
        in_function = any(
            finding.path == path and name != "<module>" and f"{finding.function}.".startswith(f"{name}.")
            for path, name in self.functions
        )
        return in_function or any(
            finding.path == path and first - NEAR_LINES <= finding.line <= last + NEAR_LINES
            for path, first, last in self.spans
        )

    def matches(self, findings: Iterable[Finding], fitting: Mapping[str, Sequence[str]]) -> list[Finding]:
        """Return the findings that find it."""
        rules = fitting[self.record["pattern"]]
        return [finding for finding in findings if finding.rule in rules and self.is_at(finding)]


def read_bugs(path: Path) -> list[Bug]:
    """Return the bugs of a corpus, one JSON object a line."""
    return [Bug.of(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def fitting_rules(path: Path = DATA / "patterns.toml") -> dict[str, list[str]]:
    """Return the rules that fit each pattern."""
    return {pattern: row["rules"] for pattern, row in tomllib.loads(path.read_text(encoding="utf-8")).items()}


@dataclass(frozen=True)
class Score:
    """One bug after its tree was read."""

    bug: Bug
    found_by: tuple[tuple[str, str, int], ...]
    """(rule, confidence, line) of each finding that finds it."""

    @property
    def is_found(self) -> bool:
        """At any confidence."""
        return bool(self.found_by)

    @property
    def is_found_by_default(self) -> bool:
        """At medium or high confidence, the command's default."""
        return any(confidence != "low" for _, confidence, _ in self.found_by)

    @property
    def is_found_high(self) -> bool:
        """At high confidence."""
        return any(confidence == "high" for _, confidence, _ in self.found_by)

    def row(self) -> dict[str, Any]:
        """Plain data."""
        record = self.bug.record
        rules = sorted({f"{rule} {confidence}" for rule, confidence, _ in self.found_by})
        return {"id": self.bug.id, **{key: record[key] for key in BY}, "found": self.is_found,
                "by default": self.is_found_by_default, "high": self.is_found_high, "by": ", ".join(rules)}  # fmt: skip

    def missed_row(self) -> dict[str, str]:
        """Return what a missed bug was about."""
        record = self.bug.record
        return {"id": self.bug.id, "pattern": record["pattern"], "mechanism": record["mechanism"]}


def recall(scores: Sequence[Score], by: str) -> list[dict[str, Any]]:
    """Return how many bugs of each kind are found, at any confidence, by default and at high, and over all kinds."""
    kinds = sorted({str(score.bug.record[by]) for score in scores})
    rows = []
    for kind in [*kinds, "all"]:
        chosen = [score for score in scores if kind in ("all", str(score.bug.record[by]))]
        found = sum(score.is_found for score in chosen)
        default = sum(score.is_found_by_default for score in chosen)
        high = sum(score.is_found_high for score in chosen)
        rows.append({by: kind, "bugs": len(chosen), "found": found, "found, %": 100 * found / len(chosen),
                     "by default": default, "by default, %": 100 * default / len(chosen),
                     "at high": high, "at high, %": 100 * high / len(chosen)})  # fmt: skip
    return rows
