"""One function read in order: its collectives, the conditions and loops around each, and where it is left early."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from offbeat_hanglint._program.axes import UNKNOWN, Axes, words
from offbeat_hanglint._program.depend import LOCAL, Dependence, Depends, is_data_name, is_filled_name
from offbeat_hanglint._program.expressions import call_atom, dotted, group_text, parts, passed_call
from offbeat_hanglint._program.facts import CallFact, FileFact, FunctionFact, _groups_of
from offbeat_hanglint._program.program import Program, Target
from offbeat_hanglint._program.reach import Reach, Reached, is_module_call

MAX_EXPRESSION_DEPTH: Final = 40
# Names whose value is the same on all ranks, whatever they are read from.
_AGREED: Final = frozenset(("training", "dtype", "device", "ndim", "requires_grad", "world_size", "is_initialized", "is_available", "get_world_size"))
_TENSOR_TESTS: Final = frozenset(("all", "any", "item", "isnan", "isinf", "isfinite", "nonzero", "is_nonzero", "equal", "allclose", "tolist", "numel", "max", "min"))
_MODAL: Final = frozenset(("image", "images", "pixel", "video", "videos", "audio", "vision", "visual", "grid", "multimodal", "mm", "patches"))


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

    def chain(self) -> "Iterator[Guard]":
        """This one and those around it, innermost first."""
        guard: Guard | None = self
        while guard is not None:
            yield guard
            guard = guard.parent


@dataclass(eq=False)
class Event:
    """A call that is or reaches a collective."""

    node: ast.Call
    callee: str
    reached: tuple[Reached, ...]
    guard: Guard | None
    group: str = ""

    @property
    def is_direct(self) -> bool:
        """Whether the call is the collective itself."""
        return self.reached[0].through < 0

    @property
    def explicit(self) -> tuple[Reached, ...]:
        """What it reaches apart from what wrappers do inside."""
        return tuple(r for r in self.reached if r.is_explicit)

    def kinds(self) -> set[str]:
        """Names of the collectives it reaches, with gather and gather_object the same."""
        return {simple_kind(r.kind) for r in self.reached}

    def guards(self) -> Iterator[Guard]:
        """What is around it, innermost first."""
        if self.guard is not None:
            yield from self.guard.chain()


@dataclass(eq=False)
class Exit:
    """A return, raise, continue or break, and what decides about it."""

    node: ast.stmt
    guard: Guard | None
    loop: ast.AST | None


@dataclass(eq=False)
class FunctionView:
    """What a rule sees of one function."""

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
        """What a variable was last assigned above a place; of what is assigned later only, the first."""
        line = getattr(before, "lineno", 0)
        values = self.assigned.get(name, ())
        return next((v for v in reversed(values) if (v.end_lineno or v.lineno) < line), values[0] if values and values[0] is not before else None)

    def inside(self, node: ast.AST, side: str) -> list[Event]:
        """Events under a guard of this statement and kind."""
        return [e for e in self.events if any(g.node is node and g.kind == side for g in e.guards())]


def simple_kind(kind: str) -> str:
    """`all_gather_object` and `all_gather_into_tensor` meet `all_gather`."""
    for base in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "gather", "scatter", "barrier"):
        if kind.lstrip("_").startswith(base):
            return base
    return {"wait_for_everyone": "barrier", "monitored_barrier": "barrier"}.get(kind, kind)


class Walker:
    """Reads the statements of one function."""

    def __init__(self, view: FunctionView) -> None:
        self.view = view
        self.environment: dict[str, Depends] = {}
        self.agreed: set[str] = set()
        self.loop: ast.AST | None = None
        for name in view.fact.parameters:
            if is_data_name(name):
                self.environment[name] = {"data": name}

    def walk(self) -> FunctionView:
        """The view, filled."""
        self._block(self.view.node.body, None)
        return self.view

    # Statements

    def _block(self, body: list[ast.stmt], guard: Guard | None) -> None:
        for statement in body:
            first_exit = len(self.view.exits)
            self.view.statements.append((statement, guard))
            self._statement(statement, guard)
            for left in self.view.exits[first_exit:]:
                depends: Depends = {}
                membership = False
                leaves = True
                for around in left.guard.chain() if left.guard else ():
                    if around is guard:
                        break
                    if around.kind in ("if", "else", "except", "case"):
                        depends |= around.depends
                        membership |= around.is_membership
                    if around.kind == "try" and isinstance(left.node, ast.Raise):
                        leaves = False
                    if around.kind == "loop" and isinstance(left.node, ast.Break | ast.Continue) and around.node is left.loop:
                        leaves = False
                if depends and leaves:
                    guard = Guard("rest", statement, depends, guard, membership, left.node)

    def _statement(self, node: ast.stmt, guard: Guard | None) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return
        if isinstance(node, ast.If):
            self._if(node, guard)
        elif isinstance(node, ast.For | ast.AsyncFor):
            self._for(node, guard)
        elif isinstance(node, ast.While):
            self._expression(node.test, guard)
            around = Guard("loop", node, self.depends(node.test), guard)
            self._loop_body(node, around)
            self._block(node.orelse, guard)
        elif isinstance(node, ast.Try) or node.__class__.__name__ == "TryStar":
            self._try(node, guard)  # type: ignore[arg-type]
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self._expression(item.context_expr, guard)
            self._block(node.body, Guard("with", node, {}, guard))
        elif isinstance(node, ast.Match):
            self._expression(node.subject, guard)
            depends = self.depends(node.subject)
            for case in node.cases:
                self._block(case.body, Guard("case", node, depends, guard))
        else:
            self._simple(node, guard)

    def _simple(self, node: ast.stmt, guard: Guard | None) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, guard)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, guard)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, node.value, guard)
        elif isinstance(node, ast.AugAssign):
            name = dotted(node.target)
            self.environment[name] = self.environment.get(name, {}) | self.depends(node.value) | self._conditions(guard)
        elif isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break):
            self.view.exits.append(Exit(node, guard, self.loop))

    def _if(self, node: ast.If, guard: Guard | None) -> None:
        self._expression(node.test, guard)
        depends = self.depends(node.test)
        membership = is_membership(node.test)
        before = dict(self.environment)
        self._block(node.body, Guard("if", node, depends, guard, membership))
        after, self.environment = self.environment, dict(before)
        self._block(node.orelse, Guard("else", node, depends, guard, membership))
        for name, found in after.items():
            self.environment[name] = self.environment.get(name, {}) | found

    def _for(self, node: ast.For | ast.AsyncFor, guard: Guard | None) -> None:
        self._expression(node.iter, guard)
        depends = self.depends(node.iter)
        self.view.iterables[node] = depends
        for name in (n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)):
            self.environment[name] = {"data": name} if is_data_name(name) else {t: w for t, w in depends.items() if t == "data"}
        self._loop_body(node, Guard("loop", node, depends, guard))
        self._block(node.orelse, guard)

    def _loop_body(self, node: ast.For | ast.AsyncFor | ast.While, around: Guard) -> None:
        outer, self.loop = self.loop, node
        self._block(node.body, around)
        self.loop = outer

    def _try(self, node: ast.Try, guard: Guard | None) -> None:
        self._block(node.body, Guard("try", node, {}, guard) if node.handlers else guard)
        for handler in node.handlers:
            caught = dotted(handler.type) if handler.type is not None else "any exception"
            self._block(handler.body, Guard("except", handler, {"error": caught or "exceptions"}, guard))
        self._block(node.orelse, guard)
        self._block(node.finalbody, Guard("finally", node, {}, guard))

    def _assign(self, target: ast.expr, value: ast.expr, guard: Guard | None) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            same = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
            for index, element in enumerate(target.elts):
                self._assign(element, value.elts[index] if same else value, guard)  # type: ignore[attr-defined]
            return
        name = dotted(target)
        if not name:
            return
        if isinstance(target, ast.Name):
            self.view.assigned.setdefault(name, []).append(value)
        depends = self.depends(value) | self._conditions(guard)
        if not depends and (self._agrees(value) or (self.agreed and self.agreed & {n.id for n in ast.walk(value) if isinstance(n, ast.Name)})):
            self.agreed.add(name)
        else:
            self.agreed.discard(name)
        if isinstance(target, ast.Name) and not depends and is_data_name(name) and not isinstance(value, ast.Constant) and not self._agrees(value):
            depends = {"data": name}
        self.environment[name] = depends

    def _conditions(self, guard: Guard | None) -> Depends:
        """What decides whether an assignment happens: a value set on one rank only differs between ranks."""
        found: Depends = {}
        for around in guard.chain() if guard else ():
            if around.kind in ("if", "else") and not around.is_membership:
                found |= {tag: f"{why}, under which it is set" if "under which" not in why else why for tag, why in around.depends.items() if tag not in ("fill", "file")}
        return found

    # Expressions

    def _expression(self, node: ast.expr, guard: Guard | None) -> None:
        """Find the calls of an expression, with the conditions and loops within it."""
        stack: list[tuple[ast.expr, Guard | None]] = [(node, guard)]
        while stack:
            current, around = stack.pop()
            if isinstance(current, ast.Lambda):
                continue
            if isinstance(current, ast.IfExp):
                depends = self.depends(current.test)
                stack.append((current.test, around))
                stack.append((current.body, Guard("if", current, depends, around)))
                stack.append((current.orelse, Guard("else", current, depends, around)))
                continue
            if isinstance(current, ast.BoolOp):
                inner = around
                for value in current.values:
                    stack.append((value, inner))
                    depends = self.depends(value)
                    if depends:
                        inner = Guard("if", current, depends, inner)
                continue
            if isinstance(current, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
                first = current.generators[0]
                stack.append((first.iter, around))
                depends = self.depends(first.iter)
                self.view.iterables[current] = depends
                inner = Guard("loop", current, depends, around)
                made = (current.key, current.value) if isinstance(current, ast.DictComp) else (current.elt,)
                stack += [(part, inner) for part in made]
                stack += [(test, inner) for generator in current.generators for test in generator.ifs]
                continue
            if isinstance(current, ast.Call):
                self._call(current, around)
                inner_call = passed_call(current)
                if inner_call is not None:
                    self._call(inner_call, around)
            stack += [(child, around) for child in parts(current)]  # type: ignore[misc]

    def _call(self, node: ast.Call, guard: Guard | None) -> None:
        callee = dotted(node.func)
        self.view.calls.append((node, callee, guard))
        if not callee:
            return
        view, program = self.view, self.view.program
        fact = CallFact(callee, node.lineno, len(node.args), tuple(k.arg for k in node.keywords if k.arg), _groups_of(node), "")
        operation = program.operation(view.index, callee)
        if operation is not None:
            text = program.group_of(view.index, fact, operation)
            axes: Axes | str = program.resolve_group(view.index, text) if text else operation.axes
            if isinstance(axes, str):
                axes = UNKNOWN
            entry = Reached(operation.kind, axes, operation.is_explicit, operation.is_sure, node.lineno, -1, 0, "")
            view.events.append(Event(node, callee, (entry,), guard, text))
            if operation.is_explicit:
                self._agree(node, axes)
            return
        reached = self.reached_by(fact, program.targets(view.index, callee))
        if reached:
            view.events.append(Event(node, callee, reached, guard))
            return
        tables = program.libraries
        own = view.reach.of[view.index]
        forward = next((e for e in own.values() if e.kind == "forward" and e.through < 0), None)
        last = callee.rsplit(".", 1)[-1]
        if last in tables.backward:
            entry = Reached("backward", frozenset(("dp",)), False, False, node.lineno, -1, 0, "")
            view.events.append(Event(node, callee, (entry,), guard))
        elif forward is not None and is_forward(callee, view):
            entry = Reached("forward", frozenset(("dp",)), False, False, node.lineno, -1, 0, "")
            view.events.append(Event(node, callee, (entry,), guard))

    def reached_by(self, fact: CallFact, targets: tuple[Target, ...]) -> tuple[Reached, ...]:
        """What a call of these functions reaches, most certain first; groups that callers choose are resolved."""
        view = self.view
        found: dict[tuple[str, Axes], Reached] = {}
        for target in targets:
            for entry in view.reach.of[target.function].values():
                at_call = view.reach.at_call(view.index, fact, target.function, entry, target.is_sure)
                if at_call is None:
                    continue
                if isinstance(at_call.axes, str):
                    at_call = Reached(at_call.kind, UNKNOWN, at_call.is_explicit, at_call.is_sure, at_call.line, at_call.through, at_call.depth, at_call.gate)
                found.setdefault((at_call.kind, at_call.axes), at_call)  # type: ignore[arg-type]
        return tuple(sorted(found.values(), key=lambda r: (not r.is_explicit, not r.is_sure, r.depth)))

    def _agree(self, node: ast.Call, axes: Axes) -> None:
        """After a collective its tensors hold the same on all members of its group."""
        for argument in [*node.args[:2], *(k.value for k in node.keywords)]:
            name = dotted(argument).partition("[")[0]
            if name and name in self.environment:
                self.environment[name] = {} if "world" in axes or axes == UNKNOWN else {"beyond": ",".join(sorted(axes))}
            elif name:
                self.environment[name] = {}
            if name and not self.environment[name]:
                self.agreed.add(name)

    def _agrees(self, value: ast.expr) -> bool:
        """Whether a value is the result of a collective."""
        while isinstance(value, ast.Await | ast.Subscript | ast.Attribute):
            value = value.value
        if isinstance(value, ast.Call):
            event = next((e for e in reversed(self.view.events) if e.node is value), None)
            if event is not None and event.explicit:
                return True
            if isinstance(value.func, ast.Attribute):
                return self._agrees(value.func.value)
        return False

    def depends(self, node: ast.expr, depth: int = 0) -> Depends:
        """On what an expression's value depends, as far as ranks may differ in it."""
        if depth > MAX_EXPRESSION_DEPTH:
            return {}
        if isinstance(node, ast.Name | ast.Attribute):
            return self._name(node, depth)
        if isinstance(node, ast.Call):
            return self._called(node, depth)
        if isinstance(node, ast.Compare):
            return self._compare(node, depth)
        if isinstance(node, ast.Subscript):
            found = self.view.dependence.of_atom(self.view.index, dotted(node)) if dotted(node) else {}
            return found or self.depends(node.value, depth + 1)
        if isinstance(node, ast.Constant | ast.Lambda | ast.JoinedStr):
            return {}
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            return self.depends(node.generators[0].iter, depth + 1)
        found = {}
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                found |= self.depends(child, depth + 1)
        return found

    def _name(self, node: ast.Name | ast.Attribute, depth: int) -> Depends:
        text = dotted(node)
        last = node.attr if isinstance(node, ast.Attribute) else node.id
        if last in _AGREED or last.isupper():
            return {}
        if text in self.environment:
            return self.environment[text]
        found = self.view.dependence.of_atom(self.view.index, text) if text else {}
        if found:
            return found
        if isinstance(node, ast.Attribute):
            below = self.depends(node.value, depth + 1)
            if below:
                return {tag: why for tag, why in below.items() if tag in LOCAL}
            holder = dotted(node.value).rsplit(".", 1)[-1]
            if last in ("ready", "output", "pending") and is_filled_name(holder):
                return {"fill": text}
            return {"data": text} if is_data_name(last) and last in ("grad", "logits", "loss", "pixel_values") else {}
        return {"data": text} if is_data_name(last) else {}

    def _called(self, node: ast.Call, depth: int) -> Depends:
        name = dotted(node.func)
        last = name.rsplit(".", 1)[-1]
        if last in _AGREED or last in ("isinstance", "hasattr", "callable", "getattr", "issubclass", "type"):
            return {}
        event = next((e for e in reversed(self.view.events) if e.node is node), None)
        if event is not None and event.explicit:
            axes = event.explicit[0].axes
            if isinstance(axes, str) or "world" in axes or axes == UNKNOWN:
                return {}
            return {"beyond": ",".join(sorted(axes))}
        found = dict(self.view.dependence.of_atom(self.view.index, call_atom(node))) if name else {}
        if isinstance(node.func, ast.Attribute) and not found:
            found |= {t: w for t, w in self.depends(node.func.value, depth + 1).items()}
        for argument in [*node.args, *(k.value for k in node.keywords)]:
            found |= self.depends(argument, depth + 1)
        if not name:
            found |= self.depends(node.func, depth + 1)
        last = node.func.attr if isinstance(node.func, ast.Attribute) else last
        if not found and last in _TENSOR_TESTS and self._is_tensor_test(node, name):
            found = {"data": ast.unparse(node)[:60]}
        return found

    def _is_tensor_test(self, node: ast.Call, name: str) -> bool:
        """Whether a call asks something of a tensor that no collective made the same everywhere: `finished.all()`."""
        if not isinstance(node.func, ast.Attribute) or name.split(".")[0] in ("np", "numpy", "math", "args", "config"):
            return False
        return not self.agreed & {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}

    def _compare(self, node: ast.Compare, depth: int) -> Depends:
        found = self.depends(node.left, depth + 1)
        for right in node.comparators:
            found = found | self.depends(right, depth + 1)
        right = node.comparators[0]
        if isinstance(node.ops[0], ast.In | ast.NotIn) and not found:
            text = dotted(right)
            if any(is_filled_name(part) for part in text.removesuffix("()").split(".") if part != "self"):
                return {"fill": text}
        is_none = isinstance(right, ast.Constant) and right.value is None
        if is_none or (isinstance(right, ast.UnaryOp) and isinstance(right.op, ast.USub)) or (
            isinstance(node.ops[0], ast.GtE) and isinstance(right, ast.Constant) and right.value == 0
        ):
            text = dotted(node.left)
            kept = {t: w for t, w in found.items() if t in LOCAL or "under which it is set" in w}
            if is_none and "data" in kept and not _may_be_missing(text):
                kept.pop("data")
            return kept
        return found


def _may_be_missing(text: str) -> bool:
    """Whether a batch may lack what this name holds: images, gradients."""
    named = set(words(text.rsplit(".", 1)[-1]))
    return bool(named & _MODAL) or "grad" in named or ".get()" in text


def is_membership(test: ast.expr) -> bool:
    """Whether a condition asks if the rank is among given ones: then exactly the members of a group pass."""
    if isinstance(test, ast.UnaryOp):
        return is_membership(test.operand)
    if isinstance(test, ast.BoolOp):
        return any(is_membership(value) for value in test.values)
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.In | ast.NotIn)


def is_forward(callee: str, view: FunctionView) -> bool:
    """Whether a call looks like the forward pass of a module."""
    tables = view.program.libraries
    return not view.program.targets(view.index, callee) and is_module_call(callee, tables.implicit_calls, tables.implicit_methods)


def group_of_call(node: ast.Call) -> str:
    """Text of a call's `group=` argument, "" without one."""
    return next((group_text(k.value) for k in node.keywords if k.arg in ("group", "process_group")), "")
