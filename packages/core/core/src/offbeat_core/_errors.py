"""One tree of errors for all of offbeat.

`exit_code` is that of the command: 2 for a mistake that the user can correct before a run starts, 3 for a run that
failed, 4 for a run that stalled.
"""

from collections.abc import Sequence
from typing import ClassVar, Final

MAX_SHOWN_PROBLEMS: Final = 20
"""Problems that one answer shows: a screen of them; the rest are counted."""


class OffbeatError(Exception):
    """Root of every error offbeat raises on purpose. Its text says what was required, what was got, what to do."""

    exit_code: ClassVar[int] = 3


class UserError(OffbeatError):
    """A mistake that the user can correct; found before anything starts."""

    exit_code: ClassVar[int] = 2


class ConfigError(UserError):
    """A setting is unknown, of the wrong type, out of range, or without effect."""


class ProblemsError(ConfigError):
    """Several problems that do not depend on each other.

    Args:
        texts: the problems, each once.
    """

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.texts = texts

    def __str__(self) -> str:
        return list_problems(self.texts)


class DataError(UserError):
    """A data set is missing, empty, unreadable, or lacks a column."""


class ModelError(UserError):
    """A model folder is missing, corrupt, or of a family that is not supported."""


class BackendError(UserError):
    """A backend is unknown or not installed; the text holds the install line."""


class RunFolderError(UserError):
    """A run folder exists already, is missing, cannot be written, or has no room."""


class PlacementError(UserError):
    """The ranks wanted do not fit on the nodes, or do not lie where they should.

    Args:
        reason: what was required and what was got.
        shortfall: for each node, or several alike, what it has and what it lacks.
        changes: the smallest changes that would make it fit, the smallest first.
    """

    def __init__(self, reason: str, shortfall: tuple[str, ...] = (), changes: tuple[str, ...] = ()) -> None:
        super().__init__(reason, shortfall, changes)
        self.reason, self.shortfall, self.changes = reason, shortfall, changes

    def __str__(self) -> str:
        lines = [self.reason, *(f"  {each}" for each in self.shortfall)]
        if self.changes:
            lines.append("what fits: " + "; or ".join(self.changes))
        return "\n".join(lines)


class ShapeError(OffbeatError):
    """Two arrays that belong together differ in shape or dtype. Our own bug, or a caller's."""


class DeadlineError(OffbeatError):
    """A wait that passed its deadline. The text says what waited, what it waited for, and how long.

    Args:
        waiting: name of the wait, such as "trainer.train".
        on: the process or thing that was waited for.
        deadline_s: seconds allowed.
        advice: what to change.
    """

    exit_code: ClassVar[int] = 4

    def __init__(self, waiting: str, on: str, deadline_s: float, advice: str = "") -> None:
        super().__init__(waiting, on, deadline_s, advice)
        self.waiting, self.on, self.deadline_s, self.advice = waiting, on, deadline_s, advice

    def __str__(self) -> str:
        text = f"{self.waiting}: waited {self.deadline_s:g} s for {self.on}, which did not come"
        return f"{text}; {self.advice}" if self.advice else text


class PeerFailedError(OffbeatError):
    """Another process of the run failed or died, so this one cannot continue.

    Args:
        peer: its role and index, such as "rollout-0".
        reason: its own error in one line, or how it died.
        log_tail: the last lines it logged, newest last.
    """

    def __init__(self, peer: str, reason: str, log_tail: str = "") -> None:
        super().__init__(peer, reason, log_tail)
        self.peer, self.reason, self.log_tail = peer, reason, log_tail

    def __str__(self) -> str:
        text = f"{self.peer} failed: {self.reason}"
        return f"{text}\nlast lines of {self.peer}:\n{self.log_tail}" if self.log_tail else text


class WeightSyncError(OffbeatError):
    """Weights did not arrive as sent: a bucket, name, shape, version or checksum differs, or a side died.

    Args:
        text: what was required and what was got.
        is_peers: the other side failed and said so; its own error says more.
    """

    def __init__(self, text: str, is_peers: bool = False) -> None:
        super().__init__(text, is_peers)
        self.text, self.is_peers = text, is_peers

    def __str__(self) -> str:
        return self.text


def list_problems(texts: Sequence[str], where: str = "") -> str:
    """Return problems as one text: a single one as it is, several as a list with their number.

    Args:
        texts: the problems, each of which may have several lines.
        where: they are, such as "in the configuration".
    """
    distinct = list(dict.fromkeys(texts))
    if len(distinct) == 1:
        return distinct[0]
    shown = [line for text in distinct[:MAX_SHOWN_PROBLEMS] for line in text.splitlines()]
    if more := len(distinct) - MAX_SHOWN_PROBLEMS:
        shown += [f"and {more} more"] * (more > 0)
    return "\n  ".join([f"{len(distinct)} problems {where}".rstrip(), *shown])


class GuardError(OffbeatError):
    """A collective stands under a guard that not all members of its group pass, so it would wait for ever.

    Raised before anything is sent, on every rank that comes to the call.

    Args:
        call: what was called, such as "all_reduce".
        group: the group, such as "dp×cp of ranks 0, 1".
        guard: the guard, such as "where(cp=0)".
        shared_axes: axes of the guard along which the group's members differ.
        outside: global ranks of members that do not pass the guard.
    """

    def __init__(
        self, call: str, group: str, guard: str, shared_axes: tuple[str, ...], outside: tuple[int, ...]
    ) -> None:
        super().__init__(call, group, guard, shared_axes, outside)
        self.call, self.group, self.guard = call, group, guard
        self.shared_axes, self.outside = shared_axes, outside

    def __str__(self) -> str:
        ranks = ", ".join(str(rank) for rank in self.outside)
        axes = ", ".join(self.shared_axes)
        reason = f"the group and the guard share {axes}: " if axes else ""
        return (
            f"{self.call} over {self.group} stands under {self.guard}, which rank {ranks} of that group does not pass, "
            f"so it would wait for ever; {reason}call it outside the guard and keep only the reporting inside"
        )


class GroupError(OffbeatError):
    """A group was used in a way it cannot serve, such as from a second thread, or with a value that cannot travel."""


class MismatchError(OffbeatError):
    """The members of a group differ where they must agree.

    Args:
        what: the thing that differs, such as "number of micro-batches".
        group: the group, such as "dp of ranks 0, 1".
        values: the global ranks that have each value, by the value as text.
    """

    def __init__(self, what: str, group: str, values: dict[str, tuple[int, ...]]) -> None:
        super().__init__(what, group, values)
        self.what, self.group, self.values = what, group, values

    def __str__(self) -> str:
        held = "; ".join(f"rank {', '.join(map(str, ranks))}: {value}" for value, ranks in self.values.items())
        return f"{self.what} must be the same on all members of {self.group}, but differs: {held}"
