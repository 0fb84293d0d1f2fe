"""Memory that colocated roles give back between their turns: no more than must go."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from grpo_async_app._config.parking import PARKS_ALL, PARKS_NOTHING, PARKS_SOME, Parking
from grpo_async_app._config.sections import LEAST_THAT_FITS, GrpoConfig
from offbeat_core import installed_backends, load_backend
from offbeat_placement import FILLED_SHARE, MemoryEstimate, Placement
from offbeat_recipes import RunMemory
from offbeat_run import size_text

_PARKED: Final = (("nothing", "KV cache", "KV cache and weights"), ("nothing", "all but its weights", "all its memory"))
"""Memory that engines and the trainer put away at their sleep levels, in words."""


def choose_parking(
    config: GrpoConfig, memory: RunMemory | None, placement: Placement
) -> tuple[GrpoConfig, Parking, tuple[str, ...]]:
    """Settle `cluster.sleep_level` where it is left open: the least that makes room in each turn.

    Args:
        config: with all that memory depends on settled.
        memory: of one rank of each role; None where it cannot be estimated.
        placement: of all ranks.

    Returns:
        The configuration, what roles park, and that with its reason; none where roles do not take turns or it was asked
        for.
    """
    level = config.cluster.sleep_level
    if not config.cluster.colocate or level != LEAST_THAT_FITS:
        return config, Parking(engines=level, trainer=PARKS_ALL if level else PARKS_NOTHING), ()
    parking = _least(memory, placement, _engine_levels(config.rollout.backend))
    settled = replace(config, cluster=replace(config.cluster, sleep_level=parking.engines))
    of_engines, of_trainer = (words[at] for words, at in zip(_PARKED, (parking.engines, parking.trainer), strict=True))
    parked = f"engines park {of_engines}, the trainer {of_trainer}" if parking.engines else "nothing is parked"
    return settled, parking, (f"cluster.sleep_level = {parking.engines}: {parked} ({parking.why})",)


def with_parked(memory: RunMemory, parking: Parking, placement: Placement) -> RunMemory:
    """Return the memory with what the trainer parks in main memory, in the engines' turn, of its accelerators."""
    estimate, taken = memory.roles["trainer"], ("optimizer", "reference", "weights", "critic")
    names = taken[: (0, 2, 4)[parking.trainer]] if _turn_takers(placement) else ()
    parked = sum(estimate.parts.get(name, 0) for name in names if name not in estimate.main)
    if not parked or placement.is_on_cpu("trainer"):
        return memory
    trainer = replace(estimate, main={**estimate.main, "parked": parked})
    return replace(memory, roles={**memory.roles, "trainer": trainer})


def _engine_levels(backend: str) -> tuple[int, ...]:
    """Return the sleep levels of an engine that make sense, from the least on."""
    if backend not in installed_backends("offbeat.rollout"):
        return PARKS_NOTHING, PARKS_ALL
    keeps = getattr(load_backend("offbeat.rollout", backend), "parks_cache_alone", False)
    return (PARKS_NOTHING, PARKS_SOME, PARKS_ALL) if keeps else (PARKS_NOTHING, PARKS_ALL)


def _least(memory: RunMemory | None, placement: Placement, engine_levels: Sequence[int]) -> Parking:
    """Return the least that leaves room for the trainer in its turn, and for the engines in theirs."""
    if placement.is_on_cpu("trainer"):
        return Parking(why="trains on CPUs")
    total = placement.accelerator_bytes("trainer")
    if memory is None or not total:
        why = "it is not known what roles need" if total else "the memory of the devices is not known"
        return Parking(why=why)
    takers = _turn_takers(placement)

    def needed(roles: Collection[str], level: int) -> int:
        return held_bytes(memory, placement, dict.fromkeys(roles, level))

    def least(roles: Collection[str], levels: Sequence[int]) -> int:
        return next((level for level in levels if needed(roles, level) <= FILLED_SHARE * total), levels[-1])

    engines = least(takers, engine_levels)
    trainer = least(["trainer"], (PARKS_NOTHING, PARKS_SOME, PARKS_ALL))
    if not engines:
        together = size_text(needed(takers, PARKS_NOTHING))
        return Parking(
            engines=PARKS_NOTHING,
            trainer=PARKS_NOTHING,
            why=f"the roles of a device need {together} of its {size_text(total)} together",
        )
    in_turns = size_text(needed(takers, engines)), size_text(needed(["trainer"], trainer))
    why = (
        f"of {size_text(total)} a device then needs {in_turns[0]} in the trainer's turn, {in_turns[1]} in the engines'"
    )
    return Parking(engines=engines, trainer=trainer, why=why)


def held_bytes(memory: RunMemory, placement: Placement, asleep: Mapping[str, int]) -> int:
    """Return the bytes on the fullest of the trainer's devices, of all roles there.

    Args:
        memory: of one rank of each role.
        placement: of all ranks.
        asleep: sleep levels of roles that take turns; others have all their memory.
    """
    held: Counter[tuple[str, int]] = Counter()
    for rank in placement.plan.ranks:
        if rank.device is not None and rank.role in memory.roles:
            estimate = memory.roles[rank.role]
            held[rank.node, rank.device] += _kept_bytes(estimate, asleep.get(rank.role, PARKS_NOTHING))
    return max((held[device] for device in _trainer_devices(placement)), default=0)


def held_in_trainers_turn(memory: RunMemory, placement: Placement, sleep_level: int) -> int:
    """Return `held_bytes` while the trainer computes, and engines that take turns with it sleep at a level."""
    return held_bytes(memory, placement, dict.fromkeys(_turn_takers(placement), sleep_level))


def roles_awake(placement: Placement, sleep_level: int) -> list[str]:
    """Return the roles that hold memory of a trainer's device at that level, the trainer first."""
    devices = _trainer_devices(placement)
    roles = dict.fromkeys(rank.role for rank in placement.plan.ranks if (rank.node, rank.device) in devices)
    asleep = _turn_takers(placement) if sleep_level == PARKS_ALL else set[str]()
    return ["trainer", *(role for role in roles if role != "trainer" and role not in asleep)]


def _trainer_devices(placement: Placement) -> set[tuple[str, int]]:
    ranks = placement.plan.ranks
    return {(rank.node, rank.device) for rank in ranks if rank.role == "trainer" and rank.device is not None}


def _turn_takers(placement: Placement) -> set[str]:
    """Return the roles that sleep while the trainer computes, where they sleep at all."""
    return {group.role for group in placement.groups if group.shares_devices_with == "trainer"}


def _kept_bytes(estimate: MemoryEstimate, sleep_level: int) -> int:
    """Return the bytes that a role keeps at a sleep level; of a critic all, as its weights are not estimated apart."""
    weights = sum(estimate.parts.get(name, 0) for name in ("weights", "critic"))
    return (estimate.num_bytes, weights, 0)[sleep_level]
