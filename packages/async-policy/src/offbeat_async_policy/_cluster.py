"""What is simulated: the work, and the machines it runs on."""

from dataclasses import dataclass, field

from offbeat_async_policy._workload import DecodeSpeed, Lengths
from offbeat_types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is generated and trained.

    Args:
        num_groups: prompt groups of the run.
        group_size: samples of one group.
        lengths: of the completions.
        filtered_share: share of groups without learning signal, in [0, 1].
        seed: of everything random.
    """

    num_groups: int
    group_size: int = 8
    lengths: Lengths = field(default_factory=Lengths)
    filtered_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.num_groups >= 1, "num_groups", "at least 1", self.num_groups)
        _require(self.group_size >= 1, "group_size", "at least 1", self.group_size)
        _require(0 <= self.filtered_share <= 1, "filtered_share", "a share in [0, 1]", self.filtered_share)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What it runs on.

    Args:
        num_engines: rollout engines.
        max_running: samples one engine decodes at once.
        decode_curve: throughput of one engine.
        update_s: time of one full update.
        update_tokens_per_s: completion tokens trained per second, on top of update_s; 0 for none.
        sync_s: time of one weight sync.
    """

    num_engines: int
    max_running: int
    decode_curve: DecodeSpeed
    update_s: float
    update_tokens_per_s: float = 0.0
    sync_s: float = 0.0

    def __post_init__(self) -> None:
        _require(self.num_engines >= 1, "num_engines", "at least 1", self.num_engines)
        _require(self.max_running >= 1, "max_running", "at least 1", self.max_running)
        for name in ("update_s", "update_tokens_per_s", "sync_s"):
            value = getattr(self, name)
            _require(0 <= value < float("inf"), name, "a finite number, at least 0", value)

    def seconds_for_update(self, share: float, num_tokens: int) -> float:
        """Time of an update with this share of its full number of groups."""
        return self.update_s * share + (num_tokens / self.update_tokens_per_s if self.update_tokens_per_s else 0.0)


def _require(holds: bool, name: str, required: str, got: float) -> None:
    if not holds:
        raise ConfigError(f"{name}: required {required}, got {got:g}")
