"""The faults of tests/e2e/faults: what each is an example of, and what the liveness monitor is to say of it.

The programs are plain torch, as somebody might have written them. In each, `# missing` marks the line at which the
guilty ranks are, and `# waits` the line at which the others wait for them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from workspace import ROOT

FAULTS: Final = ROOT / "tests" / "e2e" / "faults"
SIZES: Final = (2, 4, 8)

Ranks = Callable[[int], set[int]]


def _first(size: int) -> set[int]:
    return {0}


def _second(size: int) -> set[int]:
    return {1}


def _everybody(size: int) -> set[int]:
    return set(range(size))


def _upper_half(size: int) -> set[int]:
    return set(range(size // 2, size))


def _lower_half(size: int) -> set[int]:
    return set(range(size // 2))


def _replica_leaders(size: int) -> set[int]:
    return set(range(0, size, max(2, size // 2)))


def _replica_others(size: int) -> set[int]:
    return _everybody(size) - _replica_leaders(size)


def _later_context(size: int) -> set[int]:
    """Ranks with cp 1 on the last stage of the pipeline: they never come to the reduction."""
    return {rank for rank in range(size) if rank % 2 == 1 and (size < 8 or rank >= size // 2)}


def _all_but_first(size: int) -> set[int]:
    return set(range(1, size))


def _next_rank(size: int) -> set[int]:
    return {size}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One program that hangs or fails.

    Args:
        name: of its file.
        example_of: class of the known hangs (A to F), or what else it stands for.
        kinds: verdicts that are right.
        guilty: ranks that the verdict may name as those to look at, by number of ranks.
        sizes: numbers of ranks it makes sense with.
        axes: mesh axes that the verdict must name, where the group is not the whole world.
    """

    name: str
    example_of: str
    kinds: tuple[str, ...]
    guilty: Ranks = _first
    sizes: tuple[int, ...] = SIZES
    axes: tuple[str, ...] = ()

    @property
    def script(self) -> Path:
        """The program."""
        return FAULTS / f"{self.name}.py"

    @property
    def title(self) -> str:
        """The first line of its docstring."""
        return self.script.read_text().partition('"""')[2].partition('"""')[0].strip()

    def lines(self, tag: str) -> set[int]:
        """Numbers of the lines with this mark."""
        numbered = enumerate(self.script.read_text().splitlines(), start=1)
        return {number for number, line in numbered if f"# {tag}" in line}


CATALOGUE: Final = (
    Fault(name="literal_source", example_of="A", kinds=("dead-peer",), guilty=_upper_half),
    Fault(name="computed_source", example_of="A", kinds=("different-op",), guilty=_everybody),
    Fault(name="reduce_under_condition", example_of="B", kinds=("different-op",), guilty=_all_but_first),
    Fault(name="early_return", example_of="B", kinds=("missing-member",)),
    Fault(name="skipped_submodule", example_of="B", kinds=("shape-mismatch", "dead-peer"), guilty=_everybody),
    Fault(name="detached_loss", example_of="B", kinds=("missing-member",)),
    Fault(name="local_dict", example_of="B, C", kinds=("different-op",), guilty=_all_but_first),
    Fault(name="uneven_loops", example_of="C", kinds=("different-op",)),
    Fault(name="swallowed_exception", example_of="C", kinds=("missing-member",)),
    Fault(name="teardown_collective", example_of="C", kinds=("different-op",)),
    Fault(name="swapped_groups", example_of="D", kinds=("different-order",)),
    Fault(name="unordered_buffers", example_of="D", kinds=("shape-mismatch", "dead-peer"), guilty=_everybody),
    Fault(name="two_threads", example_of="D", kinds=("different-op",)),
    Fault(name="new_group_in_branch", example_of="D", kinds=("wait-cycle", "missing-member"), guilty=_everybody),
    Fault(name="ring_of_receives", example_of="D", kinds=("wait-cycle",), guilty=_everybody),
    Fault(name="different_shapes", example_of="E", kinds=("shape-mismatch", "dead-peer"), guilty=_everybody),
    Fault(name="different_dtypes", example_of="E", kinds=("shape-mismatch", "dead-peer"), guilty=_everybody),
    Fault(name="default_group", example_of="E", kinds=("missing-member", "wait-cycle"), guilty=_everybody),
    Fault(name="rank_that_never_starts", example_of="E", kinds=("missing-member",), guilty=_next_rank),
    Fault(name="checkpoint_exists", example_of="F", kinds=("dead-peer",)),
    Fault(name="rank0_evaluates", example_of="F", kinds=("different-op",), guilty=_all_but_first),
    Fault(name="rank0_generates", example_of="F", kinds=("straggler",)),
    Fault(name="killed", example_of="dead rank", kinds=("dead-peer",), guilty=_second),
    Fault(name="stopped", example_of="dead rank", kinds=("dead-peer",), guilty=_second),
    Fault(name="raises", example_of="dead rank", kinds=("dead-peer",), guilty=_second),
    Fault(name="leaves", example_of="dead rank", kinds=("dead-peer",), guilty=_second),
    Fault(name="queue_never_filled", example_of="queue", kinds=("starved", "missing-member")),
    Fault(name="queue_and_collective", example_of="queue", kinds=("wait-cycle",), guilty=_everybody),
    Fault(
        name="incident_a_flushes",
        example_of="incident A",
        kinds=("different-op",),
        guilty=_replica_others,
        axes=("tp",),
    ),
    Fault(name="incident_a_source", example_of="incident A", kinds=("dead-peer",), guilty=_upper_half),
    Fault(
        name="incident_b",
        example_of="incident B",
        kinds=("different-order", "different-op", "missing-member"),
        guilty=_later_context,
        axes=("cp",),
    ),
)
"""Every fault; tests, the table in docs/liveness.md and its examples use these."""


CYCLES: Final = ("different-order", "wait-cycle")
"""Verdicts in which nobody alone is to blame."""


def named_ranks(verdict: dict[str, Any]) -> set[int]:
    """Ranks that a verdict names as missing."""
    return {int(name.removeprefix("rank ")) for name in verdict["missing"] if name.startswith("rank ")}


def named_axes(verdict: dict[str, Any]) -> set[str]:
    """Mesh axes of the groups that a verdict is about; torch calls dp and cp together "dp_cp"."""
    groups = [verdict["axes"], *(link["axes"] for link in verdict["links"])]
    return {axis for axes in groups for name in axes for axis in name.split("_")}


def ranks_at(verdict: dict[str, Any], fault: Fault, tag: str) -> set[int]:
    """Ranks that a verdict shows at the lines of a mark."""
    lines = fault.lines(tag)
    return {
        party["rank"]
        for party in verdict["parties"]
        if any(site["file"].endswith(fault.script.name) and site["line"] in lines for site in party["stack"])
    }
