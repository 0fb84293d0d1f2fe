"""One version of the trainer's weights, brought to all rollout engines at the same time."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from grpo_async_app._fleet.colocation import ColocationSchedule
from grpo_async_app._fleet.events import RunEvents
from grpo_async_app._fleet.trainers import DEATH_SEEN_AFTER_S, Trainers, is_lost
from offbeat_actors import ActorHandle, Member
from offbeat_core import OffbeatError, PeerFailedError, WeightPart, WeightProof, WeightSyncError
from offbeat_run import clock_s
from offbeat_weightsync import Reach

E = TypeVar("E", bound=Member)

Source = list[str]
"""Addresses that an engine asks for weights: one, or one for each of its workers if several ranks send to them."""


class WeightOffer:
    """The trainer's weights of one version.

    Args:
        trainer: that holds them.
        version: policy version.
        deadline_s: for all engines to come, load and prove.
        parts: what an engine gets, in order. The base is brought once to each process of an engine, by one trainer.
        reach: of the transport.
        ranks: for each engine, by name, the trainer ranks that send to it; rank 0 sends to those not named.
        events: takes each part that an engine has taken.
    """

    def __init__(
        self,
        trainer: Trainers,
        version: int,
        deadline_s: float,
        events: RunEvents,
        parts: Sequence[WeightPart] = ("merged",),
        reach: Reach = "either",
        ranks: Mapping[str, Sequence[int]] = {},
    ) -> None:
        self._trainer, self.version, self._deadline_s = trainer, version, deadline_s
        self.parts, self._reach, self._ranks, self._events = parts, reach, ranks, events
        self._transfer_id = 0
        self._brought: set[tuple[ActorHandle, WeightPart]] = set()

    def lacks(self, actor: ActorHandle, part: WeightPart) -> bool:
        """Return whether this part is still to be brought to this process."""
        return (actor, part) not in self._brought and not (part == "base" and actor in self._trainer.have_base)

    def was_brought(self, actors: Iterable[ActorHandle], part: WeightPart) -> None:
        """Note that these have proved it."""
        for actor in actors:
            self._brought.add((actor, part))
            if part == "base":
                self._trainer.have_base.add(actor)  # beyond this offer: each process gets the base once

    async def sources_for(self, actors: Collection[ActorHandle]) -> list[Source]:
        """Return where each of these engines asks for them: by memory, if the machine of rank 0 is that of all."""
        trainer, is_local = self._trainer, {actor.address for actor in actors} == {self._trainer.address}
        if self._reach == "machine" or (self._reach == "either" and is_local):
            return [[trainer.socket_paths[rank] for rank in self._ranks.get(actor.name, [0])] for actor in actors]
        return [[await trainer.listen(self._deadline_s)]] * len(actors)

    async def push(self, sources: Sequence[Source], part: WeightPart) -> None:
        """Make the trainer give a part to the engines that ask at these sources."""
        self._transfer_id = next(self._trainer.transfer_ids)
        # One rank that sends to all, at whatever address, is the first.
        num_engines, address = [len(sources)] + [0] * (len(self._trainer.actors) - 1), sources[0][0]
        if address in self._trainer.socket_paths:
            num_engines = [sum(path in each for each in sources) for path in self._trainer.socket_paths]
            address = ""
        args = (self.version, num_engines, self._deadline_s, address, self._transfer_id, part)
        returns, deadline_s = list[WeightProof], self._deadline_s + 5  # after the transfer's, whose error says more
        answers = await self._trainer.call_each("push_weights", *args, returns=returns, deadline_s=deadline_s)
        if errors := [answer for answer in answers if isinstance(answer, OffbeatError)]:
            raise root_cause(errors)
        by_rank = zip(self._trainer.actors, answers, strict=True)
        check_same_weights({rank.name: proofs[0] for rank, proofs in by_rank if proofs})

    async def pull(self, actor: ActorHandle, source: Source, part: WeightPart) -> None:
        """Make an engine take a part that is sent from this source, and prove it."""
        begun_s, deadline_s = clock_s(), self._deadline_s
        args = (source, self.version, deadline_s, part)
        await actor.call("pull_weights", *args, returns=WeightProof, deadline_s=deadline_s + 5)
        self._events.took_weights(actor.name, part, self.version, begun_s)

    async def withdraw(self) -> None:
        """Notify the trainer that not all engines of the last `push` will come."""
        await self._trainer.call("withdraw", self._transfer_id, deadline_s=self._deadline_s)


def check_same_weights(sent: Mapping[str, WeightProof]) -> None:
    """Check that all ranks have sent the same: an engine proves what its own rank has sent.

    Args:
        sent: what the engines of each rank hold, by the rank's name.

    Raises:
        WeightSyncError: two ranks have sent different weights.
    """
    (first, proof), *others = sent.items()
    for rank, other in others:
        if other != proof:
            raise WeightSyncError(
                f"{rank} has sent other weights of version {proof.version} than {first}: all ranks must hold the same; "
                "resume the run from its last checkpoint"
            )


async def bring_weights(
    engines: Sequence[E],
    offer: WeightOffer,
    interrupt: bool,
    deadline_s: float,
    turns: ColocationSchedule | None,
    give_up: Callable[[E, ActorHandle, str], None],
) -> list[E]:
    """Pause engines, let all of them take the trainer's weights, and resume them; colocated ones resume later.

    Args:
        engines: those that serve are paused first.
        offer: of the trainer.
        deadline_s: for each engine to pause, to take the weights, and to resume.
        turns: where the engines share their devices with the trainer.
        interrupt: what they sample is held, and continues under the new weights; otherwise it is finished before.
        give_up: takes an engine that is lost on the way, its process, and why. The others begin anew without it.

    Returns:
        Those that have got the weights.

    Raises:
        OffbeatError: of the trainer, or of an engine that no new process would mend.
    """

    async def pause(actor: ActorHandle) -> None:
        if actor in serving:
            await actor.call("pause", "keep" if interrupt else "wait", deadline_s=deadline_s)
        if turns is not None:
            await turns.make_room(actor)

    async def transfer(actors: Sequence[ActorHandle], part: WeightPart) -> Outcomes:
        sources = await offer.sources_for(actors)
        pulls = [offer.pull(actor, source, part) for actor, source in zip(actors, sources, strict=True)]
        return await transfer_weights(pulls, offer.push(sources, part), offer.withdraw)

    async def resume(actor: ActorHandle) -> None:
        await actor.call("resume", deadline_s=deadline_s)

    processes = {engine.actor: engine for engine in engines}
    serving = {actor for actor, engine in processes.items() if engine.serves.is_set()}

    async def without_lost(actors: Sequence[ActorHandle], outcomes: Outcomes) -> None:
        for actor, error in (await lost_engines(actors, outcomes)).items():
            give_up(processes.pop(actor), actor, str(error))

    async def bring(part: WeightPart) -> None:
        # Again without the lost ones: a failed transfer has proved nothing to any engine.
        while lacking := [actor for actor in processes if offer.lacks(actor, part)]:
            if any(outcomes := await transfer(lacking, part)):
                await without_lost(lacking, outcomes)
            else:
                offer.was_brought(lacking, part)

    async def all_take(step: Callable[[ActorHandle], Awaitable[object]]) -> None:
        actors = list(processes)
        outcomes = await each(actors, step)
        await without_lost(actors, outcomes)
        # Engines do not meet in such a step, so the error of one that lives is its own.
        if failed := [error for actor, error in zip(actors, outcomes, strict=True) if error and actor in processes]:
            raise root_cause(failed)

    await all_take(pause)
    for part in offer.parts:
        await bring(part)
    if turns is None:
        await all_take(resume)
        for engine in processes.values():
            engine.serves.set()
    return list(processes.values())


Outcomes = Sequence[BaseException | None]
"""Results of a step that engines took: for each the error, or None."""


async def each(actors: Iterable[ActorHandle], step: Callable[[ActorHandle], Awaitable[object]]) -> Outcomes:
    """Take one step with all engines at once, and return their errors."""
    outcomes = await asyncio.gather(*map(step, actors), return_exceptions=True)
    return [outcome if isinstance(outcome, BaseException) else None for outcome in outcomes]


async def lost_engines(actors: Sequence[ActorHandle], outcomes: Outcomes) -> dict[ActorHandle, BaseException]:
    """Engines that failed so that only a new process mends it, with the error. Where none did, an error is raised."""
    failed = {actor: error for actor, error in zip(actors, outcomes, strict=True) if error is not None}

    async def is_gone(actor: ActorHandle, error: BaseException) -> bool:
        return isinstance(error, PeerFailedError | WeightSyncError) and await is_lost(actor, error)

    gone = await asyncio.gather(*(is_gone(*item) for item in failed.items()))
    # Where one is gone, errors of engines that live are taken for its consequences.
    if failed and not any(gone):
        raise root_cause(failed.values())
    return {actor: error for (actor, error), it_is in zip(failed.items(), gone, strict=True) if it_is}


def root_cause(errors: Iterable[BaseException]) -> BaseException:
    """Return the error that says most: the failed side's own, rather than that of a peer or of a cancelled call."""

    def distance(error: BaseException) -> tuple[bool, bool]:
        return isinstance(error, asyncio.CancelledError), isinstance(error, WeightSyncError) and error.is_peers

    return min(errors, key=distance)


async def transfer_weights(
    pulls: Sequence[Coroutine[Any, Any, object]], push: Awaitable[object], withdraw: Callable[[], Awaitable[object]]
) -> Outcomes:
    """Await all sides of a transfer.

    Args:
        pulls: the engines' sides.
        push: the trainer's. It sends in its only thread, which no cancellation reaches: one that waits for an engine
            that is gone would stand in the way of the next.
        withdraw: ends `push` while it waits for the engines.

    Returns:
        The engines' errors.

    Raises:
        OffbeatError: the trainer failed, and no engine did.
    """
    sides = [asyncio.ensure_future(side) for side in (*pulls, push)]
    sending = sides[-1]
    try:
        _, others = await asyncio.wait(sides, return_when=asyncio.FIRST_EXCEPTION)
        if others:
            await asyncio.wait(others, timeout=DEATH_SEEN_AFTER_S)  # other sides see a death a moment later
        if not sending.done():
            with contextlib.suppress(OffbeatError):  # a trainer that is gone sends nothing either
                await withdraw()
            await asyncio.wait({sending})  # it has a deadline of its own
            await asyncio.wait(sides, timeout=DEATH_SEEN_AFTER_S)
    finally:
        for side in sides:
            side.cancel()
        outcomes = await asyncio.gather(*sides, return_exceptions=True)
    *errors, trainers = [outcome if isinstance(outcome, BaseException) else None for outcome in outcomes]
    # An engine's side that was only cancelled here has not failed.
    if trainers is not None and all(isinstance(error, asyncio.CancelledError | None) for error in errors):
        raise trainers
    return errors
