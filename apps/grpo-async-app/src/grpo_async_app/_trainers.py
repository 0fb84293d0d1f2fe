"""The trainer's ranks, called and watched as one."""

from collections.abc import Sequence
from dataclasses import replace

from grpo_async_app._roles.rendezvous import Rendezvous
from offbeat_actors import ActorGroup, ActorHandle, Launcher, RoleSpec, start_all


class Trainers(ActorGroup):
    """One trainer, or several ranks of it: every call goes to all of them, and rank 0 answers.

    Args:
        ranks: in order.
        silent_after_s: see `ActorGroup`.
        store: where they met, kept open for them.
    """

    def __init__(self, ranks: Sequence[ActorHandle], silent_after_s: float, store: object = None) -> None:
        super().__init__(ranks, silent_after_s)
        self._store, self._listens_at = store, ""

    async def listen(self, deadline_s: float) -> str:
        """Where rank 0 gives weights to other machines, with the secret that opens it; it listens once asked to."""
        if not self._listens_at:
            self._listens_at = await self.call("listen", self.address, returns=str, deadline_s=deadline_s)
        return self._listens_at


async def start_trainers(
    launcher: Launcher,
    spec: RoleSpec,
    num_ranks: int,
    *,
    start_deadline_s: float,
    call_deadline_s: float,
    silent_after_s: float,
) -> Trainers:
    """Start every rank of the trainer at once, and wait until all are ready. When one fails, none is left.

    Args:
        launcher: starts the roles; they have been placed.
        spec: of rank 0; the others differ by their number.
        num_ranks: how many.
        start_deadline_s: for the ranks to find each other.
        call_deadline_s: for each call among them.
        silent_after_s: a rank that answers nothing for so long is killed.
    """
    if num_ranks == 1:
        return Trainers([await launcher.start(spec)], silent_after_s)
    from offbeat_mesh import open_store  # imports torch: only several ranks need it

    # The driver keeps the place where the ranks meet, so it outlives any of them.
    host = launcher.address
    store = open_store(host, deadline_s=start_deadline_s)
    places = [
        Rendezvous(
            rank=rank,
            size=num_ranks,
            host=host,
            port=store.port,
            start_deadline_s=start_deadline_s,
            call_deadline_s=call_deadline_s,
        )
        for rank in range(num_ranks)
    ]
    return Trainers(await start_all(launcher, [_rank_spec(spec, place) for place in places]), silent_after_s, store)


def _rank_spec(spec: RoleSpec, place: Rendezvous) -> RoleSpec:
    name = f"trainer-{place.rank}"
    return replace(
        spec,
        name=name,
        kwargs={**spec.kwargs, "rendezvous": place},
        liveness_policy="abort",
        log_path=spec.log_path and spec.log_path.with_name(f"{name}.log"),
    )
