"""The healthy programs of tests/e2e/healthy: long pauses as real jobs have them, and nothing wrong.

tests/e2e/healthy.toml lists them. Each is plain torch, prints "rank N: done" on every rank, and takes the length of its
pauses from PAUSE_S.
"""

import re
import signal
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from fault_runs import Act, FaultRun, Observation
from workspace import ROOT

PROGRAMS: Final = ROOT / "tests" / "e2e" / "healthy"
SIZES: Final = (2, 4)
# Of one pause: a suspicion, and that it has gone.
MAX_TOLD: Final = 2
SECONDS: Final = re.compile(r"\d+ s\b")
# Until every rank is in its first call, and for what a loaded machine adds.
START_S: Final = 1.0
PATIENCE_S: Final = 40.0


@dataclass(frozen=True, kw_only=True)
class Healthy:
    """One program that stands still for a while and ends well.

    Args:
        name: of its file.
        like: what people do that is like it.
        sizes: numbers of ranks it makes sense with.
        pauses: how many times PAUSE_S it takes at most.
        act: what is done to it from outside: "continue" and "yes" are typed at rank 0 after the pause; at "stop" rank
            1 is stopped for as long.
        unwatched: ranks without the monitor, counted from the last one: -1.
    """

    name: str
    like: str
    sizes: tuple[int, ...] = SIZES
    pauses: float = 1.5
    act: Literal["", "continue", "yes", "stop"] = ""
    unwatched: tuple[int, ...] = ()

    @property
    def script(self) -> Path:
        """The program."""
        return PROGRAMS / f"{self.name}.py"

    @property
    def title(self) -> str:
        """The first line of its docstring."""
        return self.script.read_text().partition('"""')[2].partition('"""')[0].strip()

    def run(self, size: int, *, stall_after_s: float, pause_s: float) -> FaultRun:
        """It, watched, with the policy that ends what is proven to be stuck."""
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


def _healthy() -> Iterator[Healthy]:
    for name, keys in tomllib.loads(PROGRAMS.with_suffix(".toml").read_text()).items():
        plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()}
        yield Healthy(name=name, **plain)


HEALTHY: Final = tuple(_healthy())
"""Every healthy program; tests of each tier and the table in docs/liveness.md use these."""


def complaints(healthy: Healthy, seen: Observation) -> list[str]:
    """What a monitor did wrong to a healthy run; empty if it let it be."""
    told = seen.told
    found = [f"proof on rank {each.rank}: {each.text}" for each in told if each.what == "proof"]
    things = Counter[tuple[str, str]]()
    for rank in seen.outputs:  # where the leader is too busy to answer, the next one says the same: no second thing
        things |= Counter((each.what, SECONDS.sub("", each.text)) for each in told if each.rank == rank)
    if things.total() > MAX_TOLD:
        found.append(f"{things.total()} things were said: {', '.join(each.what for each in told)}")
    if set(seen.exit_codes.values()) != {0}:
        found.append(f"exit codes {seen.exit_codes}")
    found += [f"rank {rank} is not done" for rank, text in seen.outputs.items() if f"rank {rank}: done" not in text]
    return found


def report(seen: Observation) -> str:
    """Everything that was printed, for a failed test."""
    return "\n".join(f"--- rank {rank}\n{output}" for rank, output in seen.outputs.items())
