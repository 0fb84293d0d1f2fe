"""The clock of a run: busy time of every role, idle and overlap shares, and the spans of a timeline."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

Busy = Callable[[str], AbstractContextManager[None]]
"""Wraps work of the role that it is called with."""
OnSpan = Callable[[str, float, float], None]
"""Called with (role, start_s, end_s) when a role stops being busy."""


@dataclass(frozen=True, kw_only=True)
class BusyShares:
    """Shares of one stretch of wall-clock time.

    Args:
        wall_s: its length.
        trainer_idle: share in which the trainer did nothing.
        rollout_idle: the same for the rollout engines, averaged over them.
        overlap: share in which the trainer and at least one rollout engine were busy together.
        busy_s: seconds in which each role was busy.
    """

    wall_s: float
    trainer_idle: float
    rollout_idle: float
    overlap: float
    busy_s: Mapping[str, float] = field(default_factory=dict)


class BusyClock:
    """Adds up busy time by role; a role is busy while at least one piece of its work is open and it is not held.

    Args:
        trainer: name of the trainer.
        num_rollouts: how many rollout engines there are now; all but the trainer count as such.
        now_s: clock, in seconds.
        on_span: called with each stretch in which a role was busy.
    """

    def __init__(
        self, trainer: str, num_rollouts: Callable[[], int], now_s: Callable[[], float], on_span: OnSpan
    ) -> None:
        self._trainer, self._num_rollouts = trainer, num_rollouts
        self._now_s, self._on_span = now_s, on_span
        self._open: dict[str, int] = {}
        self._held: set[str] = set()
        self._since_s: dict[str, float] = {}  # roles busy now, and since when
        self._busy_s: dict[str, float] = {}
        self._overlap_s = 0.0
        self._lap_s = self._last_s = now_s()

    @contextmanager
    def busy(self, role: str) -> Iterator[None]:
        """Count the body as work of `role`."""
        self._change(lambda: self._open.update({role: self._open.get(role, 0) + 1}))
        try:
            yield
        finally:
            self._change(lambda: self._open.update({role: self._open[role] - 1}))

    @contextmanager
    def held(self, roles: Iterable[str]) -> Iterator[None]:
        """Count these roles as idle during the body, whatever is open: they are paused."""
        names = set(roles)
        self._change(lambda: self._held.update(names))
        try:
            yield
        finally:
            self._change(lambda: self._held.difference_update(names))

    def lap(self) -> BusyShares:
        """Shares since the last lap."""
        self._change(lambda: None)
        wall_s = max(self._last_s - self._lap_s, 1e-9)
        rollout_s = sum(busy_s for role, busy_s in self._busy_s.items() if role != self._trainer)
        shares = BusyShares(
            wall_s=wall_s,
            trainer_idle=1 - self._busy_s.get(self._trainer, 0.0) / wall_s,
            rollout_idle=max(0.0, 1 - rollout_s / max(self._num_rollouts(), 1) / wall_s),
            overlap=self._overlap_s / wall_s,
            busy_s=dict(self._busy_s),
        )
        self._busy_s.clear()
        self._overlap_s, self._lap_s = 0.0, self._last_s
        return shares

    def _change(self, apply: Callable[[], object]) -> None:
        """Add the time since the last change to the roles that were busy, then apply the next change."""
        now_s = self._now_s()
        passed_s, self._last_s = now_s - self._last_s, now_s
        for role in self._since_s:
            self._busy_s[role] = self._busy_s.get(role, 0.0) + passed_s
        if self._trainer in self._since_s and len(self._since_s) > 1:
            self._overlap_s += passed_s
        apply()
        active = {role for role, count in self._open.items() if count and role not in self._held}
        for role in self._since_s.keys() - active:
            self._on_span(role, self._since_s.pop(role), now_s)
        for role in active - self._since_s.keys():
            self._since_s[role] = now_s
