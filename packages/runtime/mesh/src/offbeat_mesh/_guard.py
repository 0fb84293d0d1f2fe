"""Guards: predicates over the mesh, and the rule that a collective obeys under them.

The axis rule: a collective over the axes A under a guard that depends on the axes C is safe only if A and C have no
axis in common. A guard is a pure function of a rank's coordinates, so here the rule is decided exactly, over the
members of the group: the call is safe if every member passes every open guard. That also holds for axes with different
names that count the same ranks (ep × edp and dp × cp × tp).
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, TypeAlias

import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat_core import ConfigError, GuardError
from offbeat_mesh._layout import Layout, name_ranks

Place: TypeAlias = int | str | Collection[int]
"""One index of an axis, "first" or "last", or several indices."""

NAMED_PLACES: Final = ("first", "last")


class Guard:
    """Condition on ranks: those at given places of given axes pass. `Mesh.where` makes it.

    As a bool: does this rank pass? As a context manager: while it is open in a thread, every collective of that thread
    must be over members that all pass, else `GuardError` at once, on every rank that comes to the call. That holds for
    offbeat's groups and for whatever calls torch.distributed below (FSDP, Megatron, your own code). Sends and receives
    between two ranks are left alone.

        with mesh.where(pp="last") as here:
            if here:
                mesh.group("dp", "cp").all_reduce(loss)

    Args:
        layout: of the mesh.
        rank: of this process.
        places: for each axis the places that pass.

    Raises:
        ConfigError: an unknown axis, a place outside it, or no place at all.
    """

    def __init__(self, layout: Layout, rank: int, places: Mapping[str, Place]) -> None:
        if not places:
            raise ConfigError("a guard needs an axis, such as where(pp='last'); without one every rank passes")
        self.layout, self.rank = layout, rank
        self.axes = layout.ordered(places)
        self._passing = {axis: _indices(layout, axis, places[axis]) for axis in self.axes}
        self._text = ", ".join(f"{axis}={_text(places[axis])}" for axis in self.axes)

    def passes(self, rank: int) -> bool:
        """Return whether a global rank passes."""
        place = self.layout.coordinates(rank)
        return all(place[axis] in passing for axis, passing in self._passing.items())

    def __bool__(self) -> bool:
        return self.passes(self.rank)

    def __repr__(self) -> str:
        return f"where({self._text})"

    def __enter__(self) -> bool:
        _open.push(self)
        return bool(self)

    def __exit__(self, *_: object) -> None:
        _open.pop(self)


def check_guards(call: str, group: str, ranks: Collection[int]) -> None:
    """Apply the axis rule to one call over a group of these global ranks."""
    for guard in _open.guards:
        outside = tuple(rank for rank in ranks if not guard.passes(rank))
        if outside and len(ranks) > 1:  # a rank alone in its group waits for no other
            raise GuardError(call, group, repr(guard), _differing(guard, ranks), outside)


def _differing(guard: Guard, ranks: Iterable[int]) -> tuple[str, ...]:
    """Axes of the guard along which the ranks differ."""
    places = [guard.layout.coordinates(rank) for rank in ranks]
    return tuple(axis for axis in guard.axes if len({place[axis] for place in places}) > 1)


def _indices(layout: Layout, axis: str, place: Place) -> frozenset[int]:
    size = layout.axes[axis]
    named = {"first": 0, "last": size - 1}
    if isinstance(place, str):
        chosen: Collection[int] = [named[place]] if place in named else []
    else:
        chosen = [place] if isinstance(place, int) else list(place)
    # A bool is an int to Python, and no index.
    if not chosen or any(isinstance(each, bool) or not isinstance(each, int) for each in chosen):
        raise ConfigError(f"{axis} takes an index, several, or one of {', '.join(NAMED_PLACES)}: got {place!r}")
    outside = sorted(each for each in chosen if not 0 <= each < size)
    if outside:
        raise ConfigError(f"{axis} has the places 0 to {size - 1}: got {', '.join(map(str, outside))}")
    return frozenset(chosen)


def _text(place: Place) -> str:
    return repr(place) if isinstance(place, int | str) else repr(tuple(place))


class _OpenGuards(threading.local):
    """The open guards of one thread, and the watch over torch's own calls while there are any."""

    def __init__(self) -> None:
        self.guards: list[Guard] = []
        self._watch: GuardedTorch | None = None

    def push(self, guard: Guard) -> None:
        # Once for all guards of a thread, and only while one is open: it slows every operator.
        if self._watch is None:
            self._watch = GuardedTorch()  # type: ignore[no-untyped-call]  # torch's
            self._watch.__enter__()  # type: ignore[no-untyped-call]  # torch's
        self.guards.append(guard)

    def pop(self, guard: Guard) -> None:
        assert self.guards[-1] is guard, "guards close in the order opposite to their opening"
        self.guards.pop()
        if not self.guards and self._watch is not None:
            self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
            self._watch = None


_open: Final = _OpenGuards()


NAMESPACES: Final = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
NOT_COLLECTIVE: Final = ("send", "recv_", "recv_any_source_", "isend", "irecv", "batch_p2p_ops")
"""Between two ranks: the axis rule is about all members of a group."""


class GuardedTorch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Checks every collective of this thread that goes through torch's dispatcher, whichever code calls it.

    It costs about 6 µs for each operator, collective or not, while a guard is open.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch.compile out of it: the default wraps our method with torch._dynamo, 6 s of imports."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Apply the axis rule, then let the operator run."""
        argument = _group_argument(func)
        if argument is not None:
            position, name = argument
            group = _process_group(args[position] if position < len(args) else (kwargs or {})[name])
            ranks = dist.get_process_group_ranks(group)
            check_guards(_name(func), f"{group.group_desc or group.group_name} of {name_ranks(ranks)}", ranks)
        return func(*args, **(kwargs or {}))


# Asked for every operator while a guard is open.
@cache
def _group_argument(func: Any) -> tuple[int, str] | None:
    """Position and name of the group among the operator's arguments; None if it is no collective."""
    if func.namespace not in NAMESPACES or func._opname in NOT_COLLECTIVE:
        return None
    names = enumerate(argument.name for argument in func._schema.arguments)  # c10d takes the group, the others its name
    return next(((position, name) for position, name in names if name in ("process_group", "group_name")), None)


def _name(func: Any) -> str:
    return f"{func.namespace}.{func._opname.strip('_')}"


def _process_group(value: Any) -> dist.ProcessGroup:
    """Return the group behind an operator's argument: a boxed object, or its name."""
    if isinstance(value, str):
        return _resolve_process_group(GroupName(value))
    group: dist.ProcessGroup = value if isinstance(value, dist.ProcessGroup) else dist.ProcessGroup.unbox(value)
    return group
