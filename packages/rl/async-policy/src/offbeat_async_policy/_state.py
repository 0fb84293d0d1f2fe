"""State of the policy, as plain data: its actions, its counts, and what of it outlives the process."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from offbeat_async_policy._config import AsyncConfig
from offbeat_async_policy._lag import LagBound, fit_in_time
from offbeat_core import ConfigError, RunFolderError


@dataclass(frozen=True)
class Submit:
    """Generate and score the group; answer with `group_finished`, `group_filtered` or `group_lost`.

    Args:
        group_id: in [0, num_groups), in data order.
    """

    group_id: int


@dataclass(frozen=True)
class Update:
    """Train on these groups; answer with `update_finished`.

    Args:
        group_ids: oldest tokens first, then data order.
        version: policy version the trainer holds now; it holds version + 1 afterwards.
        lags: updates between each group's oldest token and this update, in the order of `group_ids`.
    """

    group_ids: tuple[int, ...]
    version: int
    lags: tuple[int, ...]


@dataclass(frozen=True)
class Sync:
    """Bring the trainer's weights to every engine; answer with `sync_finished`.

    Args:
        version: policy version to publish.
        interrupt: groups are in flight; hold them while the weights change and continue with the tokens they have.
    """

    version: int
    interrupt: bool


@dataclass(frozen=True)
class Drop:
    """Forget this group: it grew older than `max_version_lag`. Needs no answer; if in flight, abort it.

    Args:
        group_id: finished or in flight; nothing may be reported about it any more.
    """

    group_id: int


@dataclass(frozen=True)
class Finish:
    """Every group has ended and the engines hold the final weights. The last action."""


Action = Submit | Update | Sync | Drop | Finish


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


@dataclass(frozen=True, kw_only=True)
class PolicyStatus:
    """Status of the policy.

    Args:
        version: updates done.
        engine_version: version of the last sync.
        groups_per_update: R.
        in_flight: groups generating or being scored.
        num_finished: groups finished and not yet in training.
        num_training: groups in the update that runs; 0 when none does.
        num_not_started: groups that are new, or to be issued again.
        syncing: a weight sync runs.
        sync_is_due: a weight sync runs next.
        rollouter_closed_because: the rule that keeps the rollouter from starting a group; empty when it is open.
        max_version_lag: M, or None.
        is_over: Finish was handed out.
    """

    version: int
    engine_version: int
    groups_per_update: int
    in_flight: tuple[int, ...]
    num_finished: int
    num_training: int
    num_not_started: int
    syncing: bool
    sync_is_due: bool
    rollouter_closed_because: str
    max_version_lag: int | None
    is_over: bool


def describe_wait(status: PolicyStatus, where: Callable[[int], str] | None = None) -> str:
    """Return, say, "trainer waits for 64 groups: 12 finished, 40 in flight on rollout-0; rollouter out of prompts".

    Args:
        status: of the policy.
        where: names the engine that holds a group in flight.
    """
    if status.is_over:
        return "no role waits: the run is over"
    rollouter = f"rollouter {status.rollouter_closed_because or 'open'}"
    return f"{_describe_trainer(status, _describe_in_flight(status, where))}; {rollouter}"


def _describe_trainer(status: PolicyStatus, flight: str) -> str:
    if status.syncing:
        return f"trainer and engines are in sync {status.version}, {flight}"
    if status.num_training:
        return f"trainer is in update {status.version} of {status.num_training} groups, {flight}"
    if status.sync_is_due:
        return f"sync {status.version} waits for {flight}"
    wanted = min(status.groups_per_update, len(status.in_flight) + status.num_finished + status.num_not_started)
    text = f"trainer waits for {wanted} groups: {status.num_finished} finished, {flight}"
    if status.num_finished >= wanted and status.max_version_lag is not None:
        text += f", some of them so old that max_version_lag={status.max_version_lag} makes it wait for them"
    return text


def _describe_in_flight(status: PolicyStatus, where: Callable[[int], str] | None) -> str:
    """Return, say, "40 in flight on rollout-0", or "40 in flight: 25 on rollout-0, 15 on rollout-1"."""
    text = f"{len(status.in_flight)} in flight"
    if where is None or not status.in_flight:
        return text
    holders = Counter(where(group) for group in status.in_flight)
    if len(holders) == 1:
        return f"{text} on {next(iter(holders))}"
    return f"{text}: " + ", ".join(f"{count} on {holder}" for holder, count in sorted(holders.items()))


FORMAT: Final = 2


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The policy between two updates.

    Args:
        version: updates done.
        next_new_group: first group that was never started.
        waiting: groups to be issued again, sorted.
        finished: group -> version of its oldest token.
        filtered_in_a_row: groups without signal since one had it.
        statistics: the counts.
    """

    version: int
    next_new_group: int
    waiting: list[int]
    finished: dict[int, int]
    filtered_in_a_row: int
    statistics: Statistics

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON; `finished` as sorted [group, oldest version] pairs."""
        finished = [list(pair) for pair in sorted(self.finished.items())]
        return {"format": FORMAT, **vars(self), "finished": finished, "statistics": self.statistics.to_plain()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Snapshot":
        """Read what `to_plain` wrote.

        Raises:
            RunFolderError: a key is missing, or the numbers contradict each other.
        """
        if plain.get("format") != FORMAT:
            raise RunFolderError(f"state of the async policy: format {FORMAT} required, got {plain.get('format')!r}")
        try:
            snapshot = cls(
                version=int(plain["version"]),
                next_new_group=int(plain["next_new_group"]),
                waiting=sorted(int(group) for group in plain["waiting"]),
                finished={int(group): int(oldest) for group, oldest in plain["finished"]},
                filtered_in_a_row=int(plain["filtered_in_a_row"]),
                statistics=Statistics.from_plain(plain["statistics"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"state of the async policy is damaged: {type(error).__name__}: {error}") from error
        snapshot._check_consistent()
        return snapshot

    def without_outdated(self, config: AsyncConfig) -> "Snapshot":
        """Return the state in which finished groups wait to be issued again that a threshold of 0 does not admit.

        With σ = 0 no group outlives a regular sync, so its lag is below K. Groups of a run with σ > 0 may be older.
        """
        if config.staleness_threshold > 0:
            return self
        kept = fit_in_time(
            self.finished,
            next_version=self.version,
            groups_per_update=config.groups_per_update,
            max_version_lag=config.trigger_parameter_sync_step - 1,
        )
        return replace(self, waiting=sorted([*self.waiting, *(self.finished.keys() - kept)]), finished=kept)

    def check_fits(self, config: AsyncConfig) -> None:
        """Refuse settings under which a group that is finished already could never be trained.

        Raises:
            ConfigError: with on_exceed="wait" and a max_version_lag smaller than that of the run before.
        """
        if not LagBound(config).can_be_kept(self.finished.values(), self.version):
            raise ConfigError(
                f"async.max_version_lag={config.max_version_lag} cannot be kept for the {len(self.finished)} groups of "
                f"the checkpoint that are finished but not trained (version {self.version}, oldest token of version "
                f"{min(self.finished.values())}); use the value of the run before, or on_exceed='drop'"
            )

    def _check_consistent(self) -> None:
        started = [*self.waiting, *self.finished]
        ended = self.statistics.trained + self.statistics.filtered + self.statistics.dropped
        complaints = {
            "a group is listed twice": len(set(started)) != len(started),
            "a group was never started": any(not 0 <= group < self.next_new_group for group in started),
            "the version is not the number of updates": self.version != self.statistics.updates,
            "a token is newer than the policy": any(not 0 <= age <= self.version for age in self.finished.values()),
            "groups are missing": ended + len(started) != self.next_new_group,
        }
        for complaint, applies in complaints.items():
            if applies:
                raise RunFolderError(f"state of the async policy is damaged: {complaint}")
