"""Groups that this process has destroyed: whoever still waits in one of them for this process waits for ever."""

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

from offbeat_liveness._process import process_groups
from offbeat_liveness._process.head import LeftGroup

MAX_REMEMBERED: Final = 256
PATCHED: Final = "_offbeat_liveness_destroy"


class LeftGroups:
    """Remembers each group as it was when destroy_process_group was called.

    Args:
        seat: token of the world and rank of this process in it, None before they are known.
        before: called before a group is destroyed, for what cannot be done after it.
        complain: told what has failed here; the call itself goes on as without it.
    """

    def __init__(
        self,
        seat: Callable[[], tuple[str, int] | None],
        before: Callable[[], None],
        complain: Callable[[str, Exception], None],
    ) -> None:
        self._seat, self._before, self._complain = seat, before, complain
        self._left: list[LeftGroup] = []
        self._is_closed = False

    def all(self) -> tuple[LeftGroup, ...]:
        """Those that are gone, the newest last."""
        return tuple(self._left)

    def close(self) -> None:
        """Remember nothing more, and do nothing in a call any more."""
        self._is_closed = True

    def watch(self) -> None:
        """Have destroy_process_group noted; a few µs for each group, no recorder is read."""
        c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
        public: Any = sys.modules["torch.distributed"]
        destroy = c10d.destroy_process_group
        if getattr(destroy, PATCHED, None) is self:
            return
        destroy = getattr(destroy, "__wrapped__", destroy) if hasattr(destroy, PATCHED) else destroy

        @functools.wraps(destroy)
        def destroy_process_group(*args: Any, **named: Any) -> Any:
            if self._is_closed:
                return destroy(*args, **named)
            before = self._groups_before()
            try:
                return destroy(*args, **named)
            finally:
                self._note(before)

        setattr(destroy_process_group, PATCHED, self)
        c10d.destroy_process_group = public.destroy_process_group = destroy_process_group

    def _groups_before(self) -> list[LeftGroup]:
        try:
            self._before()
            return self._groups()
        except Exception as error:  # noqa: BLE001 - this is a call of the program's
            self._complain("a look before destroy_process_group", error)
            return []

    def _groups(self) -> list[LeftGroup]:
        seat = self._seat()
        if seat is None or process_groups.default_group() is None:
            return []
        world, rank = seat
        return [LeftGroup(world=world, rank=rank, group=each) for each in process_groups.group_heads(None)]

    def _note(self, before: list[LeftGroup]) -> None:
        try:
            self._note_left(before)
        except Exception as error:  # noqa: BLE001 - likewise
            self._complain("a look after destroy_process_group", error)

    def _note_left(self, before: list[LeftGroup]) -> None:
        there = (
            {each.key for each in process_groups.group_heads(None)}
            if process_groups.default_group() is not None
            else set()
        )
        gone = [each for each in before if each.group.key not in there]
        process_groups.note_end(each.group.name for each in gone)
        self._left += [each for each in gone if not each.group.is_foreign]
        del self._left[:-MAX_REMEMBERED]
