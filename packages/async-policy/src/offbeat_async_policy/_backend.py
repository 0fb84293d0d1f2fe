"""The seam between the loop and the processes that do the work."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """How one group came back. Its samples stay with the backend.

    Args:
        oldest_version: policy version that sampled the oldest of its tokens.
        filtered: it has no learning signal and is not trained.
    """

    oldest_version: int
    filtered: bool = False


class LoopBackend(Protocol):
    """Performs the actions of the policy, many at once in one event loop; but never two of update, sync, checkpoint."""

    async def submit(self, group_id: int) -> GroupResult:
        """Generate and score a group, and keep its samples until `update` or `drop` names it.

        Raises:
            PeerFailedError: its engine died; the group is issued again. All other errors end the run.
        """
        ...

    async def prepare(self, action: Literal["update", "sync", "checkpoint"]) -> None:
        """Called before each update, sync and checkpoint, outside its deadline: wait for what has to end first.

        What is waited for here needs deadlines of its own.
        """
        ...

    async def update(self, group_ids: tuple[int, ...], version: int) -> None:
        """Train on these groups; the trainer goes from `version` to `version + 1`."""
        ...

    async def sync(self, version: int, interrupt: bool) -> None:
        """Bring the trainer's weights to every engine; with `interrupt`, hold what is in flight and go on after it."""
        ...

    async def drop(self, group_id: int) -> None:
        """Forget a group: abort it if it is in flight (its `submit` is cancelled too), free its samples."""
        ...

    def wants_checkpoint(self, version: int) -> bool:
        """Whether to call `checkpoint` now that the trainer holds `version`; asked once after each update."""
        ...

    async def checkpoint(self, state: Mapping[str, Any]) -> None:
        """Write trainer, state and the samples of the groups in state["finished"] as one.

        Generation goes on meanwhile: take hold of the samples before the first `await`.
        """
        ...

    async def idle(self, wait: str, idle_s: float) -> float:
        """Called about every second; a place to show the wait, and to raise if a process has died.

        Args:
            wait: who waits for whom, in one line.
            idle_s: seconds since anything moved.

        Returns:
            Any number that changes while work moves, such as the tokens sampled so far: it tells slow from stuck.
        """
        ...

    def where(self, group_id: int) -> str:
        """Name of the engine that holds a group in flight, such as "rollout-0"."""
        ...
