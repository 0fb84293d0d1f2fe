"""The axis rule for collectives that others issue: torch's dispatcher shows us each one before it starts."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat_mesh._guard import check_guards
from offbeat_mesh._layout import name_ranks

NAMESPACES: Final = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
NOT_COLLECTIVE: Final = ("send", "recv_", "recv_any_source_", "isend", "irecv", "batch_p2p_ops")
"""Between two ranks: the axis rule is about all members of a group."""


class GuardedTorch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Checks every collective of this thread that goes through torch's dispatcher, whoever calls it.

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


@cache
def _group_argument(func: Any) -> tuple[int, str] | None:
    """Position and name of the group among the operator's arguments; None if it is no collective."""
    if func.namespace not in NAMESPACES or func._opname in NOT_COLLECTIVE:
        return None
    names = enumerate(argument.name for argument in func._schema.arguments)
    return next(((position, name) for position, name in names if name in ("process_group", "group_name")), None)


def _name(func: Any) -> str:
    """Such as "c10d.allreduce"."""
    return f"{func.namespace}.{func._opname.strip('_')}"


def _process_group(value: Any) -> dist.ProcessGroup:
    """The group behind an operator's argument: a boxed object, or its name."""
    if isinstance(value, str):
        return _resolve_process_group(GroupName(value))
    group: dist.ProcessGroup = value if isinstance(value, dist.ProcessGroup) else dist.ProcessGroup.unbox(value)
    return group
