"""Which rollout engine is slower than its fellows: shown, and never ended. Pure: it is told what was measured."""

from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import Final

STRAGGLER_FACTOR: Final = 3.0
"""An engine this many times slower than the median of the others is a straggler."""

ENOUGH_REQUESTS: Final = 4
"""Answers seen of each engine before it is compared."""

FORGET: Final = 0.8
"""What was seen before counts so much after each answer: an engine that recovers is soon no straggler any more."""


@dataclass
class _Seen:
    """What has been seen of one engine, the latest counting most."""

    num_requests: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of one sample."""
        return self.tokens / max(self.seconds, 1e-9)


class EngineSpeeds:
    """Compares how fast a sample grows on each engine, waiting included, as whoever asked for it sees it."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def took(self, name: str, num_tokens: int, seconds: float) -> None:
        """Take in one answer.

        Args:
            name: of the engine.
            num_tokens: of the longest sample of the answer.
            seconds: from question to answer.
        """
        seen = self._seen.setdefault(name, _Seen())
        seen.num_requests += 1
        seen.tokens = FORGET * seen.tokens + num_tokens
        seen.seconds = FORGET * seen.seconds + seconds

    def forget(self, name: str) -> None:
        """Begin anew with an engine: it is another process now."""
        self._seen.pop(name, None)

    def stragglers(self, among: Collection[str]) -> dict[str, float]:
        """Engines much slower than the others, and how many times.

        Args:
            among: names of the engines to compare.
        """
        known = {
            name: seen for name in among if (seen := self._seen.get(name)) and seen.num_requests >= ENOUGH_REQUESTS
        }
        slow = {}
        for name, seen in known.items():
            others = [other.tokens_per_s for its_name, other in known.items() if its_name != name]
            if others and median(others) > STRAGGLER_FACTOR * seen.tokens_per_s:
                slow[name] = median(others) / max(seen.tokens_per_s, 1e-9)
        return slow
