"""The faults of tests/e2e/faults: what each is an example of, and what the liveness monitor is to say of it.

The programs are plain torch, as somebody might have written them. In each, `# missing` marks the line at which the
guilty ranks are, and `# waits` the line at which the others wait for them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

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


@dataclass(frozen=True)
class Reason:
    """Why a verdict is a "proof", on which a job may be ended at once, or a "suspicion".

    A suspicion is only said, and acted upon at the timeout of what is waited in.
    """

    certainty: Literal["proof", "suspicion"]
    text: str


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One program that hangs or fails.

    Args:
        name: of its file.
        example_of: class of the known hangs (A to F), or what else it stands for.
        kinds: verdicts that are right.
        because: why it is a proof or a suspicion.
        guilty: ranks that the verdict may name as those to look at, by number of ranks.
        sizes: numbers of ranks it makes sense with.
        axes: mesh axes that the verdict must name, where the group is not the whole world.
        says: regular expressions that the verdict must hold: what a rank outside torch waits for, what hid an error.
        ends: how it ends where nobody ends it: "timeout" of a call of torch, "well", or "never".
    """

    name: str
    example_of: str
    kinds: tuple[str, ...]
    because: Reason
    guilty: Ranks = _first
    sizes: tuple[int, ...] = SIZES
    axes: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    ends: Literal["timeout", "well", "never"] = "timeout"

    @property
    def certainty(self) -> Literal["proof", "suspicion"]:
        """Whether it can be proven."""
        return self.because.certainty

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


# Each reason is one of the four proofs: dead, unlike calls, a cycle, left for good; or says what may happen yet.
DEAD = Reason("proof", "a member is dead")
OTHER_ROOT = Reason("proof", "members have named different roots for one collective")
OTHER_CALL = Reason("proof", "members have issued different operations as the same collective of one group")
OTHER_TENSORS = Reason(
    "proof", "members have issued different tensors for one collective; gloo ends those that received too much"
)
CYCLE_OF_COLLECTIVES = Reason("proof", "a cycle of collectives, each of which has been issued")
CYCLE = Reason("proof", "a cycle of waits, in which everybody was heard and stands")
LEFT = Reason("proof", "a member has left the world for good")
SLEEPS = Reason("suspicion", "the missing rank sleeps, and may come yet")
MAY_START = Reason("suspicion", "who is waited for was never heard of, and may start yet")
MOVES = Reason("suspicion", "the missing rank moves")
MAY_BE_CONTINUED = Reason("suspicion", "a stopped process can be continued")
HAS_DEADLINE = Reason("suspicion", "it leads into a declared wait whose deadline is not over")
NAMES_NOBODY = Reason("suspicion", "nobody is in a call that names whom it waits for")
ANOTHER_THREAD = Reason("suspicion", "another thread could still fill the queue")
MAY_ANSWER = Reason("suspicion", "a server may answer yet, also one whose main thread waits")

CATALOGUE: Final = (
    Fault(name="literal_source", example_of="A", kinds=("dead-peer",), because=DEAD, guilty=_upper_half),
    Fault(name="computed_source", example_of="A", kinds=("different-op",), because=OTHER_ROOT, guilty=_everybody),
    Fault(
        name="reduce_under_condition",
        example_of="B",
        kinds=("different-op",),
        because=OTHER_CALL,
        guilty=_all_but_first,
    ),
    Fault(name="early_return", example_of="B", kinds=("missing-member",), because=SLEEPS, says=(r"\bsleep",)),
    Fault(
        name="skipped_submodule",
        example_of="B",
        kinds=("shape-mismatch", "dead-peer"),
        because=OTHER_TENSORS,
        guilty=_everybody,
    ),
    Fault(name="detached_loss", example_of="B", kinds=("missing-member",), because=SLEEPS, says=(r"\bsleep",)),
    Fault(name="local_dict", example_of="B, C", kinds=("different-op",), because=OTHER_CALL, guilty=_all_but_first),
    Fault(name="uneven_loops", example_of="C", kinds=("different-op",), because=OTHER_CALL),
    Fault(name="swallowed_exception", example_of="C", kinds=("missing-member",), because=SLEEPS, says=(r"\bsleep",)),
    Fault(name="teardown_collective", example_of="C", kinds=("different-op",), because=OTHER_CALL),
    Fault(name="swapped_groups", example_of="D", kinds=("different-order",), because=CYCLE_OF_COLLECTIVES),
    Fault(
        name="unordered_buffers",
        example_of="D",
        kinds=("shape-mismatch", "dead-peer"),
        because=OTHER_TENSORS,
        guilty=_everybody,
    ),
    Fault(name="two_threads", example_of="D", kinds=("different-op",), because=OTHER_CALL),
    Fault(
        name="new_group_in_branch",
        example_of="D",
        kinds=("wait-cycle", "missing-member"),
        because=CYCLE,
        guilty=_everybody,
    ),
    Fault(name="ring_of_receives", example_of="D", kinds=("wait-cycle",), because=CYCLE, guilty=_everybody),
    Fault(
        name="different_shapes",
        example_of="E",
        kinds=("shape-mismatch", "dead-peer"),
        because=OTHER_TENSORS,
        guilty=_everybody,
    ),
    Fault(
        name="different_dtypes",
        example_of="E",
        kinds=("shape-mismatch", "dead-peer"),
        because=OTHER_TENSORS,
        guilty=_everybody,
    ),
    Fault(
        name="default_group", example_of="E", kinds=("missing-member", "wait-cycle"), because=CYCLE, guilty=_everybody
    ),
    Fault(
        name="rank_that_never_starts", example_of="E", kinds=("missing-member",), because=MAY_START, guilty=_next_rank
    ),
    Fault(name="checkpoint_exists", example_of="F", kinds=("dead-peer",), because=DEAD),
    Fault(name="rank0_evaluates", example_of="F", kinds=("different-op",), because=OTHER_CALL, guilty=_all_but_first),
    Fault(name="rank0_generates", example_of="F", kinds=("straggler",), because=MOVES, ends="well"),
    Fault(name="killed", example_of="dead rank", kinds=("dead-peer",), because=DEAD, guilty=_second),
    Fault(
        name="stopped",
        example_of="dead rank",
        kinds=("dead-peer", "missing-member"),
        because=MAY_BE_CONTINUED,
        guilty=_second,
        says=(r"\bstopped\b",),
    ),
    Fault(name="raises", example_of="dead rank", kinds=("dead-peer",), because=DEAD, guilty=_second),
    Fault(name="leaves", example_of="dead rank", kinds=("dead-peer",), because=DEAD, guilty=_second),
    Fault(name="left_for_good", example_of="dead rank", kinds=("dead-peer", "missing-member"), because=LEFT),
    Fault(
        name="left_before_new_group",
        example_of="dead rank",
        kinds=("dead-peer", "missing-member"),
        because=LEFT,
        sizes=(2, 4),
    ),
    Fault(
        name="destroy_hides_exception",
        example_of="dead rank",
        kinds=("dead-peer", "missing-member"),
        because=LEFT,
        sizes=(2, 4),
        says=(r"ValueError: loss is nan",),
    ),
    Fault(
        name="queue_never_filled",
        example_of="queue",
        kinds=("starved", "missing-member"),
        because=HAS_DEADLINE,
        says=(r"\bsleep",),
    ),
    Fault(
        name="queue_and_collective",
        example_of="queue",
        kinds=("wait-cycle",),
        because=HAS_DEADLINE,
        guilty=_everybody,
        says=(r"sample_queue\.get",),
    ),
    Fault(
        name="queues_only",
        example_of="queue",
        kinds=("standstill", "wait-cycle"),
        because=NAMES_NOBODY,
        guilty=_everybody,
        sizes=(2, 4),
        says=(r"\bqueue", r"\b[Ff]uture"),
        ends="never",
    ),
    Fault(
        name="thread_raises",
        example_of="thread",
        kinds=("standstill",),
        because=ANOTHER_THREAD,
        guilty=_everybody,
        sizes=(2, 4),
        says=(r"\bqueue", r"ValueError"),
        ends="never",
    ),
    Fault(
        name="thread_raises_on_one_rank",
        example_of="thread",
        kinds=("starved", "missing-member"),
        because=ANOTHER_THREAD,
        sizes=(2, 4),
        says=(r"\bqueue", r"ValueError"),
    ),
    Fault(
        name="background_thread_order",
        example_of="thread",
        kinds=("different-order",),
        because=CYCLE_OF_COLLECTIVES,
        guilty=_everybody,
        sizes=(2, 4),
    ),
    Fault(
        name="side_thread_hides_hang",
        example_of="thread",
        kinds=("missing-member",),
        because=SLEEPS,
        sizes=(2, 4),
        says=(r"\bsleep",),
    ),
    Fault(
        name="pair_of_receives",
        example_of="point to point",
        kinds=("wait-cycle",),
        because=CYCLE,
        guilty=_everybody,
        sizes=(2, 4),
    ),
    Fault(
        name="hung_pipeline",
        example_of="point to point",
        kinds=("missing-member",),
        because=SLEEPS,
        sizes=(2, 4),
        says=(r"\bsleep",),
    ),
    Fault(
        name="mismatched_new_group",
        example_of="rendezvous",
        kinds=("different-op", "wait-cycle"),
        because=CYCLE,
        guilty=_everybody,
        sizes=(2, 4),
    ),
    Fault(
        name="store_host_absent",
        example_of="rendezvous",
        kinds=("missing-member", "starved", "stuck-call"),
        because=MAY_START,
        guilty=_everybody,
        sizes=(2, 4),
        says=(r"127\.0\.0\.1:\d+",),
    ),
    Fault(
        name="store_too_few_workers",
        example_of="rendezvous",
        kinds=("missing-member", "starved"),
        because=MAY_START,
        guilty=_everybody,
        sizes=(2, 4),
        says=(r"TCPStore",),
    ),
    Fault(
        name="half_a_stateless_world",
        example_of="rendezvous",
        kinds=("starved", "missing-member"),
        because=MAY_START,
        sizes=(2, 4),
        says=(r"here/0",),
    ),
    Fault(
        name="engine_never_answers",
        example_of="HTTP",
        kinds=("missing-member", "starved"),
        because=MAY_ANSWER,
        sizes=(2, 4),
        says=(r"HTTP\D*127\.0\.0\.1:\d+",),
    ),
    Fault(
        name="http_cycle",
        example_of="HTTP",
        kinds=("wait-cycle", "missing-member", "starved"),
        because=MAY_ANSWER,
        guilty=_everybody,
        sizes=(2, 4),
        says=(r"127\.0\.0\.1:\d+",),
    ),
    Fault(
        name="incident_a_flushes",
        example_of="incident A",
        kinds=("different-op",),
        because=OTHER_CALL,
        guilty=_replica_others,
        axes=("tp",),
    ),
    Fault(name="incident_a_source", example_of="incident A", kinds=("dead-peer",), because=DEAD, guilty=_upper_half),
    Fault(
        name="incident_b",
        example_of="incident B",
        kinds=("different-order", "different-op", "missing-member"),
        because=CYCLE_OF_COLLECTIVES,
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
