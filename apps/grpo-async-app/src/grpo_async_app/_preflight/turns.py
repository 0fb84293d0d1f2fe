"""Memory that colocated roles give back between their turns: no more than must go."""

from collections import Counter
from dataclasses import replace
from typing import Final

from grpo_async_app._config.sections import LEAST_THAT_FITS, GrpoConfig
from offbeat_placement import FILLED_SHARE, MemoryEstimate, Placement
from offbeat_recipes import RunMemory
from offbeat_run import size_text

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
    needed = held_bytes(memory, placement, 0)
    level = 0 if needed <= FILLED_SHARE * total else GIVES_ALL
    return level, f"the roles of a device need {size_text(needed)} of its {size_text(total)} together"


def held_bytes(memory: RunMemory, placement: Placement, sleep_level: int) -> int:
    """Bytes on the fullest of the trainer's devices, of all roles there: those that take turns sleep at a level."""
    held: Counter[tuple[str, int]] = Counter()
    takers = _turn_takers(placement)
    for rank in placement.plan.ranks:
        if rank.device is not None and rank.role in memory.roles:
            estimate = memory.roles[rank.role]
            held[rank.node, rank.device] += _kept_bytes(estimate, sleep_level if rank.role in takers else 0)
    return max((held[device] for device in _trainer_devices(placement)), default=0)


def roles_awake(placement: Placement, sleep_level: int) -> list[str]:
    """Return the roles that hold memory of a trainer's device at that level, the trainer first."""
    devices = _trainer_devices(placement)
    roles = dict.fromkeys(rank.role for rank in placement.plan.ranks if (rank.node, rank.device) in devices)
    asleep = _turn_takers(placement) if sleep_level == GIVES_ALL else set[str]()
    return ["trainer", *(role for role in roles if role != "trainer" and role not in asleep)]


def _trainer_devices(placement: Placement) -> set[tuple[str, int]]:
    ranks = placement.plan.ranks
    return {(rank.node, rank.device) for rank in ranks if rank.role == "trainer" and rank.device is not None}


def _turn_takers(placement: Placement) -> set[str]:
    """Return the roles that sleep while the trainer computes, where they sleep at all."""
    return {group.role for group in placement.groups if group.shares_devices_with == "trainer"}


def _kept_bytes(estimate: MemoryEstimate, sleep_level: int) -> int:
    """Bytes that an engine keeps at a sleep level."""
    return (estimate.num_bytes, estimate.parts.get("weights", 0), 0)[sleep_level]
