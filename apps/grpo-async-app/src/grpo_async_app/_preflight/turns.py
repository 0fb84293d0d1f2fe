"""Memory that colocated roles give back between their turns: no more than must go."""

from collections import Counter
from dataclasses import replace
from typing import Final

from grpo_async_app._config.sections import LEAST_THAT_FITS, GrpoConfig
from offbeat_placement import Placement
from offbeat_recipes import RunMemory
from offbeat_run import size_text

FILLED_SHARE: Final = 0.85
"""Share of a device's memory up to which its roles stay where they are: estimates leave out the runtime's own memory,
workspaces and fragmentation."""
GIVES_ALL: Final = 2


def choose_sleep_level(
    config: GrpoConfig, memory: RunMemory | None, placement: Placement
) -> tuple[GrpoConfig, tuple[str, ...]]:
    """Settle `cluster.sleep_level` where it is left open.

    Args:
        config: with all that memory depends on settled.
        memory: of one rank of each role; None where it cannot be estimated.
        placement: of all ranks.

    Returns:
        The configuration, and the choice with its reason; none where roles do not take turns.
    """
    if not config.cluster.colocate or config.cluster.sleep_level != LEAST_THAT_FITS:
        return config, ()
    level, why = _least(memory, placement)
    settled = replace(config, cluster=replace(config.cluster, sleep_level=level))
    return settled, (f"cluster.sleep_level = {level} ({why})",)


def _least(memory: RunMemory | None, placement: Placement) -> tuple[int, str]:
    """Return a level and its reason: 0 where all roles of a device fit beside each other."""
    if placement.is_on_cpu("trainer"):
        return GIVES_ALL, "trains on CPUs"
    total = placement.accelerator_bytes("trainer")
    if memory is None or not total:
        return GIVES_ALL, "it is not known what roles need" if total else "the memory of the devices is not known"
    held: Counter[tuple[str, int]] = Counter()
    for rank in placement.plan.ranks:
        if rank.device is not None and rank.role in memory.roles:
            held[rank.node, rank.device] += memory.roles[rank.role].num_bytes
    needed = max(held.values(), default=0)
    level = 0 if needed <= FILLED_SHARE * total else GIVES_ALL
    return level, f"the roles of a device need {size_text(needed)} of its {size_text(total)} together"
