"""Many actors as one: a call to all of them, a start of all or none, the first death among them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar, overload

from offbeat_actors._actor import ActorHandle
from offbeat_actors._launcher import Launcher
from offbeat_actors._spec import RoleSpec
from offbeat_actors._supervision.supervision import wait_gone
from offbeat_core import DeadlineError, OffbeatError, PeerFailedError

T = TypeVar("T")

DEATH_SEEN_AFTER_S: Final = 2.0
"""Torch notifies the other ranks of a death at once; the kernel notifies the driver a moment later."""
_LAST_ANSWERS_S: Final = 3.0
"""All calls have one deadline; how long to wait for each to say what its role is doing."""
_PROGRESS_EVERY_S: Final = 1.0
_PROGRESS_DEADLINE_S: Final = 5.0
"""Patience with an actor that is asked for its progress: a late answer is useless."""


@overload
async def call_all(
    roles: Sequence[ActorHandle], method: str, *args: Any, returns: type[T], deadline_s: float, **kwargs: Any
) -> list[T]: ...
@overload
async def call_all(
    roles: Sequence[ActorHandle], method: str, *args: Any, returns: None = None, deadline_s: float, **kwargs: Any
) -> list[None]: ...
async def call_all(
    roles: Sequence[ActorHandle], method: str, *args: Any, returns: Any = None, deadline_s: float, **kwargs: Any
) -> list[Any]:
    """Call a method of all roles at once and wait for all of them, within one deadline.

    Args:
        roles: to call.
        method: its name; further arguments as in `ActorHandle.call`.
        args: the same for all.
        returns: type of each result.
        deadline_s: for all together.
        kwargs: the same for all.

    Returns:
        The results, in the order of the roles.

    Raises:
        DeadlineError: names every role that has not answered, and what each is doing.
        OffbeatError: the first error of any role; the other calls are cancelled.
    """
    calls = [
        asyncio.ensure_future(role.call(method, *args, returns=returns, deadline_s=deadline_s, **kwargs))
        for role in roles
    ]
    try:
        return await asyncio.gather(*calls)
    except DeadlineError as error:
        await asyncio.wait(calls, timeout=_LAST_ANSWERS_S)
        late = {role.name: call for role, call in zip(roles, calls, strict=True) if _is_late(role, method, call)}
        # Then the error itself says it: of one role alone, or of a wait inside a role that did answer.
        if (len(late) < 2 and len(roles) == 1) or not late:
            raise
        raise _name_all(method, late, len(roles), deadline_s) from error
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def _is_late(role: ActorHandle, method: str, call: "asyncio.Future[Any]") -> bool:
    """Return whether the role itself did not answer.

    An answer may be a DeadlineError too, of a wait inside the role.
    """
    if not call.done():
        return True
    error = None if call.cancelled() else call.exception()
    return isinstance(error, DeadlineError) and error.waiting == f"{role.name}.{method}"


def _name_all(
    method: str, late: Mapping[str, "asyncio.Future[Any]"], num_roles: int, deadline_s: float
) -> DeadlineError:
    advice = []
    for name, call in late.items():
        error = call.exception() if call.done() and not call.cancelled() else None
        advice.append(f"{name}: {error.advice}" if isinstance(error, DeadlineError) else name)
    return DeadlineError(f"{method} of {num_roles} roles", ", ".join(late), deadline_s, "; ".join(advice))


class ActorGroup:
    """Equal actors, such as the ranks of a trainer: every call goes to all of them, and the first answers.

    Must be made inside a running event loop.

    Args:
        actors: in order.
        silent_after_s: one that answers nothing for so long is killed; it has a method `beat`, which answers at once
            whatever it computes.
    """

    def __init__(self, actors: Sequence[ActorHandle], silent_after_s: float) -> None:
        self.actors, self._silent_after_s = tuple(actors), silent_after_s
        self._gone: list[str] = []  # in the order of their ends
        self._ends: dict[str, asyncio.Task[str]] = {}
        for each in actors:
            self._watch(each)

    @property
    def name(self) -> str:
        """Name of the first, which answers for all."""
        return self.actors[0].name

    @property
    def address(self) -> str:
        """IP address of the machine of the first."""
        return self.actors[0].address

    async def call(self, method: str, *args: Any, returns: Any = None, deadline_s: float) -> Any:
        """Call a method of all: see `ActorHandle.call`. The first error of any of them is raised.

        Raises:
            PeerFailedError: one has died; named is the one that died first.
        """
        calls = [each.call(method, *args, returns=returns, deadline_s=deadline_s) for each in self.actors]
        return (await self._unless_dead(calls))[0]

    async def call_each(self, method: str, *args: Any, returns: Any = None, deadline_s: float) -> list[Any]:
        """Call a method of all, and wait until all have ended it: one that fails does not cut the others short.

        Returns:
            For each, in order, its answer, or the OffbeatError that it raised.

        Raises:
            PeerFailedError: as `call`, and then it waits for no other.
        """

        async def end(actor: ActorHandle) -> Any:
            try:
                return await actor.call(method, *args, returns=returns, deadline_s=deadline_s)
            except PeerFailedError:
                raise
            except OffbeatError as error:
                return error

        return await self._unless_dead(map(end, self.actors))

    @property
    def dead(self) -> list[int]:
        """Return the places of those that have died."""
        return [place for place, actor in enumerate(self.actors) if not actor.alive]

    async def _unless_dead(self, calls: Iterable[Awaitable[Any]]) -> list[Any]:
        try:
            return await gather_or_cancel(calls)
        except PeerFailedError as error:
            # The first error may be of an actor that has only noticed the death of another.
            raise await self.death(error.log_tail) or error from error

    @contextlib.asynccontextmanager
    async def reporting_progress(self, notify: Callable[[str], None]) -> AsyncIterator[None]:
        """Pass on how far the work of the last is while the block lasts: its `beat` answers with a text then.

        The last: of the ranks of a pipeline it is the one that sees the loss.
        """
        asking = asyncio.create_task(self._ask_how_far(notify))
        try:
            yield
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ask_how_far(self, notify: Callable[[str], None]) -> None:
        while True:
            with contextlib.suppress(OffbeatError):  # its supervision, and the call itself, say what is wrong
                notify(await self.actors[-1].call("beat", returns=str, deadline_s=_PROGRESS_DEADLINE_S))
            await asyncio.sleep(_PROGRESS_EVERY_S)

    async def death(self, log_tail: str = "") -> PeerFailedError | None:
        """Return the first death of one, when there was one: the others may see it before the driver does.

        Args:
            log_tail: what is known of its last words.
        """
        await asyncio.wait(self._ends.values(), timeout=DEATH_SEEN_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
        return self.first_death(log_tail)

    def raise_if_dead(self) -> None:
        """Raise when one is gone.

        Raises:
            PeerFailedError: with the name of the one that died first.
        """
        if (death := self.first_death()) is not None:
            raise death

    def _watch(self, actor: ActorHandle) -> None:
        end = asyncio.create_task(wait_gone(actor, partial(actor.call, "beat"), self._silent_after_s))
        self._ends[actor.name] = end
        end.add_done_callback(partial(self._note_end, actor.name))

    def put(self, actors: Mapping[int, ActorHandle]) -> None:
        """Put actors in the places of others that have died, which are forgotten.

        Args:
            actors: by place.
        """
        gone = [self.actors[place].name for place in actors]
        self._gone = [name for name in self._gone if name not in gone]
        for name in gone:
            self._ends.pop(name).cancel()
        self.actors = tuple(actors.get(place, actor) for place, actor in enumerate(self.actors))
        for actor in actors.values():
            self._watch(actor)

    def _note_end(self, name: str, end: "asyncio.Task[str]") -> None:
        if self._ends.get(name) is end:  # else another has taken its place
            self._gone.append(name)

    def first_death(self, log_tail: str = "") -> PeerFailedError | None:
        """Return the first death that the driver has noticed."""
        if not self._gone:
            return None
        name = self._gone[0]
        return PeerFailedError(name, self._ends[name].result(), log_tail)

    async def destroy(self) -> None:
        """Kill all, and wait until none is left."""
        for each in self.actors:
            if each.alive:
                each.kill()
        await asyncio.gather(*self._ends.values())

    async def forget(self) -> None:
        """Watch over them no longer."""
        for end in self._ends.values():
            end.cancel()
        await asyncio.gather(*self._ends.values(), return_exceptions=True)


async def start_all(launcher: Launcher, specs: Sequence[RoleSpec]) -> list[ActorHandle]:
    """Start all at once, or none: when one fails, none is left, and their names are free again.

    Raises:
        OffbeatError: as `Launcher.start`.
    """
    started: list[ActorHandle] = []

    async def start(spec: RoleSpec) -> ActorHandle:
        actor = await launcher.start(spec)
        started.append(actor)  # noted here, as a gathering that fails returns nothing
        return actor

    try:
        return await gather_or_cancel([start(spec) for spec in specs])
    except BaseException:  # also where the caller is cancelled, which is no `Exception`
        for actor in started:
            actor.kill()
        await asyncio.gather(*(actor.wait_dead() for actor in started))
        raise


async def start_ranks(launcher: Launcher, spec: RoleSpec, places: Sequence[Any]) -> list[ActorHandle]:
    """Start all ranks of a role at once, or none, each named after its number; one that is stuck ends itself.

    Args:
        launcher: starts them.
        spec: of the first.
        places: for each rank its `offbeat_mesh.Rendezvous`, which it gets as `rendezvous`; empty for one rank alone.

    Raises:
        OffbeatError: as `Launcher.start`.
    """
    if not places:
        return [await launcher.start(spec)]
    return await start_all(launcher, [_spec_of_rank(spec, place) for place in places])


def _spec_of_rank(spec: RoleSpec, place: Any) -> RoleSpec:
    role, log_path = replace(spec.role, index=place.rank), spec.log_path
    return replace(
        spec,
        role=role,
        kwargs={**spec.kwargs, "rendezvous": place},
        # Ranks that train together end themselves where they are stuck; others are supervised.
        liveness_policy="abort" if spec.liveness_policy == "report" else spec.liveness_policy,
        log_path=log_path and log_path.with_name(f"{role}.log"),
    )


async def gather_or_cancel(work: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await all; on the first error cancel the rest, wait until they have ended, and raise it as it is."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:  # gather itself leaves the others running
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
