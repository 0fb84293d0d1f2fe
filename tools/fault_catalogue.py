"""The faults of tests/e2e/faults: what each is an example of, and what the liveness monitor is to say of it.

The programs are plain torch, as somebody might have written them. In each, `# missing` marks the line at which the
guilty ranks are, and `# waits` the line at which the others wait for them. tests/e2e/faults.toml lists them.
"""

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from workspace import ROOT

FAULTS: Final = ROOT / "tests" / "e2e" / "faults"
SIZES: Final = (2, 4, 8)
# Who is guilty, by number of ranks.
GUILTY: Final[dict[str, Callable[[int], set[int]]]] = {
    "first": lambda size: {0},
    "second": lambda size: {1},
    "everybody": lambda size: set(range(size)),
    "all but first": lambda size: set(range(1, size)),
    "upper half": lambda size: set(range(size // 2, size)),
    "others of a replica": lambda size: set(range(size)) - set(range(0, size, max(2, size // 2))),
    # Ranks with cp 1 on the last stage of the pipeline: they never come to the reduction.
    "later context": lambda size: {rank for rank in range(1, size, 2) if size < 8 or rank >= size // 2},
    "next": lambda size: {size},
}


@dataclass(frozen=True)
class Reason:
    """Why a verdict is a "proof", on which a job may be ended at once, or a "suspicion".

    A suspicion is only said, and acted upon at the timeout of what is waited in.
    """

    certainty: Literal["proof", "suspicion"]
    text: str


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One program that hangs or fails.

    Args:
        name: of its file.
        example_of: class of the known hangs (A to F), or what else it stands for.
        kinds: verdicts that are right.
        because: why it is a proof or a suspicion.
        guilty: ranks that the verdict may name as those to look at, by number of ranks.
        sizes: numbers of ranks it makes sense with.
        axes: mesh axes that the verdict must name, where the group is not the whole world.
        says: regular expressions that the verdict must hold: what a rank outside torch waits for, what hid an error.
        ends: how it ends where nobody ends it: "timeout" of a call of torch, "well", or "never".
    """

    name: str
    example_of: str
    kinds: tuple[str, ...]
    because: Reason
    guilty: Callable[[int], set[int]]
    sizes: tuple[int, ...] = SIZES
    axes: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    ends: Literal["timeout", "well", "never"] = "timeout"

    @property
    def certainty(self) -> Literal["proof", "suspicion"]:
        """Whether it can be proven."""
        return self.because.certainty

    @property
    def script(self) -> Path:
        """The program."""
        return FAULTS / f"{self.name}.py"

    @property
    def title(self) -> str:
        """The first line of its docstring."""
        return self.script.read_text().partition('"""')[2].partition('"""')[0].strip()

    def lines(self, tag: str) -> set[int]:
        """Numbers of the lines with this mark."""
        numbered = enumerate(self.script.read_text().splitlines(), start=1)
        return {number for number, line in numbered if f"# {tag}" in line}


def _faults() -> Iterator[Fault]:
    """As the file lists them, whose lists become tuples."""
    read = tomllib.loads(FAULTS.with_suffix(".toml").read_text())
    reasons = {name: Reason("proof", text) for name, text in read["proofs"].items()}
    reasons |= {name: Reason("suspicion", text) for name, text in read["suspicions"].items()}
    for name, keys in read["faults"].items():
        plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()}
        plain |= {"because": reasons[keys["because"]], "guilty": GUILTY[keys.get("guilty", "first")]}
        yield Fault(name=name, **plain)


CATALOGUE: Final = tuple(_faults())
"""Every fault; tests, the table in docs/liveness.md and its examples use these."""


CYCLES: Final = ("different-order", "wait-cycle")
"""Verdicts in which nobody alone is to blame."""


def named_ranks(verdict: dict[str, Any]) -> set[int]:
    """Ranks that a verdict names as missing."""
    return {int(name.removeprefix("rank ")) for name in verdict["missing"] if name.startswith("rank ")}


def named_axes(verdict: dict[str, Any]) -> set[str]:
    """Mesh axes of the groups that a verdict is about; torch calls dp and cp together "dp_cp"."""
    groups = [verdict["axes"], *(link["axes"] for link in verdict["links"])]
    return {axis for axes in groups for name in axes for axis in name.split("_")}


def ranks_at(verdict: dict[str, Any], fault: Fault, tag: str) -> set[int]:
    """Ranks that a verdict shows at the lines of a mark."""
    lines = fault.lines(tag)
    return {
        party["rank"]
        for party in verdict["parties"]
        if any(site["file"].endswith(fault.script.name) and site["line"] in lines for site in party["stack"])
    }
