"""A rule's view of one function: its collectives, the conditions and loops around each, and where it is left."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from offbeat_hanglint._program.conditions import MAX_KNOWN, known_where, plain_test
from offbeat_hanglint._program.depend import Dependence, Depends
from offbeat_hanglint._program.facts import FileFact, FunctionFact
from offbeat_hanglint._program.program import Program
from offbeat_hanglint._program.reach import Reach, Reached


@dataclass(eq=False)
class Guard:
    """One thing around a statement that decides whether or how often it runs.

    Attributes:
        kind: if, else, rest (what comes after an `if` that some leave in), loop, except, finally, try, with.
        node: the statement; `depends`: on what the decision depends.
        exit: for kind "rest", the statement by which others leave.
    """

    kind: str
    node: ast.AST
    depends: Depends
    parent: "Guard | None"
    is_membership: bool = False
    exit: ast.stmt | None = None
    known: tuple[str, ...] = field(init=False)
    """Facts that it and the conditions around it establish, as `known_where` writes them."""

    def __post_init__(self) -> None:
        """Add its own facts to those of the conditions around it."""
        self.known = self.parent.known if self.parent else ()
        test = getattr(self.node, "test", None)
        if test is not None and self.kind in ("if", "else") and len(self.known) < MAX_KNOWN:
            self.known += tuple(known_where(test, self.kind == "if"))

    def chain(self) -> "Iterator[Guard]":
        """It and those around it, innermost first."""
        guard: Guard | None = self
        while guard is not None:
            yield guard
            guard = guard.parent


@dataclass(eq=False)
class Event:
    """A call that is or reaches a collective.

    Attributes:
        ranks: list of ranks that the call passes for a new group; `ranks_depend`: its dependence.
    """

    node: ast.Call
    callee: str
    reached: tuple[Reached, ...]
    guard: Guard | None
    group: str = ""
    ranks: ast.expr | None = None
    ranks_depend: Depends = field(default_factory=dict)

    @property
    def is_direct(self) -> bool:
        """Return whether the call is the collective itself."""
        return self.reached[0].through < 0

    @property
    def explicit(self) -> tuple[Reached, ...]:
        """Return what it reaches apart from what wrappers do inside."""
        return tuple(r for r in self.reached if r.is_explicit)

    def kinds(self) -> set[str]:
        """Names of the collectives it reaches, with gather and gather_object the same."""
        return {simple_kind(r.kind) for r in self.reached}

    def guards(self) -> Iterator[Guard]:
        """Yield what is around it, innermost first."""
        if self.guard is not None:
            yield from self.guard.chain()


_OTHER_HALF: Final = {
    "__enter__": "__exit__",
    "__exit__": "__enter__",
    "__aenter__": "__aexit__",
    "__aexit__": "__aenter__",
}


@dataclass(eq=False)
class Exit:
    """A return, raise, continue or break, and what decides about it."""

    node: ast.stmt
    guard: Guard | None
    loop: ast.AST | None


@dataclass(eq=False)
class FunctionView:
    """A rule's view of one function."""

    program: Program
    reach: Reach
    dependence: Dependence
    file: FileFact
    index: int
    fact: FunctionFact
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
    events: list[Event] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    calls: list[tuple[ast.Call, str, Guard | None]] = field(default_factory=list)
    statements: list[tuple[ast.stmt, Guard | None]] = field(default_factory=list)
    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)
    iterables: dict[ast.AST, Depends] = field(default_factory=dict)

    def value_of(self, name: str, before: ast.AST) -> ast.expr | None:
        """Return what a variable was last assigned above a place; of what is assigned later only, the first."""
        line = getattr(before, "lineno", 0)
        values = self.assigned.get(name, ())
        return next(
            (v for v in reversed(values) if (v.end_lineno or v.lineno) < line),
            values[0] if values and values[0] is not before else None,
        )

    def other_half_calls(self, kind: str) -> bool:
        """Return whether this is one half of a context manager, and the other half reaches the same collective.

        Ranks that do not come to it on the way in then do on the way out, as a rule.
        """
        other = _OTHER_HALF.get(self.fact.name)
        if other is None or not self.fact.class_name:
            return False
        file_number = self.program.file_of[self.index]
        targets = self.program.find_method(file_number, self.fact.class_name, other)
        return any(
            simple_kind(entry.kind) == simple_kind(kind)
            for target in targets
            for entry in self.reach.of[target.function].values()
        )

    def inside(self, node: ast.AST, side: str) -> list[Event]:
        """Events under a guard of this statement and kind; "tried": in the `try` whose handler this is."""
        return self._under.get((node, side), [])

    @cached_property
    def kinds_where(self) -> dict[tuple[str, bool], set[str]]:
        """Collectives reached where a condition, as `normal_test` writes it, is true or is false."""
        found: dict[tuple[str, bool], set[str]] = {}
        tests: dict[Guard, tuple[str, bool]] = {}
        for event in self.events:
            for guard in event.guards():
                if guard.kind in ("if", "else"):
                    if guard not in tests:
                        tests[guard] = normal_test(guard)
                    found.setdefault(tests[guard], set()).update(event.kinds())
        return found

    @cached_property
    def _under(self) -> dict[tuple[ast.AST, str], list[Event]]:
        """Events by each statement around them and its side: looked up for every condition of a long function."""
        found: dict[tuple[ast.AST, str], list[Event]] = {}
        for event in self.events:
            around = [(guard.node, guard.kind) for guard in event.guards()]
            handlers = [(each, "tried") for node, side in around if side == "try" for each in node.handlers]  # type: ignore[attr-defined]
            for key in dict.fromkeys(around + handlers):
                found.setdefault(key, []).append(event)
        return found


def normal_test(guard: Guard) -> tuple[str, bool]:
    """Return a condition without its negations, and whether the guard is its true side."""
    test = getattr(guard.node, "test", None)
    side = guard.kind == "if"
    if test is None:
        return f"at {id(guard.node)}", side
    text, is_true = plain_test(test)
    return text, side == is_true


def simple_kind(kind: str) -> str:
    """`all_gather_object` and `all_gather_into_tensor` meet `all_gather`."""
    for base in (
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "all_reduce",
        "broadcast",
        "gather",
        "scatter",
        "barrier",
    ):
        if kind.lstrip("_").startswith(base):
            return base
    return {"wait_for_everyone": "barrier", "monitored_barrier": "barrier"}.get(kind, kind)


def is_membership(test: ast.expr) -> bool:
    """Return whether a condition asks if the rank is among given ones: then exactly the members of a group pass."""
    if isinstance(test, ast.UnaryOp):
        return is_membership(test.operand)
    if isinstance(test, ast.BoolOp):
        return any(is_membership(value) for value in test.values)
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.In | ast.NotIn)
