"""Calls to the engine's workers, answered by all of them or by an error. Nothing of vLLM here."""

import itertools
import json
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final

from offbeat_rollout_vllm._form import EngineForm
from offbeat_types import DeadlineError, PeerFailedError, WeightSyncError

GRACE_S: Final = 10.0
"""How much longer than the workers' own deadline we wait: theirs says more."""


class PendingCall:
    """A call on its way.

    Args:
        workers: who was called.
        number: of the call.
        method: what was called.
        replies: of all workers.
    """

    def __init__(self, workers: "Workers", number: int, method: str, replies: "Future[list[str]]") -> None:
        self._workers, self._number, self._method, self._replies = workers, number, method, replies

    def result(self) -> list[Any]:
        """Each worker's answer, by rank.

        Raises:
            WeightSyncError: a worker refused.
            DeadlineError, PeerFailedError: the workers can no longer be relied on; see `Workers.lost`.
        """
        workers, name = self._workers, f"rollout-vllm.{self._method}"
        try:
            texts = self._replies.result(workers.deadline_s + GRACE_S)
        except FutureTimeoutError as error:
            workers.lost = f"{name} was not answered in {workers.deadline_s:g} s"
            raise DeadlineError(name, "vLLM's workers", workers.deadline_s) from error
        except Exception as error:
            workers.lost = f"{name}: {error}"
            raise PeerFailedError("vLLM's workers", workers.lost) from error
        return workers.read(self._number, self._method, texts)


class Workers:
    """All workers of one engine.

    `lost` says why they can no longer be relied on. An exception that passes through vLLM's own call leaves replies of
    the other ranks in its queues, which later calls take for theirs (vllm-project/vllm#57846): then for ever, and so
    the engine must be thrown away. Our calls carry numbers, so a stale reply is seen, whoever caused it.

    Args:
        form: of the engine.
        num_workers: how many must answer.
        deadline_s: for one call.
    """

    def __init__(self, form: EngineForm, num_workers: int, deadline_s: float) -> None:
        self._form, self.num_workers, self.deadline_s = form, num_workers, deadline_s
        self._numbers = itertools.count()
        self.lost = ""

    def start(self, method: str, **arguments: Any) -> PendingCall:
        """Call all workers, and wait later."""
        if self.lost:
            raise PeerFailedError("vLLM's workers", f"{self.lost}; make a new engine")
        number = next(self._numbers)
        text = json.dumps({"number": number, "method": method, "arguments": arguments})
        return PendingCall(self, number, method, self._form.call_workers(text, self.deadline_s))

    def call(self, method: str, **arguments: Any) -> list[Any]:
        """Call all workers and wait for their answers."""
        return self.start(method, **arguments).result()

    def read(self, number: int, method: str, texts: Sequence[str]) -> list[Any]:
        """Check that each worker has answered this call, and none has failed."""
        replies = [_parse(text) for text in texts]
        stale = [rank for rank, reply in enumerate(replies) if (reply["rank"], reply["number"]) != (rank, number)]
        if len(replies) != self.num_workers:
            self.lost = f"{method}: {self.num_workers} ranks must answer, {len(replies)} did"
        elif stale:
            self.lost = f"{method}: stale replies of rank {', '.join(map(str, stale))}, from a call that failed"
        if self.lost:
            raise PeerFailedError("vLLM's workers", f"{self.lost}; make a new engine")
        for reply in replies:
            if "error" in reply:
                raise WeightSyncError(f"vLLM's worker of rank {reply['rank']} could not {method}: {reply['error']}")
        return [reply.get("value") for reply in replies]


def _parse(text: object) -> dict[str, Any]:
    """A reply; one that is none of ours, and so from another call, as a reply to no call."""
    try:
        reply = json.loads(str(text))
        return reply if {"rank", "number"} <= reply.keys() else {"rank": None, "number": None}
    except (ValueError, AttributeError):
        return {"rank": None, "number": None}
