"""Functions that reach a collective, over which axes, and through which calls."""

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from offbeat_hanglint._axes import UNKNOWN, WORLD, Axes, group_axes, words
from offbeat_hanglint._program.conditions import ALONE, exclude_one_another, seen_by_caller
from offbeat_hanglint._program.facts import CallFact
from offbeat_hanglint._program.program import Program

MAX_ENTRIES: Final = 10
MAX_DEPTH: Final = 8


@dataclass(frozen=True, slots=True)
class Reached:
    """One collective that a function reaches.

    Attributes:
        axes: which its group spans; the name of a parameter of the function where its caller chooses the group.
        line: of the call in this function that leads there; `through`: the function called, -1 for the collective.
        gate: a parameter that must be true for it to be reached, "" if none.
        known: facts that hold on every path to it, as `known_where` writes them.
    """

    kind: str
    axes: Axes | str
    is_explicit: bool
    is_sure: bool
    line: int
    through: int
    depth: int
    gate: str
    known: frozenset[str] = frozenset()


class Reach:
    """The collectives that each function of a program reaches: a least fixpoint over the call graph."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.of: list[dict[tuple[str, Axes | str], Reached]] = [{} for _ in program.functions]
        self.callers: dict[int, list[tuple[int, CallFact, bool]]] = {}
        self._seed()
        self._spread()

    def _seed(self) -> None:
        program = self.program
        tables = program.libraries
        for caller, function in enumerate(program.functions):
            for call in function.calls:
                if ALONE in call.known:
                    continue
                operation = program.operation(caller, call.callee)
                if operation is not None:
                    text = program.group_of(caller, call, operation)
                    axes: Axes | str = program.resolve_group(caller, text) if text else operation.axes
                    known = frozenset(call.known)
                    entry = Reached(
                        operation.kind,
                        axes,
                        operation.is_explicit,
                        operation.is_sure,
                        call.line,
                        -1,
                        0,
                        call.gate,
                        known,
                    )
                    before = self.of[caller].setdefault((operation.kind, axes), entry)
                    self.of[caller][operation.kind, axes] = replace(before, known=before.known & known)
                    continue
                targets = program.targets(caller, call.callee)
                for target in targets:
                    self.callers.setdefault(target.function, []).append((caller, call, target.is_sure))
                if not targets and is_module_call(call.callee, tables.implicit_calls, tables.implicit_methods):
                    entry = Reached("forward", frozenset(("dp",)), False, False, call.line, -1, 0, call.gate)
                    self.of[caller].setdefault(("forward", entry.axes), entry)

    def _spread(self) -> None:
        waiting = deque(f for f, entries in enumerate(self.of) if entries)
        queued = set(waiting)
        while waiting:
            function = waiting.popleft()
            queued.discard(function)
            for caller, call, is_sure in self.callers.get(function, ()):
                if self._take(caller, call, function, is_sure) and caller not in queued:
                    waiting.append(caller)
                    queued.add(caller)

    def _take(self, caller: int, call: CallFact, function: int, is_sure: bool) -> bool:
        """Add what `function` reaches to its caller. Return whether any of it is new."""
        own = self.of[caller]
        changed = False
        for entry in tuple(self.of[function].values()):
            reached = self.at_call(caller, call, function, entry, is_sure)
            if reached is None:
                continue
            key = (reached.kind, reached.axes)
            before = own.get(key)
            if before is None:
                if len(own) < MAX_ENTRIES and caller != function:
                    own[key] = reached
                    changed = True
                continue
            surest = reached if reached.is_sure and not before.is_sure else before
            merged = replace(surest, known=before.known & reached.known)
            if merged != before:
                own[key] = merged
                changed = True
        return changed

    def at_call(self, caller: int, call: CallFact, function: int, entry: Reached, is_sure: bool) -> Reached | None:
        """Return what one entry of a callee means at a call of it; nothing where the call does not open its gate."""
        if entry.depth >= MAX_DEPTH:
            return None
        callee = self.program.functions[function]
        known = seen_by_caller(entry.known, call.callee) | frozenset(call.known)
        if ALONE in call.known or exclude_one_another(known):
            return None
        if entry.gate and entry.gate in callee.falsy and not _is_given(call, callee.parameters, entry.gate):
            return None
        axes, sure = entry.axes, entry.is_sure and is_sure
        if isinstance(axes, str):
            text = _argument(call, callee.parameters, axes)
            if text is not None:
                axes = self.program.resolve_group(caller, text)
            else:
                named = group_axes(axes)
                is_default = named == UNKNOWN and axes in callee.falsy  # None, which means the default group
                axes, sure = (WORLD if is_default else named), sure and is_default
        gate = call.gate or self._passed_gate(caller, call, callee.parameters, entry.gate)
        return Reached(entry.kind, axes, entry.is_explicit, sure, call.line, function, entry.depth + 1, gate, known)

    def _passed_gate(self, caller: int, call: CallFact, parameters: tuple[str, ...], gate: str) -> str:
        """Return the caller's own parameter that is given for the gate of what it calls, "" if none is."""
        text = _argument(call, parameters, gate) if gate else None
        return text if text is not None and text in self.program.functions[caller].falsy else ""

    def functions_below(self, entry: Reached) -> list[int]:
        """Return the functions from the one that is called to the one that holds the collective."""
        if entry.through < 0:
            return []
        below = [e for e in self.of[entry.through].values() if e.kind == entry.kind]
        if not below:
            return [entry.through]
        chosen = min(below, key=lambda e: (e.axes != entry.axes, e.depth))
        return [function for function, _, _ in self.path(entry.through, chosen)]

    def path(self, function: int, entry: Reached) -> list[tuple[int, int, str]]:
        """(function, line, what is called there) from an entry of a function down to the collective."""
        steps: list[tuple[int, int, str]] = []
        while len(steps) <= MAX_DEPTH:
            if entry.through < 0:
                steps.append((function, entry.line, entry.kind))
                break
            steps.append((function, entry.line, self.program.functions[entry.through].qualified))
            below = [e for e in self.of[entry.through].values() if e.kind == entry.kind and e.depth < MAX_DEPTH]
            if not below:
                break
            following = min(below, key=lambda e: (e.axes != entry.axes, e.depth))
            if following.depth >= entry.depth and following.through == function:
                break
            function, entry = entry.through, following
        return steps


def is_module_call(callee: str, calls: frozenset[str], methods: frozenset[str]) -> bool:
    """Return whether a call looks like a module's forward pass: `self.actor_module(...)`, `model.generate(...)`."""
    if "unwrap" in callee or callee.endswith("()"):
        return False
    parts = callee.split(".")
    last = parts[-1]
    if last in methods and len(parts) > 1:
        last = parts[-2]
    elif len(parts) > 3 or (len(parts) > 1 and parts[0] not in ("self", "model", "module", "trainer", "args")):
        return False
    if last.endswith("]"):  # model_parts[0](...)
        return bool(set(words(last.partition("[")[0])) & calls)
    if not last.islower() or last.startswith(
        ("get", "build", "create", "load", "make", "init", "set", "is", "has", "prepare", "save", "_get", "wrap")
    ):
        return False
    named = words(last)
    return named != () and (named[-1] in calls or "expert" in named)


def _is_given(call: CallFact, parameters: tuple[str, ...], name: str) -> bool:
    if name in call.keywords:
        return True
    position = _position(call, parameters, name)
    return position is not None and position < call.num_positional


def _argument(call: CallFact, parameters: tuple[str, ...], name: str) -> str | None:
    position = _position(call, parameters, name)
    return next((text for place, text in call.groups if place in (name, position)), None)


def _position(call: CallFact, parameters: tuple[str, ...], name: str) -> int | None:
    if name not in parameters:
        return None
    is_method = parameters[0] in ("self", "cls")
    return parameters.index(name) - (1 if is_method else 0)
