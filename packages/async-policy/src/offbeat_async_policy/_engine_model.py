"""One rollout engine of the simulator: continuous batching, where all running samples decode at the same speed."""

import heapq
from collections import deque

from offbeat_async_policy._workload import DecodeSpeed


class EngineModel:
    """Keeps a counter of tokens decoded per running sample: a sample ends when the counter has grown by its length.

    Args:
        curve: throughput by samples running.
        max_running: samples decoded at once; the others queue in order.
    """

    def __init__(self, curve: DecodeSpeed, max_running: int) -> None:
        self._speeds = [0.0] + [curve.tokens_per_s(n) / n for n in range(1, max_running + 1)]
        self._max_running = max_running
        self._running: list[tuple[float, int]] = []  # heap of (token counter at which it ends, group)
        self._queue: deque[tuple[int, int]] = deque()  # (group, length)
        self._token_counter = 0.0
        self._counted_to_s = 0.0
        self._paused = False
        self.epoch = 0  # grows whenever `next_end_s` changes
        self.busy_s = 0.0
        self.sample_s = 0.0  # running samples, summed over time

    @property
    def num_running(self) -> int:
        """Samples running."""
        return len(self._running)

    def add(self, now_s: float, group_id: int, lengths: list[int]) -> list[int]:
        """Take the samples of a group; return the groups that begin to decode now."""
        self._advance(now_s)
        self._queue.extend((group_id, length) for length in lengths)
        return self._fill()

    def end_next(self, now_s: float) -> tuple[int, list[int]]:
        """End the sample that is due; return its group, and the groups that begin to decode in its place."""
        self._advance(now_s)
        ends_at_token, group_id = heapq.heappop(self._running)
        self._token_counter = ends_at_token  # without the rounding of the clock
        return group_id, self._fill()

    def remove(self, now_s: float, group_id: int) -> list[int]:
        """Abort a group; return the groups that begin to decode in its place."""
        self._advance(now_s)
        self._running = [sample for sample in self._running if sample[1] != group_id]
        heapq.heapify(self._running)
        self._queue = deque(sample for sample in self._queue if sample[0] != group_id)
        return self._fill()

    def pause(self, now_s: float) -> None:
        """Hold everything where it is."""
        self._advance(now_s)
        self._paused = True
        self.epoch += 1

    def resume(self, now_s: float) -> list[int]:
        """Go on; return the groups that begin to decode now."""
        self._advance(now_s)
        self._paused = False
        return self._fill()

    def next_end_s(self) -> float | None:
        """When the next sample ends, if nothing changes before."""
        if self._paused or not self._running:
            return None
        tokens_left = self._running[0][0] - self._token_counter
        return self._counted_to_s + max(0.0, tokens_left) / self._speeds[len(self._running)]

    def _advance(self, now_s: float) -> None:
        passed_s, self._counted_to_s = now_s - self._counted_to_s, now_s
        if self._running and not self._paused:
            self._token_counter += passed_s * self._speeds[len(self._running)]
            self.busy_s += passed_s
            self.sample_s += passed_s * len(self._running)

    def _fill(self) -> list[int]:
        begun = []
        while not self._paused and self._queue and len(self._running) < self._max_running:
            group_id, length = self._queue.popleft()
            heapq.heappush(self._running, (self._token_counter + length, group_id))
            begun.append(group_id)
        self.epoch += 1
        return begun
