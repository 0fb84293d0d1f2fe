"""One rollout engine of a run: what is known of it, and how it gets weights."""

import asyncio
from dataclasses import dataclass, field

from grpo_async_app._colocation import ColocationSchedule
from grpo_async_app._weight_transfer import WeightOffer, transfer_weights
from offbeat_actors import ActorHandle
from offbeat_types import EngineHealth, WeightProof


@dataclass(eq=False)
class Engine:
    """One rollout engine, through all its processes.

    Args:
        name: such as "rollout-0".
        handle: its process; a dead one while the next is started.
        num_groups: what it has to do.
        serves: it holds weights and takes requests. Set as well when it has left, for those who wait.
        empty: it has nothing to do.
        leaving: it takes no more groups, and is stopped when it is empty.
        has_left: it will never serve again.
        failure: why, where that ends the run.
        num_tokens: sampled by its process, as it last said.
    """

    name: str
    handle: ActorHandle
    num_groups: int = 0
    serves: asyncio.Event = field(default_factory=asyncio.Event)
    empty: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: bool = False
    has_left: bool = False
    failure: BaseException | None = None
    num_tokens: int = 0

    async def ask_health(self, *, deadline_s: float) -> None:
        """Ask its process how it is; it answers at once whatever it computes."""
        health: EngineHealth = await self.handle.call("health", returns=EngineHealth, deadline_s=deadline_s)
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
    handle = engine.handle
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
