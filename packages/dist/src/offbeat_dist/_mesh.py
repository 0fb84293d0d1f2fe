"""The mesh: named axes over the processes of a run, and the groups they form.

So far one process: every axis has size 1, and so has every group.
"""

from dataclasses import dataclass
from typing import Final

from offbeat_types import ConfigError

AXES: Final = ("dp", "cp", "tp", "pp", "ep")
"""Data, context, tensor, pipeline and expert parallel."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The processes that differ from this one only along `axes`.

    Args:
        axes: in the mesh's order, without repeats.
        size: how many processes.
        rank: this process among them: group-relative, never global.
    """

    axes: tuple[str, ...]
    size: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Processes arranged along the axes `AXES`.

    Args:
        dp, cp, tp, pp, ep: size of each axis; 1 each for now.

    Raises:
        ConfigError: an axis is larger than 1, or below 1.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        wrong = {axis: size for axis, size in self.axes.items() if size != 1}
        if wrong:
            raise ConfigError(
                f"offbeat-dist 0.1 runs a mesh of one process, so every axis must be 1: got {wrong}; "
                "leave them at 1 and run one trainer process"
            )

    @property
    def axes(self) -> dict[str, int]:
        """Size of each axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def size(self) -> int:
        """How many processes."""
        return self.dp * self.cp * self.tp * self.pp * self.ep

    @property
    def coordinates(self) -> dict[str, int]:
        """Place of this process along each axis."""
        return dict.fromkeys(AXES, 0)

    def group(self, *axes: str) -> Group:
        """The group of this process along `axes`; no axis at all gives the group of itself alone.

        Raises:
            ConfigError: an axis that the mesh does not have.
        """
        unknown = sorted(set(axes) - set(AXES))
        if unknown:
            raise ConfigError(f"a mesh has the axes {', '.join(AXES)}: got {', '.join(unknown)}; check the name")
        return Group(axes=tuple(axis for axis in AXES if axis in axes), size=1, rank=0)
