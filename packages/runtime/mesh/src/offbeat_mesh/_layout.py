"""The arithmetic of axes: the place of each rank, and the ranks of each group. Pure: no torch, no processes.

The ranks of a run are one grid with the axes pp, dp, cp, tp. A second grid lies over the same ranks of each pipeline
stage: ep × edp = dp × cp × tp (expert parallel and its own data parallel), which is how mixture-of-experts layers are
spread. Both are ways of counting the same processes, so their axes differ in name and still meet.

Source: Megatron-LM, megatron/core/parallel_state.py, RankGenerator with its default order tp-cp-ep-dp-pp.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import Final

from offbeat_core import ConfigError

AXES: Final = ("dp", "cp", "tp", "pp", "ep", "edp")
"""Data, context, tensor, pipeline, expert, and expert-data parallel."""

GRID_AXES: Final = ("tp", "cp", "dp", "pp")
"""The axes that give a rank its number, the fastest first."""

EXPERT_AXES: Final = ("ep", "edp")
"""The second way of counting the ranks of one pipeline stage, the fastest first."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the axes, and from them the place of every rank.

    Args:
        dp, cp, tp, pp: size of each axis; their product is the number of ranks.
        ep: expert parallel size; divides dp·cp·tp.
        order: the grid's axes, fastest first; ep and edp number the ranks of a stage in rank order.

    Raises:
        ConfigError: a size below 1, an ep that does not divide, an order that is not one of the four axes.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    order: tuple[str, ...] = GRID_AXES

    def __post_init__(self) -> None:
        wrong = {axis: size for axis, size in self._given().items() if size < 1}
        if wrong:
            raise ConfigError(f"the size of an axis must be at least 1: got {wrong}; 1 means unused")
        if sorted(self.order) != sorted(GRID_AXES):
            raise ConfigError(f"order must name {', '.join(GRID_AXES)} once each, fastest first: got {self.order}")
        stage = self.dp * self.cp * self.tp
        if stage % self.ep:
            raise ConfigError(
                f"ep must divide dp·cp·tp = {self.dp}·{self.cp}·{self.tp} = {stage}: got ep={self.ep}; "
                f"choose one of {', '.join(str(n) for n in range(1, stage + 1) if stage % n == 0)}"
            )

    def _given(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in ("dp", "cp", "tp", "pp", "ep")}

    @property
    def size(self) -> int:
        """Return how many ranks."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def edp(self) -> int:
        """Copies of each expert within a pipeline stage."""
        return self.dp * self.cp * self.tp // self.ep

    @property
    def axes(self) -> dict[str, int]:
        """Size of each axis, in the order of `AXES`."""
        return {axis: getattr(self, axis) for axis in AXES}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of a rank along each of `AXES`.

        Raises:
            ConfigError: there is no such rank.
        """
        return dict(_all_coordinates(self)[self._checked(rank)])

    def rank_of(self, *, dp: int = 0, cp: int = 0, tp: int = 0, pp: int = 0) -> int:
        """Return the rank at a place of the grid.

        Raises:
            ConfigError: a place outside an axis.
        """
        place = {"dp": dp, "cp": cp, "tp": tp, "pp": pp}
        outside = {axis: index for axis, index in place.items() if not 0 <= index < getattr(self, axis)}
        if outside:
            raise ConfigError(f"a place must lie inside {self._given()}: got {outside}")
        strides = _strides(self)
        return sum(place[axis] * strides[axis] for axis in place)

    def members(self, axes: Iterable[str], rank: int) -> tuple[int, ...]:
        """Ranks reached from `rank` by moving along `axes` alone, in ascending order.

        Along axes of one grid these are the ranks that agree with `rank` on that grid's other axes. Axes of both
        grids together join whatever their moves connect. Either way the groups of a set of axes part the world.

        Raises:
            ConfigError: an unknown axis or rank.
        """
        wanted = self.ordered(axes)
        groups = _all_groups(self, wanted)
        return groups[self._checked(rank)]

    def groups(self, axes: Iterable[str]) -> list[tuple[int, ...]]:
        """Return all groups along `axes`, by their first rank."""
        return sorted(set(_all_groups(self, self.ordered(axes))))

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """`axes` in the order of `AXES`, without repeats.

        Raises:
            ConfigError: an axis that is none of `AXES`.
        """
        given = tuple(axes)
        unknown = sorted(set(given) - set(AXES))
        if unknown:
            raise ConfigError(f"a mesh has the axes {', '.join(AXES)}: got {', '.join(unknown)}; check the name")
        return tuple(axis for axis in AXES if axis in given)

    def label(self, rank: int) -> str:
        """Return a rank for people: "rank 3 (dp 1, tp 0)", with the grid's axes that are in use."""
        place = self.coordinates(rank)
        used = [f"{axis} {place[axis]}" for axis in AXES if getattr(self, axis) > 1 and axis not in EXPERT_AXES]
        return f"rank {rank} ({', '.join(used)})" if used else f"rank {rank}"

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise ConfigError(f"this layout has the ranks 0 to {self.size - 1}: got {rank}")
        return rank


def name_ranks(ranks: Sequence[int], limit: int = 8) -> str:
    """Global ranks for people; a long list is cut short."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= limit:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"ranks {', '.join(map(str, ranks[: limit - 1]))}, … {ranks[-1]} ({len(ranks)} in all)"


def describe_group(axes: Sequence[str], ranks: Sequence[int], channel: str = "") -> str:
    """Return a group for people: "dp×cp of ranks 0, 1, 2, 3"."""
    return f"{'×'.join(axes) or 'self'} of {name_ranks(ranks)}" + (f", channel {channel}" if channel else "")


def _strides(layout: Layout) -> dict[str, int]:
    """Return how far apart in rank number two neighbours along each axis of the grid are."""
    sizes = [getattr(layout, axis) for axis in layout.order]
    return {axis: prod(sizes[:i]) for i, axis in enumerate(layout.order)}


@cache
def _all_coordinates(layout: Layout) -> tuple[Mapping[str, int], ...]:
    """Coordinates of every rank."""
    places = list(_grid(layout))
    seen_in_stage: dict[int, int] = {}
    for place in places:  # in rank order, so that ep and edp count the ranks of a stage upwards
        number = seen_in_stage.get(place["pp"], 0)
        seen_in_stage[place["pp"]] = number + 1
        place["ep"], place["edp"] = number % layout.ep, number // layout.ep
    return tuple({axis: place[axis] for axis in AXES} for place in places)


def _grid(layout: Layout) -> Iterator[dict[str, int]]:
    """Grid coordinates in rank order."""
    slowest_first = layout.order[::-1]
    for place in product(*(range(getattr(layout, axis)) for axis in slowest_first)):
        yield dict(zip(slowest_first, place, strict=True))


@cache
def _all_groups(layout: Layout, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the group of each rank."""
    group_of: dict[int, tuple[int, ...]] = {rank: (rank,) for rank in range(layout.size)}
    for grid in (GRID_AXES, EXPERT_AXES):
        along = [axis for axis in axes if axis in grid]
        if along:
            _join(group_of, _agreeing(layout, grid, along))
    return tuple(group_of[rank] for rank in range(layout.size))


def _agreeing(layout: Layout, grid: tuple[str, ...], along: list[str]) -> list[list[int]]:
    """Sets of ranks that agree on the axes of `grid` (and on the stage) that are not in `along`."""
    fixed = [axis for axis in {*grid, "pp"} if axis not in along]
    sets: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(_all_coordinates(layout)):
        sets.setdefault(tuple(place[axis] for axis in fixed), []).append(rank)
    return list(sets.values())


def _join(group_of: dict[int, tuple[int, ...]], sets: list[list[int]]) -> None:
    """Merge the present groups wherever one of `sets` touches several."""
    for ranks in sets:
        merged = tuple(sorted({member for rank in ranks for member in group_of[rank]}))
        for member in merged:
            group_of[member] = merged
