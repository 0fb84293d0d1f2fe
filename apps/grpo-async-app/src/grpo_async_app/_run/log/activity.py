"""The activity of a run at one moment, as text for people."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from offbeat_actors import RolePlace
from offbeat_async_policy import PolicyStatus
from offbeat_run import doing

_POLL_EVERY_S: Final = 0.5
_MAX_NAMES: Final = 4
"""Roles that are named while all start; a large run has thousands."""

Activity = tuple[str, str]
"""Stage and how far it is, as for `offbeat_run.doing`."""


@asynccontextmanager
async def following(look: Callable[[], Activity]) -> AsyncIterator[None]:
    """Say what `look` sees, again and again, while the block lasts."""
    looking = asyncio.create_task(_follow(look))
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def _follow(look: Callable[[], Activity]) -> None:
    while True:
        doing(*look())
        await asyncio.sleep(_POLL_EVERY_S)


def describe_start(places: Sequence[RolePlace]) -> Activity:
    """Say which roles are ready, and which are still on their way."""
    late = [str(place.role) for place in places if place.state != "ready"]
    named = ", ".join(late[:_MAX_NAMES]) + (f" and {len(late) - _MAX_NAMES} more" if len(late) > _MAX_NAMES else "")
    ready = f"{len(places) - len(late)} of {len(places)} ready"
    return "starting the roles", f"{ready}, waiting for {named}" if late else ready


@dataclass(frozen=True, kw_only=True)
class RunView:
    """Facts that the driver knows of a run at one moment.

    Args:
        status: of the policy.
        num_updates: of the whole run.
        samples_per_group: of each prompt.
        num_tokens: sampled since the engines started, as they last reported.
        trained: progress of the update, as text; empty before the trainer has reported it.
        validated: items answered and items asked, of the validation that runs; None for none.
        is_saving: a checkpoint is being written.
    """

    status: PolicyStatus
    num_updates: int
    samples_per_group: int
    num_tokens: int
    trained: str
    validated: tuple[int, int] | None
    is_saving: bool

    def describe(self) -> Activity:
        """Describe all work in progress, the trainer's first: the rest waits for it, or overlaps with it."""
        status, parts = self.status, []
        if status.num_training:
            parts.append(f"training on {status.num_training} groups{f' ({self.trained})' if self.trained else ''}")
        if self.is_saving:
            parts.append("saving the checkpoint")
        if status.syncing:
            parts.append("bringing weights to the engines")
        if status.in_flight or status.num_finished:
            wanted = status.groups_per_update * self.samples_per_group
            tokens = f" ({self.num_tokens:,} tokens so far)" if self.num_tokens else ""
            parts.append(f"{status.num_finished * self.samples_per_group} of {wanted} samples{tokens}")
        if self.validated:
            parts.append("validating ({} of {})".format(*self.validated))
        number = min(status.version + 1, self.num_updates)
        return f"update {number} of {self.num_updates}", ", ".join(parts)
