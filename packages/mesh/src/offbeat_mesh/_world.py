"""The world: all processes of a run, joined once (`join_world`), left once."""

import atexit
import os
import secrets
import sys
import weakref
from itertools import count
from types import TracebackType
from typing import Final, Self

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from offbeat_mesh._board import Board
from offbeat_mesh._device import Device
from offbeat_mesh._hub import Hub
from offbeat_mesh._news import Record
from offbeat_types import ConfigError, DeadlineError

LEAVE_FAILED_S: Final = 5.0
"""How long rank 0 keeps the hub open when it leaves with an error, so that all ranks hear of it."""


class World:
    """All processes of a run. `join_world` makes it; as a context manager it is left at the end.

    Leaving well waits until every rank has come to leave, or has failed; so no rank closes its connections under
    another's last call. Leaving with an error tells the other ranks, whose calls with this one then raise.

    Attributes:
        rank: of this process.
        size: how many processes.
        device: where this process computes.
        deadline_s: the default of every wait.
        store: what the processes share, on a connection of the world's own.
        host: the address of this host under which the other ranks reach this one; loopback where all are on it.
    """

    def __init__(
        self, rank: int, size: int, device: Device, deadline_s: float, store: Store, *, host: str, owned: bool
    ) -> None:
        self.rank, self.size, self.device, self.deadline_s = rank, size, device, deadline_s
        self.store, self.host = store, host
        self.board: Board | None = None
        self._hub: Hub | None = None
        self._owned = owned
        self._left = False
        self._pid = os.getpid()
        self._meshes = count()
        _joined.append(self)
        atexit.register(_leave_at_exit, weakref.ref(self))

    def open_board(self, key: str) -> None:
        """Start the hub on rank 0, tell the others through the store where it is, and connect to it.

        Raises:
            DeadlineError: rank 0 opens none, or it does not answer.
        """
        if self.rank == 0:
            token = secrets.token_hex(16)
            self._hub = Hub(self.host, token)
            self.store.set(key, f"{self._hub.address[0]} {self._hub.address[1]} {token}")
        try:
            hub_host, hub_port, token = self.store.get(key).decode().split()
        except DistError as error:
            advice = "it was lost while all were joining; see its log"
            raise DeadlineError("join_world", "rank 0's hub", self.deadline_s, advice) from error
        self.board = Board(self.rank, (hub_host, int(hub_port)), token, self.deadline_s)

    def count_mesh(self) -> int:
        """A number for a new mesh: all processes make their meshes in one order, so it is the same on all."""
        return next(self._meshes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the world; the second time is without effect.

        Args:
            error: why, when it is a failure: the other ranks' calls with this one raise `PeerFailedError` with it.

        Raises:
            DeadlineError: leaving well, and another rank does not come to leave.
        """
        if self._left:
            return
        self._left = True
        _joined.remove(self)
        missing = self._part(error) if self.board is not None else set()
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()
        self._close()
        if missing and error is None:
            ranks = ", ".join(map(str, sorted(missing)))
            raise DeadlineError(
                "World.leave", f"rank {ranks}", self.deadline_s, "does it still compute, or is it stuck?"
            )

    def _part(self, error: BaseException | None) -> set[int]:
        """Say good-bye; the ranks that were waited for in vain."""
        assert self.board is not None
        others = set(range(self.size)) - {self.rank}
        if error is not None:
            self.board.post(Record.of(error, self.rank))
        self.board.leave()
        patience_s = self.deadline_s if error is None else LEAVE_FAILED_S
        if error is None or self._hub is not None:
            self.board.wait_until(lambda: others <= self._over(), patience_s)
        hub_is_lost = self.board.closed  # with rank 0: nobody can be heard any more
        return set() if hub_is_lost else others - self._over()

    def _over(self) -> set[int]:
        """Ranks that will come to no further call."""
        assert self.board is not None
        return {record.rank for record in self.board.records if not record.group}

    def _close(self) -> None:
        if self.board is not None:
            self.board.close()
        if self._hub is not None:
            self._hub.close()

    def part_at_exit(self) -> None:
        """The process ends without `leave`: say why, and wait for nobody."""
        if self._left or self._pid != os.getpid() or self.board is None:
            return
        error = getattr(sys, "last_value", None)  # set by the interpreter for the error that ended the program
        if error is not None and not isinstance(error, SystemExit):
            self.board.post(Record.of(error, self.rank))
        self.board.leave()
        self._close()


def current_world() -> World | None:
    """The world this process has joined and not left."""
    return _joined[-1] if _joined else None


def refuse_second_world() -> None:
    """Raise if this process is in a world already.

    Raises:
        ConfigError: it is.
    """
    if _joined:
        raise ConfigError(
            f"this process is rank {_joined[-1].rank} of a world already; leave it before joining another"
        )


_joined: list[World] = []
os.register_at_fork(after_in_child=_joined.clear)  # a child is no rank


def _leave_at_exit(world: "weakref.ref[World]") -> None:
    joined = world()
    if joined is not None:
        joined.part_at_exit()
