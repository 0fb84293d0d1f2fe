"""Exit notices: what processes of the run report about their own end, to the lowest that answer.

A notice of an exit is certain. A notice of an error is from a process that may keep running, such as one that prints
an error by sys.excepthook: it counts once that process is gone.
"""

import threading
import time
from collections.abc import Callable
from typing import Final, Literal

from offbeat_liveness._network.address_book import Key
from offbeat_liveness._network.peers import Peers
from offbeat_liveness._network.side_channel import ask
from offbeat_liveness._process.proc import HOST, pid_state
from offbeat_liveness._process.snapshot import ProcessSnapshot, to_data
from offbeat_liveness._process.stacks import OwnThread

NOTICE_S: Final = 0.2
MAX_NOTIFIED: Final = 3
MAX_CANDIDATES: Final = 16
MAX_LEFT: Final = 64
GONE_S: Final = 2.0  # within which a process is gone that has reported an error because it ends
LOOK_S: Final = 0.05
Kind = Literal["exit", "error"]


class ExitNotices:
    """Record of the exit notices of others that this process has received, and the sender of its own.

    Attributes:
        exited: last snapshots of processes that have ended.
        error_notices: of those that may have been about to end.
    """

    def __init__(self, peers: Peers, closed: threading.Event) -> None:
        self.exited: dict[Key, ProcessSnapshot] = {}
        self.error_notices: dict[Key, ProcessSnapshot] = {}
        self._peers, self._closed = peers, closed

    def notify(self, head: ProcessSnapshot, kind: Kind) -> None:
        """Notify the lowest processes that answer how this one ends, or may end."""
        num_notified = 0
        for address in list(self._peers.running().values())[:MAX_CANDIDATES]:
            reply = ask(address, {"ask": kind, "head": to_data(head)}, self._peers.secret, NOTICE_S)
            num_notified += reply is not None
            if num_notified == MAX_NOTIFIED:
                return

    def receive(self, head: ProcessSnapshot, kind: Kind, when_gone: Callable[[], None]) -> None:
        """Take in how another process ends.

        Args:
            head: that process's snapshot of itself.
            kind: whether its end is certain.
            when_gone: called, in a thread of its own, if one that has reported an error is gone soon after.
        """
        key = (head.host, head.pid)
        if kind == "exit":
            self.exited[key] = head
            return
        self.error_notices.pop(key, None)
        self.error_notices[key] = head
        if len(self.error_notices) > MAX_LEFT:
            self.error_notices.pop(next(iter(self.error_notices)))
        if head.state == "failed" and head.host == HOST:
            OwnThread(self._await_end, "error-notice", [head, when_gone]).start()

    def _await_end(self, head: ProcessSnapshot, when_gone: Callable[[], None]) -> None:
        end_s = time.monotonic() + GONE_S
        while time.monotonic() < end_s and not self._closed.wait(LOOK_S):
            if pid_state(head.pid, head.born) == "gone":
                when_gone()
                return

    def is_failed_running(self) -> bool:
        """Return whether a process that has failed is still on its way out."""
        return any(
            head.state == "failed" and head.host == HOST and pid_state(head.pid, head.born) == "runs"
            for head in list(self.exited.values())
        )
