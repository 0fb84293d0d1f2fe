"""The control logic of asynchronous training: a pure state machine over prompt groups.

No clock, and nothing is started here: a driver asks `actions()` what to start, and reports what happened. A group goes

    new -> in flight -> finished -> in training -> trained
             |  ^  \\        \\
             |  |   filtered   dropped (also from in flight)
             v  |
           waiting (its engine died, or the run was restored: issued again, first in line)

Legend: R groups per update, K updates per sync, σ staleness threshold, M largest version lag (see `_config`).
*Outstanding* groups are those in flight or finished. Where to look for a rule:

    when is a group started?          _closed_because
    when does the trainer update?     _take_groups
    when are weights synced?          _sync_is_due, _start_sync
    when is a group given up?         _drop_too_old
    why can the run never get stuck?  the module text of `_lag`
"""

from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from heapq import nsmallest
from typing import Any

from offbeat_async_policy._config import AsyncConfig
from offbeat_async_policy._lag import LagBound
from offbeat_async_policy._state import (
    Action,
    Drop,
    Finish,
    PolicyStatus,
    Snapshot,
    Statistics,
    Submit,
    Sync,
    Update,
    describe_wait,
)


class AsyncPolicy:
    """Decides what rollouter, trainer and synchroniser start next.

    Args:
        config: the settings.
        num_groups: groups of the data; ids are 0 .. num_groups - 1 in data order, epochs unrolled. None: no end.
        max_updates: the run ends after so many updates, if the data lasts; None: with the data. A group that is
            filtered or dropped is replaced by another one, so that every update is whole.
    """

    def __init__(self, config: AsyncConfig, num_groups: int | None, max_updates: int | None = None) -> None:
        if num_groups is None and max_updates is None:
            raise ValueError("a run without num_groups and max_updates would never end: give one of them")
        if min(num_groups or 0, max_updates or 0) < 0:
            raise ValueError(f"num_groups and max_updates must be at least 0, got {num_groups} and {max_updates}")
        self.config = config
        self.statistics = Statistics()
        self._lag_bound = LagBound(config)
        self._num_groups, self._max_updates = num_groups, max_updates
        self._end_reason = ""
        self._filtered_in_a_row = 0  # since a group last had a learning signal
        self._next_new_group = 0
        self._waiting: list[int] = []  # to be issued again, in data order
        self._in_flight: dict[int, int] = {}  # group -> engine version when it was submitted
        self._finished: dict[int, int] = {}  # group -> version of its oldest token
        self._training: dict[int, int] = {}  # group -> version of its oldest token, while an update runs
        self._engine_version = 0
        self._taken_since_sync = 0  # groups the trainer took since the last sync
        self._syncing = False
        self._sync_requested = False
        self._drops_decided_at = 0  # the next version for which _drop_too_old has been decided
        self._is_over = False

    # ── what to start now ─────────────────────────────────────────────────────────────────────────────────────────

    def actions(self) -> list[Action]:
        """Return what to start now. Each action is handed out once; it counts as started from here on."""
        if self._is_over:
            return []
        started = [*self._start_sync(), *self._start_update(), *self._drop_too_old(), *self._start_groups()]
        if not started and self._everything_is_done():
            self._is_over = True
            return [Finish()]
        return started

    # ── the trainer ───────────────────────────────────────────────────────────────────────────────────────────────

    def _start_update(self) -> list[Action]:
        if self._training or self._syncing or self._sync_is_due:
            return []
        groups = self._take_groups()
        if not groups:
            return []
        lags = tuple(self.version - self._finished[group] for group in groups)
        self._training = {group: self._finished.pop(group) for group in groups}
        self._taken_since_sync += len(groups)
        return [Update(group_ids=groups, version=self.version, lags=lags)]

    def _take_groups(self) -> tuple[int, ...]:
        """R finished groups, oldest tokens first; fewer only at the end of the data; none when it is wise to wait."""
        wanted = self.config.groups_per_update
        if self._data_has_ended:
            wanted = min(wanted, len(self._in_flight) + len(self._finished))
        if len(self._finished) < wanted:
            return ()
        chosen = nsmallest(wanted, self._finished, key=lambda group: (self._finished[group], group))
        return tuple(chosen) if self._others_can_wait(chosen) else ()

    def _others_can_wait(self, chosen: list[int]) -> bool:
        """Return whether, after an update on the chosen, all other groups can be trained within max_version_lag."""
        rest = {**self._in_flight, **self._finished}
        for group in chosen:
            del rest[group]
        return self._lag_bound.can_be_kept(rest.values(), self.version + 1)

    # ── the synchroniser ──────────────────────────────────────────────────────────────────────────────────────────

    def _start_sync(self) -> list[Action]:
        if not self._sync_is_due or self._training or self._syncing:
            return []
        if self._in_flight and not self.config.partial_rollout:
            return []  # what is in flight finishes first
        self._syncing, self._sync_requested = True, False
        return [Sync(version=self.version, interrupt=bool(self._in_flight))]

    @property
    def _sync_is_due(self) -> bool:
        """After K updates, on request, and once at the end, so that the engines hold the final weights."""
        updates_since_sync = self.version - self._engine_version
        return (
            self._sync_requested
            or updates_since_sync == self.config.trigger_parameter_sync_step
            or (updates_since_sync > 0 and self._all_groups_have_ended)
        )

    # ── the rollouter ─────────────────────────────────────────────────────────────────────────────────────────────

    def _start_groups(self) -> list[Action]:
        submits: list[Action] = []
        while not self._closed_because():
            group = self._pop_next_group()
            self._in_flight[group] = self._engine_version
            submits.append(Submit(group))
        self.statistics.submitted += len(submits)
        return submits

    def _closed_because(self) -> str:
        """Return the first rule that forbids to start one more group now, as text; empty when none does."""
        if self._syncing or self._sync_is_due:
            return f"paused for sync {self.version}"
        if self._data_has_ended:
            return "out of prompts"
        if 0 < self.config.max_in_flight <= len(self._in_flight):
            return f"at max_in_flight={self.config.max_in_flight}"
        # The staleness bound. Outstanding groups were either admitted since the last sync or carried over it, and a
        # group that was filtered, dropped or lost since then is in neither number: its place is free again.
        if self._taken_since_sync + self._num_outstanding >= self.config.max_admitted:
            return f"at its bound of {self.config.max_admitted} groups between two syncs"
        if not self._lag_bound.has_room(self._num_outstanding, self._engine_version, self._next_version):
            return f"held back by max_version_lag={self.config.max_version_lag}"
        return ""

    def _pop_next_group(self) -> int:
        if self._waiting:
            self.statistics.reissued += 1
            return self._waiting.pop(0)
        self._next_new_group += 1
        return self._next_new_group - 1

    def _drop_too_old(self) -> list[Action]:
        if self.config.on_exceed == "wait" or self._drops_decided_at == self._next_version:
            return []
        self._drops_decided_at = self._next_version
        too_old = self._lag_bound.too_old({**self._in_flight, **self._finished}, self._next_version)
        for group in too_old:
            self._in_flight.pop(group, None)
            self._finished.pop(group, None)
        self.statistics.dropped += len(too_old)
        return [Drop(group) for group in sorted(too_old)]

    # ── what happened ─────────────────────────────────────────────────────────────────────────────────────────────

    def group_finished(self, group_id: int, oldest_version: int) -> None:
        """A group was generated and scored.

        Args:
            group_id: in flight.
            oldest_version: version that sampled its oldest token. It may be newer than what the engines serve, by the
                book: one that was started again, or has joined, got what the trainer held then.
        """
        submitted_at = self._remove_in_flight(group_id)
        if not submitted_at <= oldest_version <= self.version:
            raise ValueError(
                f"group {group_id}: oldest_version must be in [{submitted_at}, {self.version}], the versions there "
                f"were since its submission; got {oldest_version}"
            )
        self._finished[group_id] = oldest_version
        self._filtered_in_a_row = 0

    def group_filtered(self, group_id: int) -> None:
        """A group finished without learning signal: it is not trained, and its place is free again."""
        self._remove_in_flight(group_id)
        self.statistics.filtered += 1
        self._filtered_in_a_row += 1

    def group_lost(self, group_id: int) -> None:
        """The engine that held the group died: it is issued again, before all new groups."""
        self._remove_in_flight(group_id)
        insort(self._waiting, group_id)

    def update_finished(self) -> None:
        """The update that runs has ended; the trainer holds the next version."""
        if not self._training:
            raise ValueError("update_finished: no update was running")
        self.statistics.lags.update(self.version - oldest for oldest in self._training.values())
        self.statistics.trained += len(self._training)
        self._training = {}
        self.statistics.updates += 1

    def sync_finished(self) -> None:
        """Every engine serves the version of the sync that was running."""
        if not self._syncing:
            raise ValueError("sync_finished: no sync was running")
        self._syncing = False
        self._engine_version = self.version
        self._taken_since_sync = 0
        self.statistics.syncs += 1

    def request_sync(self) -> None:
        """Ask for a sync as soon as the trainer is free, such as for an engine that was started again."""
        self._sync_requested = True

    def end_early(self, reason: str) -> None:
        """Start no new group; groups already started are trained and synced, and then the run finishes.

        The first reason stays. A run that is restored starts groups again: the driver that ended it decides anew.

        Args:
            reason: one line for the user.
        """
        self._end_reason = self._end_reason or reason

    def _remove_in_flight(self, group_id: int) -> int:
        if group_id not in self._in_flight:
            raise ValueError(f"group {group_id} is not in flight")
        return self._in_flight.pop(group_id)

    def discard(self, group_ids: Iterable[int]) -> None:
        """Finished groups that cannot be trained after all count as filtered: others take their places.

        Raises:
            ValueError: a group is not finished.
        """
        for group_id in group_ids:
            self._remove_finished(group_id)
            self.statistics.filtered += 1

    def reissue(self, group_ids: Iterable[int]) -> None:
        """Finished groups that must be sampled anew are issued again, before all new groups.

        Raises:
            ValueError: a group is not finished.
        """
        for group_id in group_ids:
            self._remove_finished(group_id)
            insort(self._waiting, group_id)

    def _remove_finished(self, group_id: int) -> None:
        if group_id not in self._finished:
            raise ValueError(f"group {group_id} is not finished")
        del self._finished[group_id]

    # ── where it stands ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def version(self) -> int:
        """Policy version of the trainer: updates done."""
        return self.statistics.updates

    @property
    def engine_version(self) -> int:
        """Policy version the engines serve: that of the last sync."""
        return self._engine_version

    @property
    def status(self) -> PolicyStatus:
        """Counts and reasons, for live progress and for the text of a stall."""
        return PolicyStatus(
            version=self.version,
            engine_version=self._engine_version,
            groups_per_update=self.config.groups_per_update,
            in_flight=tuple(self._in_flight),
            num_finished=len(self._finished),
            num_training=len(self._training),
            num_not_started=len(self._waiting) + self._num_to_start,
            syncing=self._syncing,
            sync_is_due=self._sync_is_due,
            rollouter_closed_because=self._closed_because(),
            max_version_lag=self.config.max_version_lag,
            is_over=self._is_over,
        )

    def describe_wait(self, where: Callable[[int], str] | None = None) -> str:
        """Return which role waits for which, in one line.

        Args:
            where: names the engine that holds a group in flight, such as "rollout-0".
        """
        return describe_wait(self.status, where)

    @property
    def _next_version(self) -> int:
        """Version at which the next update will train: the one that runs is past choosing."""
        return self.version + bool(self._training)

    @property
    def _num_outstanding(self) -> int:
        return len(self._in_flight) + len(self._finished)

    @property
    def ended_early(self) -> str:
        """Reason why no more prompts are drawn although there are some; empty otherwise."""
        if (
            self._end_reason
            or self._filtered_in_a_row < self.config.max_filtered_batches * self.config.groups_per_update
        ):
            return self._end_reason
        return f"the last {self._filtered_in_a_row} prompt groups had no learning signal"

    @property
    def _num_to_start(self) -> int:
        """New groups that are still to be started, as far as is known now."""
        if self.ended_early:
            return 0
        rooms = [] if self._num_groups is None else [self._num_groups - self._next_new_group]
        if self._max_updates is not None:  # a filtered or dropped group is in no number here: it is replaced
            updates_left = self._max_updates - self._next_version
            rooms.append(updates_left * self.config.groups_per_update - self._num_outstanding - len(self._waiting))
        return max(0, min(rooms))

    @property
    def _data_has_ended(self) -> bool:
        return not self._waiting and not self._num_to_start

    @property
    def _all_groups_have_ended(self) -> bool:
        return self._data_has_ended and not (self._in_flight or self._finished or self._training)

    def _everything_is_done(self) -> bool:
        return self._all_groups_have_ended and not self._syncing and not self._sync_is_due

    # ── checkpoints ───────────────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> dict[str, Any]:
        """Plain data, fit for JSON, from which `restore` continues; it matches the trainer's weights of `version`.

        An update that runs is as if it had not begun. The driver keeps the samples of the groups in `finished`.
        """
        return Snapshot(
            version=self.version,
            next_new_group=self._next_new_group,
            waiting=sorted([*self._waiting, *self._in_flight]),
            finished={**self._finished, **self._training},
            filtered_in_a_row=self._filtered_in_a_row,
            statistics=self.statistics,
        ).to_plain()

    @classmethod
    def restore(
        cls, config: AsyncConfig, state: Mapping[str, Any], num_groups: int | None, max_updates: int | None = None
    ) -> "AsyncPolicy":
        """Resume from a checkpoint: what was finished stays finished, what was in flight is issued again first.

        The first action is a Sync, as the engines may hold any weights. Settings may differ from those of the state;
        when fewer groups are wanted now, those that were finished or in flight are trained nevertheless. With a
        staleness threshold of 0, finished groups that are older than it admits are issued again too: the driver
        forgets samples of groups that `state` no longer lists as finished. A run that had ended early for lack of
        signal begins to count anew: its user has mended something.

        Raises:
            RunFolderError: the state is damaged or of another format.
            ConfigError: max_version_lag is too small for the groups that are finished already.
        """
        snapshot = Snapshot.from_plain(state).without_outdated(config)
        snapshot.check_fits(config)
        policy = cls(config, num_groups, max_updates)
        policy.statistics = snapshot.statistics
        policy._next_new_group = snapshot.next_new_group
        policy._waiting = list(snapshot.waiting)
        policy._finished = dict(snapshot.finished)
        policy._filtered_in_a_row = snapshot.filtered_in_a_row
        if policy.ended_early:
            policy._filtered_in_a_row = 0
        policy._engine_version = snapshot.version
        policy._sync_requested = True
        policy._drops_decided_at = -1
        return policy
