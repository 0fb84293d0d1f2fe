"""Comparison of two members' collectives: are they the same? Pure."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Final, Literal

from offbeat_liveness._process.snapshot import Collective

# Operations whose inputs must be alike on all members, and those whose outputs must be; the rest may differ by rank.
# nccl gathers and scatters lists unevenly too; gloo does not.
LIKE_INPUTS: Final = frozenset(
    {"all_reduce", "allreduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather_base",
     "all_gather_into_tensor", "all_gather_single", "allgather_base", "reduce_scatter_base", "reduce_scatter_single",
     "reduce_scatter_tensor"}
)  # fmt: skip
LIKE_INPUTS_ON_GLOO: Final = frozenset({"all_gather", "allgather", "gather", "reduce_scatter"})
LIKE_OUTPUTS: Final = frozenset({"scatter"})
# Operations that copy bytes: the members may call these by different types, such as a view of uint8.
COPIES: Final = frozenset(
    {"all_gather", "all_gather_base", "all_gather_into_tensor", "all_gather_single", "allgather", "allgather_base",
     "broadcast", "gather", "scatter"}
)  # fmt: skip
BYTES: Final = {
    1: ("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e4m3fnuz", "Float8_e5m2", "Float8_e5m2fnuz", "Float8_e8m0fnu"),
    2: ("Half", "BFloat16", "Short", "UInt16"),
    4: ("Float", "Int", "UInt32", "ComplexHalf"),
    8: ("Double", "Long", "UInt64", "ComplexFloat"),
    16: ("ComplexDouble",),
}
BYTES_OF: Final = {kind: size for size, kinds in BYTES.items() for kind in kinds}


def difference(mine: Collective, theirs: Collective) -> Literal["other-op", "other-shape"] | None:
    if mine.op != theirs.op:
        return "other-op"
    alike = LIKE_INPUTS | LIKE_INPUTS_ON_GLOO if mine.backend == "gloo" else LIKE_INPUTS
    if mine.op in alike and _differ(mine.op, mine.inputs, theirs.inputs):
        return "other-shape"
    return "other-shape" if mine.op in LIKE_OUTPUTS and _differ(mine.op, mine.outputs, theirs.outputs) else None


def _differ(op: str, mine: Sequence[str], theirs: Sequence[str]) -> bool:
    """Return whether a backend cannot bring two lists of tensors together; a copy needs as many bytes, nothing more."""
    amounts, others = _amounts(mine), _amounts(theirs)
    are_of_one_type = [kind for kind, _ in amounts] == [kind for kind, _ in others]
    if are_of_one_type or op not in COPIES:
        return amounts != others
    if any(kind not in BYTES_OF for kind, _ in (*amounts, *others)):
        return False  # their sizes are unknown
    return _num_bytes(amounts) != _num_bytes(others)


def _num_bytes(amounts: Sequence[tuple[str, int]]) -> int:
    return sum(BYTES_OF[kind] * number for kind, number in amounts)


def _amounts(tensors: Sequence[str]) -> list[tuple[str, int]]:
    """Type and number of elements of each tensor: a backend compares no more, so [6] and [2, 3] get on."""
    return [_amount(each) for each in tensors]


@cache
def _amount(tensor: str) -> tuple[str, int]:
    kind, _, shape = tensor.partition("[")
    return kind, math.prod(int(size) for size in shape.rstrip("]").split(",") if size.strip())
