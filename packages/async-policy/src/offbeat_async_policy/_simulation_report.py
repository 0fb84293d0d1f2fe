"""What came of a simulated run."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SimulationReport:
    """What came of it.

    Args:
        mode: name of the asynchronous mode.
        elapsed_s: simulated seconds of the run.
        updates, syncs, submitted, trained, filtered, dropped: see `Statistics`.
        groups_per_s, tokens_per_s: trained groups, and completion tokens of trained groups, per simulated second.
        seconds_per_sync: simulated seconds for as many groups as are trained between two syncs.
        trainer_idle_share: share of the time in which no update ran.
        engine_idle_share: share of the time in which an engine decoded nothing, over all engines.
        slot_use: samples running, as a share of max_running, over all engines and the whole time.
        wasted_token_share: sampled tokens of groups that were filtered or dropped, as a share of all sampled.
        trainer_shares: share of the trainer's time by what it did; see `_time_account`.
        engine_shares: the same for the engines.
        mean_lag, max_lag: in updates.
        lags: trained groups by lag.
    """

    mode: str
    elapsed_s: float
    updates: int
    syncs: int
    submitted: int
    trained: int
    filtered: int
    dropped: int
    groups_per_s: float
    tokens_per_s: float
    seconds_per_sync: float
    trainer_idle_share: float
    engine_idle_share: float
    slot_use: float
    wasted_token_share: float
    trainer_shares: dict[str, float]
    engine_shares: dict[str, float]
    mean_lag: float
    max_lag: int
    lags: dict[int, int]

    def speedup_over(self, other: "SimulationReport") -> float:
        """Trained groups per second, as a multiple of the other run's; nan when the other trained nothing."""
        return self.groups_per_s / other.groups_per_s if other.groups_per_s else float("nan")

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)
