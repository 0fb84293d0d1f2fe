"""Facts that conditions establish: which exclude one another, and which leave one process alone."""

import ast
from collections.abc import Iterator, Set
from typing import Final

from offbeat_hanglint._axes import words
from offbeat_hanglint._program.expressions import dotted

# Facts: there is no other process; the tensor is a sharded one.
ALONE: Final = "one process"
SHARDED: Final = "a sharded tensor"
# Beyond that many facts around one call no more are read: a function may have thousands of conditions.
MAX_KNOWN: Final = 8
_NOT: Final = "not "
_NEGATIVE: Final = {ast.NotEq: "==", ast.NotIn: "in", ast.IsNot: "is", ast.GtE: "<", ast.LtE: ">"}
_POSITIVE: Final = {ast.Eq: "==", ast.In: "in", ast.Is: "is", ast.Lt: "<", ast.Gt: ">"}
# Comparisons of the number of processes that hold for one process, and those that hold for several.
_ONE: Final = ((ast.Eq, 1), (ast.LtE, 1), (ast.Lt, 2))
_SEVERAL: Final = ((ast.NotEq, 1), (ast.Gt, 1), (ast.GtE, 2))
_NUMBER_OF_PROCESSES: Final = frozenset(("world_size", "get_world_size()", "_world_size", "num_processes"))
_SHARDED_TYPES: Final = ("DTensor", "ShardedTensor")
_SHARDED_ATTRIBUTES: Final = frozenset(("full_tensor", "redistribute", "placements", "device_mesh", "_local_tensor"))
# Words in names of objects that hold settings: the same wherever they are read.
_SETTINGS: Final = frozenset(
    ("args", "config", "cfg", "conf", "opt", "opts", "options", "settings", "hparams", "flags")
)


def plain_test(test: ast.expr) -> tuple[str, bool]:
    """Return a condition without its negations, and whether both hold together: `a != b` is `a == b`, and False."""
    is_true = True
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, is_true = test.operand, not is_true
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        kind, right = type(test.ops[0]), ast.unparse(test.comparators[0])
        if kind is ast.Gt and right == "0":  # of ranks and sizes: other than 0
            kind = ast.NotEq
        sign = _POSITIVE.get(kind) or _NEGATIVE[kind]
        return f"{ast.unparse(test.left)} {sign} {right}", is_true == (kind in _POSITIVE)
    return ast.unparse(test), is_true


def known_where(test: ast.expr, holds: bool = True) -> Iterator[str]:
    """Yield the facts that a condition establishes where it holds, or where it does not: `not args.pipe`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from known_where(test.operand, not holds)
    elif isinstance(test, ast.BoolOp):
        if isinstance(test.op, ast.And) == holds:
            for value in test.values:
                yield from known_where(value, holds)
    elif _is_alone(test, holds):
        yield ALONE
    elif isinstance(test, ast.Call):
        if holds and _asks_for_shards(test):
            yield SHARDED
    elif _is_setting(test.left if isinstance(test, ast.Compare) else test):
        text, is_true = plain_test(test)
        yield text if is_true == holds else f"{_NOT}{text}"


def exclude_one_another(known: Set[str]) -> bool:
    """Return True if one of the facts denies another."""
    return any(f"{_NOT}{each}" in known for each in known)


def seen_by_caller(known: Set[str], callee: str) -> frozenset[str]:
    """Return the facts about a function that hold for its caller too: of settings, and of an object that both share."""
    is_own = (
        callee.startswith(("self.", "super()."))
        and callee.removeprefix("super().").removeprefix("self.").isidentifier()
    )
    return frozenset(each for each in known if is_own or not each.removeprefix(_NOT).startswith("self."))


def _is_alone(test: ast.expr, holds: bool) -> bool:
    if not isinstance(test, ast.Compare) or not isinstance(test.comparators[0], ast.Constant):
        return False
    if isinstance(test.left, ast.Call) and (test.left.args or test.left.keywords):  # the size of a group
        return False
    is_number = dotted(test.left).rsplit(".", 1)[-1] in _NUMBER_OF_PROCESSES
    return is_number and (type(test.ops[0]), test.comparators[0].value) in (_ONE if holds else _SEVERAL)


def _asks_for_shards(test: ast.Call) -> bool:
    name = dotted(test.func)
    if len(test.args) != 2:
        return False
    if name == "hasattr":
        return isinstance(test.args[1], ast.Constant) and test.args[1].value in _SHARDED_ATTRIBUTES
    return name == "isinstance" and any(kind in ast.unparse(test.args[1]) for kind in _SHARDED_TYPES)


def _is_setting(node: ast.expr) -> bool:
    """Return True for an attribute of the function's own object or of settings, without any call."""
    text = dotted(node) if isinstance(node, ast.Attribute) else ""
    if not text or "(" in text or "[" in text:
        return False
    holders = text.split(".")[:-1]
    return holders[0] == "self" or any(_SETTINGS & set(words(holder)) for holder in holders)
