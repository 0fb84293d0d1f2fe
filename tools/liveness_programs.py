"""Programs that hang or fail (tests/e2e/faults) and healthy ones with long pauses (tests/e2e/healthy), in plain torch.

faults.toml and healthy.toml beside the folders list them. In a fault, `# missing` marks the line at which the guilty
ranks are, and `# waits` the line at which the others wait for them. A healthy program prints "rank N: done" on every
rank, and takes the length of its pauses from PAUSE_S.
"""

import re
import signal
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from fault_runs import Act, FaultRun, Observation
from workspace import ROOT

E2E: Final = ROOT / "tests" / "e2e"
FAULTS: Final = E2E / "faults"
PROGRAMS: Final = E2E / "healthy"
RANDOM_PROGRAM: Final = E2E / "healthy_runs.py"


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program of a folder."""

    folder: Path
    name: str

    @property
    def script(self) -> Path:
        """Return the path of the program."""
        return self.folder / f"{self.name}.py"

    @property
    def title(self) -> str:
        """Return the first line of its docstring."""
        return self.script.read_text().partition('"""')[2].partition('"""')[0].strip()

    def lines(self, tag: str) -> set[int]:
        """Return the numbers of the lines with this mark."""
        numbered = enumerate(self.script.read_text().splitlines(), start=1)
        return {number for number, line in numbered if f"# {tag}" in line}


def _read_list(folder: Path) -> dict[str, Any]:
    """Return the list beside a folder, whose lists become tuples."""

    def frozen(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: frozen(each) for key, each in value.items()}
        return tuple(value) if isinstance(value, list) else value

    read: dict[str, Any] = frozen(tomllib.loads(folder.with_suffix(".toml").read_text()))
    return read


# The guilty ranks, by number of ranks.
GUILTY: Final[dict[str, Callable[[int], set[int]]]] = {
    "first": lambda size: {0},
    "second": lambda size: {1},
    "all": lambda size: set(range(size)),
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

    A suspicion is only reported, and acted upon at the timeout of the call that waits.
    """

    certainty: Literal["proof", "suspicion"]
    text: str


@dataclass(frozen=True, kw_only=True)
class Fault(Program):
    """One program that hangs or fails.

    Args:
        example_of: class of the known hangs (A to F), or the other kind that it is an example of.
        kinds: verdicts that are right.
        because: why it is a proof or a suspicion.
        guilty: ranks that the verdict may name as those to look at, by number of ranks.
        sizes: numbers of ranks that make sense for it.
        axes: mesh axes that the verdict must name, where the group is not the whole world.
        says: regular expressions that the verdict must hold: what a rank outside torch waits for, what hid an error.
        ends: how it ends if no process ends it: "timeout" of a call of torch, "well", or "never".
    """

    example_of: str
    kinds: tuple[str, ...]
    because: Reason
    guilty: Callable[[int], set[int]]
    sizes: tuple[int, ...] = (2, 4, 8)
    axes: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    ends: Literal["timeout", "well", "never"] = "timeout"

    @property
    def certainty(self) -> Literal["proof", "suspicion"]:
        """Return whether it can be proven."""
        return self.because.certainty


def _read_faults() -> tuple[Fault, ...]:
    read = _read_list(FAULTS)
    reasons = {name: Reason("proof", text) for name, text in read["proofs"].items()}
    reasons |= {name: Reason("suspicion", text) for name, text in read["suspicions"].items()}

    def fault(name: str, keys: Mapping[str, Any]) -> Fault:
        known = {"because": reasons[keys["because"]], "guilty": GUILTY[keys.get("guilty", "first")]}
        return Fault(**{"folder": FAULTS, "name": name, **keys, **known})

    return tuple(fault(name, keys) for name, keys in read["faults"].items())


CATALOGUE: Final = _read_faults()
"""Every fault; tests, the table in docs/liveness-programs.md and its examples use these."""


# For a rank that is ending: where the error was raised.
RAISED: Final = re.compile(r"\(raised at ([^)]*)")
CYCLES: Final = ("different-order", "wait-cycle")
"""Verdicts in which no single rank is to blame."""


def named_ranks(verdict: dict[str, Any]) -> set[int]:
    """Return ranks that a verdict names as missing."""
    return {int(name.removeprefix("rank ")) for name in verdict["missing"] if name.startswith("rank ")}


def named_axes(verdict: dict[str, Any]) -> set[str]:
    """Return mesh axes of the groups that a verdict is about; torch calls dp and cp together "dp_cp"."""
    groups = [verdict["axes"], *(link["axes"] for link in verdict["links"])]
    return {axis for axes in groups for name in axes for axis in name.split("_")}


def ranks_at(verdict: dict[str, Any], fault: Fault, tag: str) -> set[int]:
    """Return ranks that a verdict shows at the lines of a mark: waiting there, or ending after an error there."""
    lines = fault.lines(tag)
    return {
        party["rank"]
        for party in verdict["parties"]
        if any(site["file"].endswith(fault.script.name) and site["line"] in lines for site in party["stack"])
        or any(
            f"{fault.script.name}:{line} in " in raised for raised in RAISED.findall(party["doing"]) for line in lines
        )
    }


# For one pause: a suspicion, and the message that it is over.
MAX_MESSAGES: Final = 2
SECONDS: Final = re.compile(r"\d+ s\b")
# Until every rank is in its first call, and for what a loaded machine adds.
START_S: Final = 1.0
PATIENCE_S: Final = 40.0


@dataclass(frozen=True, kw_only=True)
class Healthy(Program):
    """One program that makes no progress for a while and ends well.

    Args:
        like: the common code that it resembles.
        sizes: numbers of ranks that make sense for it.
        pauses: how many times PAUSE_S it takes at most.
        act: what is done to it from outside: "continue" and "yes" are typed at rank 0 after the pause; at "stop" rank
            1 is stopped for as long.
        unwatched: ranks without the monitor, counted from the last one: -1.
    """

    like: str
    sizes: tuple[int, ...] = (2, 4)
    pauses: float = 1.5
    act: Literal["", "continue", "yes", "stop"] = ""
    unwatched: tuple[int, ...] = ()

    def run(self, size: int, *, stall_after_s: float, pause_s: float) -> FaultRun:
        """Return a watched run of it, with the policy that ends ranks that are proven to be stuck."""
        limit_s = START_S + self.pauses * pause_s + PATIENCE_S
        return FaultRun(
            script=self.script,
            size=size,
            stall_after_s=stall_after_s,
            limit_s=limit_s,
            last_rank_s=limit_s,
            environment=(("PAUSE_S", str(pause_s)),),
            acts=self._acts(pause_s),
            unwatched=tuple(size + place for place in self.unwatched),
        )

    def _acts(self, pause_s: float) -> tuple[Act, ...]:
        end_s = START_S + pause_s
        if self.act == "stop":
            stop = Act(at_s=START_S, rank=1, signal=signal.SIGSTOP)
            return (stop, Act(at_s=end_s, rank=1, signal=signal.SIGCONT))
        return (Act(at_s=end_s, rank=0, text=f"{self.act}\n"),) if self.act else ()


HEALTHY: Final = tuple(Healthy(folder=PROGRAMS, name=name, **keys) for name, keys in _read_list(PROGRAMS).items())
"""Every healthy program; tests of each tier and the table in docs/liveness-programs.md use these."""


def random_run(seed: int, size: int, *, num_runs: int, stall_after_s: float) -> FaultRun:
    """Return a run of healthy programs of random calls, whose ranks come late by up to half of `stall_after_s`."""
    environment = {"HEALTHY_SEED": seed, "HEALTHY_RUNS": num_runs, "HEALTHY_MAX_DELAY_S": stall_after_s / 2}
    return FaultRun(
        script=RANDOM_PROGRAM,
        size=size,
        stall_after_s=stall_after_s,
        limit_s=200,
        environment=tuple((name, str(value)) for name, value in environment.items()),
    )


def complaints(healthy: Healthy, seen: Observation) -> list[str]:
    """Return what a monitor did wrong in a healthy run; empty if it left the run alone."""
    messages = seen.messages
    found = [f"{each.what} on rank {each.rank}: {each.text}" for each in messages if each.what in ("proof", "failure")]
    counted = Counter[tuple[str, str]]()
    for rank in seen.outputs:  # where the leader is too busy to answer, the next one reports the same
        counted |= Counter((each.what, SECONDS.sub("", each.text)) for each in messages if each.rank == rank)
    if counted.total() > MAX_MESSAGES:
        found.append(f"{counted.total()} messages were printed: {', '.join(each.what for each in messages)}")
    if set(seen.exit_codes.values()) != {0}:
        found.append(f"exit codes {seen.exit_codes}")
    found += [f"rank {rank} is not done" for rank, text in seen.outputs.items() if f"rank {rank}: done" not in text]
    return found


def report(seen: Observation) -> str:
    """Return everything that was printed, for a failed test."""
    return "\n".join(f"--- rank {rank}\n{output}" for rank, output in seen.outputs.items())
