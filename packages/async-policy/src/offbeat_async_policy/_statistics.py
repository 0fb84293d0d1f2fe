"""What the policy counts. At the end submitted - reissued = trained + filtered + dropped."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Statistics:
    """Counts since the start of the run, kept over restores.

    Args:
        submitted: groups given to an engine, each time counted.
        reissued: of those, the ones given out again because an engine died or the run was restored.
        trained: groups that entered a finished update.
        filtered: groups that finished without learning signal.
        dropped: groups given up because they were older than max_version_lag.
        updates: finished updates; the policy version.
        syncs: finished weight syncs.
        lags: trained groups by lag, in updates.
    """

    submitted: int = 0
    reissued: int = 0
    trained: int = 0
    filtered: int = 0
    dropped: int = 0
    updates: int = 0
    syncs: int = 0
    lags: Counter[int] = field(default_factory=Counter)

    @property
    def mean_lag(self) -> float:
        """Updates, over trained groups; 0 before the first."""
        return sum(lag * count for lag, count in self.lags.items()) / self.trained if self.trained else 0.0

    @property
    def max_lag(self) -> int:
        """Updates; 0 before the first trained group."""
        return max(self.lags, default=0)

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON: `lags` as sorted [lag, count] pairs."""
        return {**vars(self), "lags": [list(pair) for pair in sorted(self.lags.items())]}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Statistics":
        """Read what `to_plain` wrote."""
        return cls(**{**plain, "lags": Counter({int(lag): int(count) for lag, count in plain["lags"]})})
