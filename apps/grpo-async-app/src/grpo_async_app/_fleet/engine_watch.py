"""Watch over rollout engines: which are slow, and which decode in vain, from their answers."""

from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import Final

from offbeat_actors import StuckError
from offbeat_core import EngineHealth

STRAGGLER_FACTOR: Final = 3.0
"""An engine this many times slower than the median of the others is a straggler."""

ENOUGH_REQUESTS: Final = 4
"""Answers seen of each engine before it is compared."""

FORGET: Final = 0.8
"""Weight of earlier measurements after each answer: an engine that recovers soon stops being a straggler."""


@dataclass
class _Seen:
    """Measurements of one engine; recent ones weigh most."""

    num_requests: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


class EngineSpeeds:
    """Compares how fast a sample grows on each engine, waiting included, as the caller sees it."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def took(self, name: str, num_tokens: int, seconds: float) -> None:
        """Take in one answer: tokens of its longest sample, and seconds from question to answer."""
        seen = self._seen.setdefault(name, _Seen())
        seen.num_requests += 1
        seen.tokens = FORGET * seen.tokens + num_tokens
        seen.seconds = FORGET * seen.seconds + seconds

    def forget(self, name: str) -> None:
        """Begin anew with an engine: it is another process now."""
        self._seen.pop(name, None)

    def stragglers(self, among: Collection[str]) -> dict[str, float]:
        """Engines much slower than the others, and how many times."""
        known = {
            name: seen for name in among if (seen := self._seen.get(name)) and seen.num_requests >= ENOUGH_REQUESTS
        }
        slow = {}
        for name, seen in known.items():
            others = [other.tokens_per_s for its_name, other in known.items() if its_name != name]
            if others and median(others) > STRAGGLER_FACTOR * seen.tokens_per_s:
                slow[name] = median(others) / max(seen.tokens_per_s, 1e-9)
        return slow


LONGEST_LOOK: Final = 0.5
"""Share of the bound that the time between two answers counts at most: a machine that slept has shown nothing."""


class TokenWatch:
    """Finds one process of an engine stuck: it decodes samples, and no token comes.

    A process is stuck when its answers say for `stuck_after_s` that samples are being decoded, and always the same
    number of tokens. An answer that nothing is decoded (idle, paused, asleep, taking weights, computing prompts) ends
    the count.

    Args:
        stuck_after_s: longer than any step of the engine.
    """

    def __init__(self, stuck_after_s: float) -> None:
        self._stuck_after_s = stuck_after_s
        self._in_vain_s = 0.0
        self._last: tuple[int, float] | None = None  # tokens, and when they were reported, if any are decoded

    def look(self, health: EngineHealth, now_s: float) -> None:
        """Take one answer, received at this time; raise StuckError where it makes the time full."""
        last, self._last = self._last, (health.num_tokens, now_s) if health.num_decoding else None
        if last is None or self._last is None or last[0] != health.num_tokens:
            self._in_vain_s = 0.0
            return
        self._in_vain_s += min(now_s - last[1], LONGEST_LOOK * self._stuck_after_s)
        if self._in_vain_s >= self._stuck_after_s:
            raise StuckError(f"it decodes {health.num_decoding} samples and no token came")
