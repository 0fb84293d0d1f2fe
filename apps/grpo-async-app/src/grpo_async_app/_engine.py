"""One rollout engine of a run: what is known of it, and how it gets weights."""

import asyncio

from grpo_async_app._colocation import ColocationSchedule
from grpo_async_app._weight_transfer import WeightOffer, transfer_weights
from offbeat_actors import ActorHandle, Supervised
from offbeat_types import EngineHealth, WeightProof


class Engine(Supervised):
    """One rollout engine, through all its processes; its load is the groups that it works on.

    Attributes:
        empty: it has nothing to do.
        leaving: it takes no more groups, and is stopped when it is empty.
        has_left: it will never serve again.
        num_tokens: sampled by its process, as it last said.
    """

    def __init__(self, name: str, actor: ActorHandle) -> None:
        super().__init__(name, actor)
        self.empty = asyncio.Event()
        self.leaving = self.has_left = False
        self.num_tokens = 0

    async def ask_health(self, *, deadline_s: float) -> None:
        """Ask its process how it is; it answers at once whatever it computes."""
        health: EngineHealth = await self.actor.call("health", returns=EngineHealth, deadline_s=deadline_s)
        self.num_tokens = health.num_tokens


async def bring_weights(
    engine: Engine, offer: WeightOffer, interrupt: bool, deadline_s: float, turns: ColocationSchedule | None
) -> None:
    """Pause an engine, let it take the trainer's weights, and let it go on; colocated ones go on all together.

    Args:
        engine: whose process lives.
        offer: the weights.
        interrupt: hold what is in flight, instead of finishing it.
        deadline_s: of each step.
        turns: where engines and trainer share devices.
    """
    handle = engine.actor
    source = await offer.source_for(handle.address)
    if engine.serves.is_set():
        await handle.call("pause", "keep" if interrupt else "wait", deadline_s=deadline_s)
    if turns is not None:
        await turns.make_room(handle)
    take = handle.call(
        "receive_weights",
        source,
        offer.version,
        deadline_s,
        engine.name,
        returns=WeightProof,
        deadline_s=deadline_s + 5,
    )
    await transfer_weights(take, offer.send(source), offer.withdraw)
    if turns is None:
        await handle.call("resume", deadline_s=deadline_s)
        engine.serves.set()
