"""Processes that give no answer: what they do meanwhile, and since how many looks.

A rank may hold the GIL for minutes in native code, or its host may be busy; then its monitor is silent and nothing is
wrong. So silence counts only after several looks in which neither the process nor any descendant did anything.
"""

import itertools
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from offbeat_liveness._diagnosis.graph import BUSY, Fate
from offbeat_liveness._network.side_channel import Address
from offbeat_liveness._process.head import Head, from_data
from offbeat_liveness._process.kernel.proc import pid_state
from offbeat_liveness._process.kernel.tree_usage import TreeUsage, rates, tree_usage

Key = tuple[str, int]
PATIENT_LOOKS: Final = 3
FORGOTTEN_S: Final = 60.0  # a look this long ago says nothing about now
MOVING_CORES: Final = 0.05
# A process that is there, or of which nothing is known, may be silent for a while and be well.
PATIENT_FATES: Final[frozenset[Fate]] = frozenset(("silent", "unreachable"))


def witness(pids: Mapping[str, int]) -> dict[str, Any]:
    """What this machine tells of processes of its own: births by pid in, states and usage out, as JSON has them."""
    states = {pid: pid_state(int(pid), born) for pid, born in pids.items()}
    usage = {pid: asdict(tree_usage(int(pid))) for pid, state in states.items() if state == "runs"}
    return {"states": states, "usage": usage}


def read_usage(said: Mapping[str, Any]) -> dict[str, TreeUsage]:
    """Usage by pid, from what a witness told."""
    return {pid: from_data(TreeUsage, data) for pid, data in said.get("usage", {}).items()}


@dataclass(frozen=True)
class Silence:
    """Of one process: looks without an answer and without progress, and what it had used at the last."""

    num_looks: int = 0
    usage: TreeUsage | None = None
    busy: float = 0.0
    is_moving: bool = False
    time_s: float = 0.0


class Silences:
    """What the looks before have seen of those who do not answer."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Silence] = {}

    def heard(self, keys: Iterable[Key]) -> None:
        """These have answered."""
        for key in keys:
            self._by_key.pop(key, None)

    def note(self, key: Key, *usages: TreeUsage | None) -> None:
        """One look more in which a process gave no answer, and what it had used at some moments of it."""
        known, now_s = self._by_key.get(key, Silence()), time.monotonic()
        if now_s - known.time_s > FORGOTTEN_S:
            known = Silence()
        seen = [each for each in (known.usage, *usages) if each is not None and each.num_processes]
        steps = [rates(before, after) for before, after in itertools.pairwise(seen)]
        busy = max((max(step.cores, float(step.at_work)) for step in steps), default=0.0)
        is_moving = busy >= MOVING_CORES or any(step.moves_data for step in steps)
        self._by_key[key] = Silence(
            num_looks=1 if is_moving else known.num_looks + 1,
            usage=seen[-1] if seen else known.usage,
            busy=busy,
            is_moving=is_moving,
            time_s=now_s,
        )

    def is_over(self, key: Key, fate: Fate) -> bool:
        """Whether a process has been silent so long that its fate counts."""
        return fate not in PATIENT_FATES or self._by_key.get(key, Silence()).num_looks >= PATIENT_LOOKS

    def stand_in(self, address: Address, still_s: float) -> Head:
        """A head for a process that cannot speak for itself: it counts as slow, not as dead.

        Args:
            address: whose.
            still_s: how long others have waited for it at most.
        """
        known = self._by_key.get((address.machine, address.pid), Silence())
        note = f"{address.name} does not answer ({known.num_looks} of {PATIENT_LOOKS} looks)"
        if known.is_moving:
            note = f"{address.name} does not answer, but computes: native code in it holds the GIL"
        head = Head(key=f"{address.machine}:{address.pid}", name=address.name, rank=address.rank, world=address.world)
        return replace(
            head,
            pid=address.pid,
            host=address.machine,
            time_s=time.time(),
            still_s=still_s,
            busy=max(known.busy, BUSY),
            notes=(note,),
        )
