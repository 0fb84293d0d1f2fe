"""A thread that carries buckets, and the two-way handover between it and the thread that fills or loads them."""

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from torch import Tensor

from offbeat_types import WeightProof, WeightSyncError
from offbeat_weightsync._connections import Deadline

NUM_BUFFERS: Final = 2
"""One travels while the other is filled or loaded."""


class Handover:
    """Buffers going round: empty ones one way, full ones the other. An error travels either way in a buffer's place.

    Args:
        buffers: empty.
        deadline: of the sync; every wait here ends with it.
    """

    def __init__(self, buffers: list[Tensor], deadline: Deadline) -> None:
        self.deadline = deadline
        self._empty: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.buffers: list[Tensor] = []
        self.add(buffers)

    def add(self, buffers: list[Tensor]) -> None:
        """Put empty buffers into circulation."""
        self.buffers += buffers
        for buffer in buffers:
            self._empty.put(buffer)

    def give_empty(self, item: Any) -> None:
        """Give a buffer back, or the proof, or an error."""
        self._empty.put(item)

    def give_full(self, item: Any) -> None:
        """Give a full buffer on, or the plan, or the proof, or an error."""
        self._full.put(item)

    def take_empty(self, what: str) -> Any:
        """Wait for an empty buffer; raise the error that comes instead."""
        return _or_raise(self._wait(self._empty, what))

    def take_full(self, what: str) -> Any:
        """Wait for a full one; raise the error that comes instead."""
        return _or_raise(self._wait(self._full, what))

    def wait_empty(self, what: str, *, skip: type[Tensor] | None = None) -> tuple[Any, BaseException | None]:
        """Wait for an empty buffer, or for what comes after those of type `skip`; an error comes as the second."""
        item = self._wait(self._empty, what)
        while skip is not None and isinstance(item, skip):
            item = self._wait(self._empty, what)
        return (None, item) if isinstance(item, BaseException) else (item, None)

    def wait_full(self, what: str) -> tuple[Any, BaseException | None]:
        """Wait for a full one; an error comes as the second."""
        item = self._wait(self._full, what)
        return (None, item) if isinstance(item, BaseException) else (item, None)

    def break_off(self, error: BaseException) -> None:
        """Whoever waits on either side gets this error."""
        self._empty.put(error)
        self._full.put(error)

    def _wait(self, source: "queue.SimpleQueue[Any]", what: str) -> Any:
        try:
            with self.deadline.declared(what):
                return source.get(timeout=self.deadline.left_s())
        except queue.Empty:
            return self.deadline.missed(what)


class Courier:
    """Runs one rank's part of a conversation in a thread, while the `with` block fills or loads the buckets.

    An error of the block reaches the thread in a buffer's place, so that it can tell the other ranks; an error of the
    thread is raised in the block, at its next handover.

    Args:
        part: the conversation; its result is that of the sync.
        handover: between the two.
    """

    def __init__(self, part: Callable[[], list[WeightProof]], handover: Handover) -> None:
        self._part, self._handover = part, handover
        self._proofs: list[WeightProof] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="offbeat-weight-courier", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._handover.break_off(error)
            self._join()

    def result(self) -> list[WeightProof]:
        """Wait for the end of the conversation.

        Raises:
            OffbeatError: whatever ended it.
        """
        self._join()
        if self._error is not None:
            raise self._error
        if self._proofs is None:
            raise self._handover.deadline.missed("the other ranks")
        return self._proofs

    def _join(self) -> None:
        self._thread.join(self._handover.deadline.left_s() + GRACE_S)

    def _run(self) -> None:
        try:
            self._proofs = self._part()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that fills or loads
            self._error = error
            self._handover.break_off(error)


GRACE_S: Final = 15.0
"""After the deadline, for the group's own error, which names the rank that did not come."""


def _or_raise(item: Any) -> Any:
    if isinstance(item, WeightSyncError):
        raise WeightSyncError(str(item)) from item  # the same error is raised by the courier's owner, too
    if isinstance(item, BaseException):
        raise item
    return item
