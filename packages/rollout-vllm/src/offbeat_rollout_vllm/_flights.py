"""Requests in flight. Lives in the thread that owns the engine, so nothing is locked; `EngineHealth` reads counters."""

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from offbeat_rollout_vllm._form import new_future
from offbeat_rollout_vllm._samples import Delta, Sample
from offbeat_types import GenerateRequest, OffbeatError


def draw_seed() -> int:
    """A seed for a request that has none: vLLM's own generator would start alike on every engine."""
    return int.from_bytes(os.urandom(6), "little")


@dataclass
class Flight:
    """A request, its samples, and who waits for them.

    Args:
        request: as asked.
        first_seed: of sample 0.
        prompt: ids, or the engine's own form of a prompt with images.
        changes: of the parameters that vLLM is given.
        done: set when every sample has ended, or with the error that ended the request.
    """

    request: GenerateRequest
    first_seed: int
    prompt: Any = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(init=False)
    done: "Future[None]" = field(default_factory=new_future)

    def __post_init__(self) -> None:
        name = self.request.request_id
        self.samples = [Sample(f"{name}/{index}", self.request, index) for index in range(self.request.num_samples)]

    def unfinished(self) -> list[Sample]:
        """Samples that have not ended."""
        return [sample for sample in self.samples if sample.stop_reason is None]


class Flights:
    """Every request that has not returned.

    Args:
        eos_ids: the model's end-of-sequence ids.
    """

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self.eos_ids = eos_ids
        self._flights: dict[str, Flight] = {}
        self._by_sample: dict[str, tuple[Flight, Sample]] = {}
        self._when_empty: list[Future[None]] = []
        self._busy_s = 0.0
        self._busy_since_s: float | None = None
        self.num_running = self.num_waiting = self.num_tokens = 0

    @property
    def busy_s(self) -> float:
        """Seconds in which something was in flight."""
        since = self._busy_since_s
        return self._busy_s + (time.monotonic() - since if since is not None else 0.0)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._flights

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._flights.values()))

    def get(self, request_id: str) -> Flight | None:
        """The request of that id, if it is in flight."""
        return self._flights.get(request_id)

    def add(self, flight: Flight) -> None:
        """Take a request that the engine has been given."""
        if self._busy_since_s is None:
            self._busy_since_s = time.monotonic()
        self._flights[flight.request.request_id] = flight
        for sample in flight.samples:
            self._by_sample[sample.sample_id] = flight, sample
        self.num_waiting += len(flight.samples)

    def push(self, sample_id: str, delta: Delta) -> None:
        """Add what a step drew. Unknown ids are of requests that have returned already."""
        if sample_id not in self._by_sample:
            return
        flight, sample = self._by_sample[sample_id]
        if delta.ids and not sample.ids:
            self.num_waiting -= 1
            self.num_running += 1
        self.num_tokens += len(delta.ids)
        sample.push(delta, self.eos_ids)
        if sample.stop_reason is not None:
            self._leave(sample)
        if not flight.unfinished():
            self._remove(flight)
            flight.done.set_result(None)

    def fail(self, sample_id: str, error: Exception) -> None:
        """End the request of a sample, or all for "", with an error."""
        failed = (
            list(self._flights.values())
            if not sample_id
            else [self._by_sample[sample_id][0] for sample_id in [sample_id] if sample_id in self._by_sample]
        )
        for flight in failed:
            for sample in flight.unfinished():
                self._leave(sample)
            self._remove(flight)
            flight.done.set_exception(error)

    def when_empty(self) -> "Future[None]":
        """Done when nothing is in flight."""
        future = new_future()
        self._when_empty.append(future)
        self._tell_empty()
        return future

    def _leave(self, sample: Sample) -> None:
        del self._by_sample[sample.sample_id]
        if sample.ids:
            self.num_running -= 1
        else:
            self.num_waiting -= 1

    def _remove(self, flight: Flight) -> None:
        del self._flights[flight.request.request_id]
        if not self._flights and self._busy_since_s is not None:
            self._busy_s, self._busy_since_s = self.busy_s, None
        self._tell_empty()

    def _tell_empty(self) -> None:
        if not self._flights:
            for future in self._when_empty:
                future.set_result(None)
            self._when_empty = []


def duplicate(request_id: str) -> OffbeatError:
    """The error of a request whose id is in flight."""
    return OffbeatError(f"request_id {request_id!r} is in flight already; give each request its own")
