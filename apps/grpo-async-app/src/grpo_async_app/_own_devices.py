"""The accelerators of this machine that the roles of a run are given, where no cluster gives them out."""

from collections.abc import Iterator
from dataclasses import replace

from grpo_async_app._config import GrpoConfig
from offbeat_placement import Node
from offbeat_types import load_backend


def with_own_devices(node: Node, config: GrpoConfig) -> Node:
    """Add the accelerators of this machine that roles are set to, by kind as the device seam calls it.

    Those that a role names by their number are taken: nobody is given one of them.
    """
    wanted = {name.partition(":")[0] for name in config.devices.values()} - {"cpu"}
    if not wanted:
        return node
    here = _accelerators(wanted)
    named = set(_named(config))
    free = {kind: tuple(n for n in range(number) if (kind, n) not in named) for kind, number in here.items()}
    return replace(node, free=free, total=here)


def _accelerators(wanted: set[str]) -> dict[str, int]:
    """How many there are of each kind wanted. A kind that cannot be hidden from a process is there for all of them."""
    from offbeat_mesh import available_devices  # imports torch: only where accelerators may be wanted

    here = available_devices()
    if "auto" in wanted:
        wanted = {*wanted, next(iter(here))}
    return {
        kind: number
        for kind, number in here.items()
        if kind in wanted and load_backend("offbeat.device", kind).visible_variable
    }


def _named(config: GrpoConfig) -> Iterator[tuple[str, int]]:
    """Kind and number of each device that a role names; an engine takes as many from there on as it is wide."""
    widths = {"rollout.device": config.rollout.tensor_parallel, "teacher.device": config.teacher.tensor_parallel}
    for key, name in config.devices.items():
        kind, _, first = name.partition(":")
        if first.isdecimal():
            yield from ((kind, number) for number in range(int(first), int(first) + widths.get(key, 1)))
