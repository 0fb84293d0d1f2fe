"""Where the time of a simulated run went: the trainer's seconds and the engines' seconds, by what they did.

trainer   training    an update runs
          supply      waits for groups, while at least half of the engines run more than a tail: they are too slow
          bound       waits for groups, while most engines run a tail or nothing, as no rule lets another group start
          drain       a sync is due, and waits for what is in flight
          sync        weights travel
engines   decoding    samples run
          tail        at most an eighth of the most samples that ever ran on one engine
          bound       empty: the staleness bound or max_in_flight is reached, and the trainer has not caught up
          drain       empty: a sync is due, and waits for other engines
          end         empty: no prompts are left
          open        empty although a group might start: nothing of the kind should last
          sync        weights travel
"""

from collections import defaultdict
from typing import Final

TRAINER_KINDS: Final = ("training", "supply", "bound", "drain", "sync")
ENGINE_KINDS: Final = ("decoding", "tail", "bound", "drain", "end", "open", "sync")
TAIL_SHARE: Final = 1 / 8
WAITING: Final = "waiting"
"""What the trainer does when it waits for groups: the account itself tells supply from bound."""


class TimeAccount:
    """Adds up seconds; the caller says what holds from now on, and when time has passed.

    Args:
        num_engines: rollout engines.
    """

    def __init__(self, num_engines: int) -> None:
        self.trainer_s: defaultdict[str, float] = defaultdict(float)
        self.engine_s: defaultdict[str, float] = defaultdict(float)
        self.trainer = WAITING
        self.closed = "open"
        self.syncing = False
        self._running = [0] * num_engines
        self._most_running = 1
        self._num_by_state = {"decoding": 0, "tail": 0, "empty": num_engines}

    def advance(self, passed_s: float) -> None:
        """Let time pass under what holds now."""
        if passed_s <= 0:
            return
        self.trainer_s[self._trainer_kind()] += passed_s
        if self.syncing:
            self.engine_s["sync"] += passed_s * len(self._running)
            return
        self.engine_s["decoding"] += passed_s * self._num_by_state["decoding"]
        self.engine_s["tail"] += passed_s * self._num_by_state["tail"]
        self.engine_s[self.closed] += passed_s * self._num_by_state["empty"]

    def engine_runs(self, engine: int, num_running: int) -> None:
        """From now on the engine runs so many samples."""
        self._num_by_state[self._state(self._running[engine])] -= 1
        self._running[engine] = num_running
        if num_running > self._most_running:
            self._most_running = num_running
            self._num_by_state = dict.fromkeys(self._num_by_state, 0)
            for each in self._running:
                self._num_by_state[self._state(each)] += 1
        else:
            self._num_by_state[self._state(num_running)] += 1

    def _trainer_kind(self) -> str:
        if self.trainer != WAITING:
            return self.trainer
        return "supply" if 2 * self._num_by_state["decoding"] >= len(self._running) else "bound"

    def _state(self, num_running: int) -> str:
        if not num_running:
            return "empty"
        return "tail" if num_running <= self._most_running * TAIL_SHARE else "decoding"


def shares(seconds: dict[str, float], kinds: tuple[str, ...]) -> dict[str, float]:
    """Each kind's share of all seconds; zeros when there were none."""
    whole = sum(seconds.values()) or 1.0
    return {kind: seconds.get(kind, 0.0) / whole for kind in kinds}
