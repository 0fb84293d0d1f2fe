"""The trainer's ranks, called and watched as one."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final
from weakref import WeakSet

from grpo_async_app._config.sections import GrpoConfig
from offbeat_actors import ActorGroup, ActorHandle, Launcher, RoleSpec, start_ranks
from offbeat_core import PeerFailedError, WeightSyncError


class Trainers(ActorGroup):
    """One trainer, or several ranks of it: every call goes to all of them, and rank 0 answers.

    Args:
        ranks: in order.
        silent_after_s: see `ActorGroup`.
        socket_paths: for each rank the address where engines on its machine fetch weights; "" where none do.
        store: where they met, kept open for them.

    Attributes:
        transfer_ids: numbers that grow, one for each transfer of weights.
        have_base: engines that have got the weights to which an adapter is added.
    """

    def __init__(
        self, ranks: Sequence[ActorHandle], silent_after_s: float, socket_paths: Sequence[str], store: object = None
    ) -> None:
        super().__init__(ranks, silent_after_s)
        self.socket_paths, self._store, self._listens_at = socket_paths, store, ""
        self.transfer_ids = itertools.count(1)
        self.have_base: WeakSet[ActorHandle] = WeakSet()

    async def listen(self, deadline_s: float) -> str:
        """Return where rank 0 gives weights to other machines, with the secret that opens it.

        It listens once asked to.
        """
        if not self._listens_at:
            self._listens_at = await self.call("listen", self.address, returns=str, deadline_s=deadline_s)
        return self._listens_at

    def replace(self, newcomers: Mapping[int, ActorHandle], socket_paths: Sequence[str], store: object) -> None:
        """Go on with others in the places of ranks that have died.

        Args:
            newcomers: by rank.
            socket_paths: as of all ranks now.
            store: where they have met.
        """
        self.put(newcomers)
        self.socket_paths, self._store = socket_paths, store
        if 0 in newcomers:
            self._listens_at = ""


async def start_trainers(launcher: Launcher, spec: RoleSpec, config: GrpoConfig) -> Trainers:
    """Start every rank of the trainer at once, and wait until all are ready. When one fails, none is left."""
    store, places = open_places(launcher, config) if config.engine.num_ranks > 1 else (None, [])
    ranks = await start_ranks(launcher, spec, places)
    return Trainers(ranks, config.cluster.silent_after_s, spec.kwargs["socket_paths"], store)


def open_places(launcher: Launcher, config: GrpoConfig) -> tuple[object, Sequence[Any]]:
    """Return the store where several ranks meet, which the driver keeps so that it outlives them, and their places."""
    from offbeat_mesh import open_rendezvous  # imports torch: only several ranks need it

    return open_rendezvous(
        launcher.address,
        config.engine.num_ranks,
        start_deadline_s=config.cluster.start_timeout_s,
        call_deadline_s=config.async_.update_deadline_s,
    )


DEATH_SEEN_AFTER_S: Final = 2.0
"""A call that fails and the death that made it fail are seen one after the other; how long to wait for the second."""


async def is_lost(handle: ActorHandle, error: PeerFailedError | WeightSyncError) -> bool:
    """Return whether the engine failed in such a way that only a new process mends it."""
    if isinstance(error, PeerFailedError) and error.peer == handle.name:
        return True
    gone = asyncio.ensure_future(handle.wait_dead())
    await asyncio.wait({gone}, timeout=DEATH_SEEN_AFTER_S)
    gone.cancel()
    return not handle.alive
