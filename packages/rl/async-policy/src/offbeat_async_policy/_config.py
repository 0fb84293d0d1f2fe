"""Settings of the asynchronous policy, section `async`.

Legend: R groups per update, K updates per sync, σ staleness threshold, M largest version lag.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from offbeat_core import ConfigError, check_ranges, setting


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """Bounds on how far generation may run ahead of training. Staleness 0 with one update between syncs is synchronous.

    Raises:
        ConfigError: a value is out of range, or a combination is impossible or without effect.
    """

    staleness_threshold: float = setting(
        0.5, "σ: share of extra prompt groups that may be generated ahead under old weights; 0 means none.", ge=0
    )
    trigger_parameter_sync_step: int = setting(1, "K: updates between two weight syncs.", "updates", ge=1)
    require_batches: int = setting(1, "Optimizer steps (mini batches) in one update.", ge=1)
    mini_batch_size: int = setting(32, "Prompt groups in one optimizer step.", "groups", ge=1)
    partial_rollout: bool = setting(
        False, "At a sync, hold what is in flight and continue it under the new weights, instead of finishing it first."
    )
    max_version_lag: int | None = setting(
        None, "M: updates between a group's oldest token and its training at most; none for no bound.", "updates", ge=0
    )
    on_exceed: str = setting(
        "wait", "Keep max_version_lag by making the trainer wait, or by dropping groups.", choices=("wait", "drop")
    )
    max_in_flight: int = setting(
        0, "Prompt groups generating at once at most; 0 leaves it to the staleness bound.", "groups", ge=0
    )
    max_filtered_batches: int = setting(
        20,
        "End the run after so many updates' worth of groups without learning signal in a row.",
        "updates",
        ge=1,
    )
    max_group_retries: int = setting(3, "Times one group is issued again after its engine died.", ge=0)
    group_deadline_s: float = setting(7200.0, "Longest time for one group to be generated and scored.", "s", gt=0)
    update_deadline_s: float = setting(7200.0, "Longest time for one update, and for one checkpoint.", "s", gt=0)
    sync_deadline_s: float = setting(600.0, "Longest time for one weight sync.", "s", gt=0)
    stall_after_s: float = setting(
        600.0,
        "With nothing moving for so long while the trainer waits, the run ends and names which role waits for which.",
        "s",
        gt=0,
    )

    def __post_init__(self) -> None:
        check_ranges(self, "async.")
        self._check_staleness_has_effect()
        self._check_partial_rollout_has_effect()
        self._check_version_lag_can_be_kept()

    @property
    def groups_per_update(self) -> int:
        """R: prompt groups the trainer takes for one update."""
        return self.require_batches * self.mini_batch_size

    @property
    def groups_per_sync(self) -> int:
        """R·K: prompt groups trained between two syncs."""
        return self.groups_per_update * self.trigger_parameter_sync_step

    @cached_property
    def max_admitted(self) -> int:
        """⌊R·K·(1+σ)⌋: groups admitted between two syncs, those carried over from before included.

        Exact for the decimal that σ is written as: R·K = 100 and σ = 0.29 give 129, not ⌊128.99…⌋.
        """
        return self.groups_per_sync + math.floor(self.groups_per_sync * Fraction(repr(float(self.staleness_threshold))))

    @property
    def mode(self) -> str:
        """Name of the mode in the design's words."""
        if self.staleness_threshold > 0:
            return "partial" if self.partial_rollout else "stale"
        return "on-policy pipeline" if self.trigger_parameter_sync_step == 1 else "stream off-policy"

    def _check_staleness_has_effect(self) -> None:
        if self.staleness_threshold > 0 and self.max_admitted == self.groups_per_sync:
            raise ConfigError(
                f"async.staleness_threshold={self.staleness_threshold:g} has no effect: with {self.groups_per_sync} "
                "groups between two syncs it allows less than one more; set it to at least "
                f"{math.ceil(1000 / self.groups_per_sync) / 1000:g}, or to 0"
            )

    def _check_partial_rollout_has_effect(self) -> None:
        if self.partial_rollout and self.staleness_threshold == 0:
            raise ConfigError(
                "async.partial_rollout=true has no effect with async.staleness_threshold=0: nothing is in flight at a "
                "sync; set staleness_threshold above 0, or partial_rollout=false"
            )

    def _check_version_lag_can_be_kept(self) -> None:
        smallest = self.trigger_parameter_sync_step - 1
        if self.max_version_lag is None:
            if self.on_exceed == "drop":
                raise ConfigError(
                    "async.on_exceed='drop' has no effect without async.max_version_lag: set max_version_lag"
                )
            return
        if self.max_version_lag < smallest:
            raise ConfigError(
                f"async.max_version_lag={self.max_version_lag} cannot be kept: with "
                f"trigger_parameter_sync_step={self.trigger_parameter_sync_step} the engines fall {smallest} updates "
                f"behind before a sync; set max_version_lag to at least {smallest}, or sync more often"
            )
        if self.max_version_lag == smallest and self.staleness_threshold > 0 and self.on_exceed == "wait":
            raise ConfigError(
                f"async.staleness_threshold={self.staleness_threshold:g} has no effect with "
                f"async.max_version_lag={self.max_version_lag} and on_exceed='wait': no group may outlive a sync; set "
                f"max_version_lag to at least {smallest + 1}, or staleness_threshold=0"
            )
