"""What of the policy outlives the process, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from offbeat_async_policy._config import AsyncConfig
from offbeat_async_policy._lag import LagBound
from offbeat_async_policy._statistics import Statistics
from offbeat_types import ConfigError, RunFolderError

FORMAT: Final = 2


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The policy between two updates.

    Args:
        version: updates done.
        next_new_group: first group that was never started.
        waiting: groups to be issued again, sorted.
        finished: group -> version of its oldest token.
        data_was_ended: no new group is to be started.
        filtered_in_a_row: groups without signal since one had it.
        statistics: the counts.
    """

    version: int
    next_new_group: int
    waiting: list[int]
    finished: dict[int, int]
    data_was_ended: bool
    filtered_in_a_row: int
    statistics: Statistics

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON; `finished` as sorted [group, oldest version] pairs."""
        return {
            "format": FORMAT,
            "version": self.version,
            "next_new_group": self.next_new_group,
            "waiting": list(self.waiting),
            "finished": [list(pair) for pair in sorted(self.finished.items())],
            "data_was_ended": self.data_was_ended,
            "filtered_in_a_row": self.filtered_in_a_row,
            "statistics": self.statistics.to_plain(),
        }

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
                data_was_ended=bool(plain["data_was_ended"]),
                filtered_in_a_row=int(plain["filtered_in_a_row"]),
                statistics=Statistics.from_plain(plain["statistics"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"state of the async policy is damaged: {type(error).__name__}: {error}") from error
        snapshot._check_consistent()
        return snapshot

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
