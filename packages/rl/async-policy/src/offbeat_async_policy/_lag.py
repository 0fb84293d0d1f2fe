"""The arithmetic of `max_version_lag`, and why keeping it by waiting can never bring the run to a stop.

Legend: R groups per update, M largest version lag, v version of the next update, e version the engines serve.

A group whose oldest token was sampled at version o has the deadline o + M: the last version at which it may be
trained. Updates are a single machine that takes R groups at a time, so this is scheduling unit jobs by earliest
deadline first, and the run keeps one invariant:

    I(v): sorted by deadline, the i-th outstanding group (in flight or finished, not trained) fits update v + i // R.

Progress. Suppose I(v), and that the engines serve e with v <= e + K - 1 (no sync is due).
1. A new group's deadline e + M is the latest of all, so admitting it keeps I(v) exactly if
   outstanding + 1 <= R·(e + M - v + 1). As M >= K - 1, that holds whenever outstanding < R; and the staleness bound
   holds then too, because at most R·(K - 1) groups were trained since the sync. So the rollouter is never shut while
   the trainer lacks groups.
2. The trainer may take any R finished groups that leave I(v + 1) true; otherwise it waits for groups in flight. Waiting
   ends: once all of them have finished, the R earliest deadlines are among the finished, and taking those turns I(v)
   into I(v + 1). Nothing else waits for the trainer meanwhile, except the rollouter at its bounds.
3. Filtering, losing or dropping a group only removes it from the list, which keeps I(v). A finished group's oldest
   token is never older than was assumed at its admission, which moves its deadline later only.
4. A sync changes e, not v and not the deadlines. With partial_rollout=false it waits for the groups in flight, which
   need neither the trainer nor a sync; with partial_rollout=true it waits for none. So it cannot break I, nor block.

Source: earliest deadline first is optimal for unit jobs, Jackson 1955.
"""

from collections.abc import Iterable, Mapping

from offbeat_async_policy._config import AsyncConfig


class LagBound:
    """`max_version_lag` and `on_exceed` of a configuration; without a bound everything is allowed."""

    def __init__(self, config: AsyncConfig) -> None:
        self._max_lag, self._per_update = config.max_version_lag, config.groups_per_update
        self._may_drop = config.on_exceed == "drop"

    def has_room(self, num_outstanding: int, engine_version: int, next_version: int) -> bool:
        """Return whether one more group may start.

        Where groups are dropped, it must only not be too old from the start.
        """
        if self._max_lag is None:
            return True
        room = room_for_new_groups(
            0 if self._may_drop else num_outstanding,
            engine_version=engine_version,
            next_version=next_version,
            groups_per_update=self._per_update,
            max_version_lag=self._max_lag,
        )
        return room > 0

    def can_be_kept(self, oldest_versions: Iterable[int], next_version: int) -> bool:
        """Return whether groups with these oldest tokens can all be trained in time.

        Where groups are dropped, always.
        """
        if self._max_lag is None or self._may_drop:
            return True
        return can_train_in_time(
            oldest_versions,
            next_version=next_version,
            groups_per_update=self._per_update,
            max_version_lag=self._max_lag,
        )

    def too_old(self, oldest_versions: Mapping[int, int], next_version: int) -> list[int]:
        """Groups that the next update would train above the bound."""
        return [
            group
            for group, oldest in oldest_versions.items()
            if self._max_lag is not None
            and is_too_old(oldest, next_version=next_version, max_version_lag=self._max_lag)
        ]


def can_train_in_time(
    oldest_versions: Iterable[int], *, next_version: int, groups_per_update: int, max_version_lag: int
) -> bool:
    """Return whether updates next_version, next_version + 1, … of R groups each train all groups in time.

    Args:
        oldest_versions: version of each outstanding group's oldest token, in any order.
        next_version: version at which the next update trains.
        groups_per_update: R.
        max_version_lag: M.
    """
    by_deadline = sorted(oldest_versions)
    return all(
        next_version + i // groups_per_update <= oldest + max_version_lag for i, oldest in enumerate(by_deadline)
    )


def fit_in_time(
    oldest_versions: Mapping[int, int], *, next_version: int, groups_per_update: int, max_version_lag: int
) -> dict[int, int]:
    """Return as many groups as can all be trained before they are too old; the arguments are of `can_train_in_time`."""
    kept: dict[int, int] = {}
    for group, oldest in sorted(oldest_versions.items(), key=lambda item: (item[1], item[0])):
        if next_version + len(kept) // groups_per_update <= oldest + max_version_lag:
            kept[group] = oldest
    return kept


def room_for_new_groups(
    num_outstanding: int, *, engine_version: int, next_version: int, groups_per_update: int, max_version_lag: int
) -> int:
    """Return how many groups can start under engine_version such that `can_train_in_time` stays true; at least 0."""
    updates_left = engine_version + max_version_lag - next_version + 1
    return max(0, groups_per_update * updates_left - num_outstanding)


def is_too_old(oldest_version: int, *, next_version: int, max_version_lag: int) -> bool:
    """Return whether the next update would train the group above `max_version_lag`."""
    return next_version - oldest_version > max_version_lag
