"""Who is in a group, and what it is called."""

from collections.abc import Callable
from dataclasses import dataclass

from offbeat_mesh._layout import describe_group


@dataclass(frozen=True, kw_only=True)
class Membership:
    """One process's place in one group.

    Args:
        key: names the group alike on all members, and no other.
        axes: what it spans, in the mesh's order.
        ranks: global ranks of the members, in the group's order.
        rank: global rank of this process, one of them.
        channel: name of a second group over the same ranks; "" is the first.
        label: a global rank for people.
    """

    key: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    rank: int
    channel: str = ""
    label: Callable[[int], str] = "rank {}".format

    @property
    def text(self) -> str:
        """The group for people: "dp×cp of ranks 0, 1"."""
        return describe_group(self.axes, self.ranks, self.channel)
