"""One call to many roles."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar, overload

from offbeat_actors._spec import ActorHandle
from offbeat_types import DeadlineError

T = TypeVar("T")

_LAST_ANSWERS_S: Final = 3.0
"""All calls have one deadline; how long to wait for each to say what its role is doing."""


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
        if (len(late) < 2 and len(roles) == 1) or not late:
            raise
        raise _name_all(method, late, len(roles), deadline_s) from error
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def _is_late(role: ActorHandle, method: str, call: "asyncio.Future[Any]") -> bool:
    """Whether the role itself did not answer; an answer may be a DeadlineError too, of a wait inside the role."""
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
