"""A write of a checkpoint that runs beside the training."""

import atexit
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import offbeat_liveness as liveness
from offbeat_core import DeadlineError, OffbeatError, RunFolderError
from offbeat_mesh import Group, Mesh

log = logging.getLogger(__name__)

CHANNEL: Final = "checkpoint"
DISK, OTHERS = "the disk", "the other ranks"


class BackgroundWrite:
    """Writes in a thread on each rank, which agree among themselves how it went; at most one write at a time.

    All ranks call every method, in the same order.

    Args:
        mesh: of the ranks.
        deadline_s: how long a rank that has written its part waits for the others, then for the first to publish; and
            how long `finish` waits from its call. The writing itself has no limit.
    """

    def __init__(self, mesh: Mesh, deadline_s: float) -> None:
        self._mesh, self._deadline_s = mesh, deadline_s
        self._thread: threading.Thread | None = None
        self._failure: OffbeatError | None = None
        self._folder, self._waits_for = Path(), DISK
        self._failures = 0

    def begin(
        self, folder: Path, write: Callable[[], None], publish: Callable[[], None], clear: Callable[[], None]
    ) -> None:
        """Start a write, after the one before has ended.

        Args:
            folder: what is written, for people.
            write: this rank's part.
            publish: run by the first rank when all have written.
            clear: run by all when one has failed.

        Raises:
            RunFolderError, DeadlineError: the write before has failed, on all ranks.
        """
        self.finish()
        self._folder, self._waits_for = folder, DISK
        group = self._mesh.group("dp", "cp", "tp", "pp", channel=f"{CHANNEL}-{self._failures}")
        self._thread = threading.Thread(
            target=self._run, args=(group, write, publish, clear), name=f"write-{folder.name}", daemon=True
        )
        self._thread.start()
        atexit.register(self._finish_at_exit)

    def finish(self) -> None:
        """Wait for the write in progress, if there is one.

        Raises:
            RunFolderError: it has failed on some rank; raised on all, once.
            DeadlineError: it takes longer than it may; a thread that still writes is waited for again by the next call.
        """
        if self._thread is None:
            return
        thread, what = self._thread, f"the checkpoint {self._folder}"
        with liveness.waiting(what, on=self._waits_for, deadline_s=self._deadline_s):
            thread.join(self._deadline_s)
        if thread.is_alive():
            advice = "see whether the disks answer, or raise engine.options.save_deadline_s"
            raise DeadlineError(what, self._waits_for, self._deadline_s, advice)
        atexit.unregister(self._finish_at_exit)
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            self._failures += 1  # the next one gets a group of its own: this one may be broken
            raise failure

    def _run(
        self, group: Group, write: Callable[[], None], publish: Callable[[], None], clear: Callable[[], None]
    ) -> None:
        published = False

        def publish_once() -> None:
            nonlocal published
            self._waits_for = DISK
            publish()
            published, self._waits_for = True, OTHERS

        try:
            write()
            reason = ""
        except Exception as error:  # noqa: BLE001  the boundary of the thread: reported to all ranks below
            reason = f"{type(error).__name__}: {error}"
        found: list[str] = []
        self._waits_for = OTHERS
        try:
            reasons = group.all_gather_data(reason, deadline_s=self._deadline_s)
            found = [f"trainer rank {rank} could not write its part: {why}" for rank, why in enumerate(reasons) if why]
            if not found:
                group.decide(publish_once, deadline_s=self._deadline_s)
        except OffbeatError as error:
            if isinstance(error, DeadlineError) and not published:
                self._failure = error
            else:
                found = [str(error)]
        if found:
            outcome = "published, but not confirmed" if published else "no checkpoint, the one before it is as it was"
            self._failure = RunFolderError(f"{self._folder}: {outcome}: {found[0]}")
        if self._failure is not None:
            clear()

    def _finish_at_exit(self) -> None:
        """Wait for the write of a process that ends without a call of `finish`."""
        try:
            self.finish()
        except OffbeatError as error:
            log.error("at the end of the process: %s", error)  # noqa: TRY400  its text says all
