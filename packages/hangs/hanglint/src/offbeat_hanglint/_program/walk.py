"""Reads the statements of one function in order and fills its view."""

import ast
from dataclasses import replace
from typing import Final

from offbeat_hanglint._axes import UNKNOWN, WORLD, Axes, decorator_axes
from offbeat_hanglint._program.conditions import ALONE, MAX_KNOWN, known_where
from offbeat_hanglint._program.depend import Depends
from offbeat_hanglint._program.expressions import dotted, entered_calls, parts, passed_call, terminates
from offbeat_hanglint._program.facts import CallFact, groups_of
from offbeat_hanglint._program.program import Target
from offbeat_hanglint._program.reach import Reached, is_module_call
from offbeat_hanglint._program.values import Values
from offbeat_hanglint._program.view import Event, Exit, FunctionView, Guard, is_membership

_FILLS: Final = frozenset(("append", "extend", "add"))


class Walker:
    """Reads the statements of one function."""

    def __init__(self, view: FunctionView) -> None:
        self.view = view
        self.values = Values(view)
        self.loop: ast.AST | None = None
        self.left: tuple[str, ...] = ()
        """Facts established by exits above: `not args.pipe` after `if args.pipe: return`."""

    def walk(self) -> FunctionView:
        """Return the view, filled."""
        guard: Guard | None = None
        for decorator in self.view.fact.decorators:
            axes = decorator_axes(decorator)
            if axes:
                guard = Guard("if", self.view.node, dict.fromkeys(axes, f"@{decorator}"), guard)
        self._block(self.view.node.body, guard)
        return self.view

    # Statements

    def _block(self, body: list[ast.stmt], guard: Guard | None) -> None:
        outer = self.left
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
                    if (
                        around.kind == "loop"
                        and isinstance(left.node, ast.Break | ast.Continue)
                        and around.node is left.loop
                    ):
                        leaves = False
                if depends and leaves:
                    guard = Guard("rest", statement, depends, guard, membership, left.node)
            has_left = isinstance(statement, ast.If) and not statement.orelse and terminates(statement.body)
            if has_left and len(self.left) < MAX_KNOWN:
                self.left += tuple(known_where(statement.test, holds=False))  # type: ignore[attr-defined]
        self.left = outer

    def _statement(self, node: ast.stmt, guard: Guard | None) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return
        if isinstance(node, ast.If):
            self._if(node, guard)
        elif isinstance(node, ast.For | ast.AsyncFor):
            self._for(node, guard)
        elif isinstance(node, ast.While):
            self._expression(node.test, guard)
            around = Guard("loop", node, self.values.depends(node.test), guard)
            self._loop_body(node, around)
            self._block(node.orelse, guard)
        elif isinstance(node, ast.Try) or node.__class__.__name__ == "TryStar":
            self._try(node, guard)  # type: ignore[arg-type]
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self._expression(item.context_expr, guard)
            for entered in entered_calls(node):
                self._call(entered, guard)
            self._block(node.body, Guard("with", node, {}, guard))
        elif isinstance(node, ast.Match):
            self._expression(node.subject, guard)
            depends = self.values.depends(node.subject)
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
                self.values.assign(target, node.value, guard)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.values.assign(node.target, node.value, guard)
        elif isinstance(node, ast.AugAssign):
            self.values.add(node.target, node.value, guard)
        elif isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break):
            self.view.exits.append(Exit(node, guard, self.loop))

    def _if(self, node: ast.If, guard: Guard | None) -> None:
        self._expression(node.test, guard)
        depends = self.values.depends(node.test)
        membership = is_membership(node.test)
        before = dict(self.values.environment)
        self._block(node.body, Guard("if", node, depends, guard, membership))
        after, self.values.environment = self.values.environment, dict(before)
        self._block(node.orelse, Guard("else", node, depends, guard, membership))
        for name, found in after.items():
            self.values.environment[name] = self.values.environment.get(name, {}) | found

    def _for(self, node: ast.For | ast.AsyncFor, guard: Guard | None) -> None:
        self._expression(node.iter, guard)
        depends = self.values.depends(node.iter)
        self.view.iterables[node] = depends
        self.values.iterate(node.target, depends)
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

    # Expressions

    def _expression(self, node: ast.expr, guard: Guard | None) -> None:
        """Find the calls of an expression, with the conditions and loops within it."""
        stack: list[tuple[ast.expr, Guard | None]] = [(node, guard)]
        while stack:
            current, around = stack.pop()
            if isinstance(current, ast.Lambda):
                continue
            if isinstance(current, ast.IfExp):
                depends = self.values.depends(current.test)
                stack.append((current.test, around))
                stack.append((current.body, Guard("if", current, depends, around)))
                stack.append((current.orelse, Guard("else", current, depends, around)))
                continue
            if isinstance(current, ast.BoolOp):
                inner = around
                for value in current.values:
                    stack.append((value, inner))
                    depends = self.values.depends(value)
                    if depends:
                        inner = Guard("if", current, depends, inner)
                continue
            if isinstance(current, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
                first = current.generators[0]
                stack.append((first.iter, around))
                depends = self.values.depends(first.iter)
                self.view.iterables[current] = depends
                inner = Guard("loop", current, depends, around)
                made = (current.key, current.value) if isinstance(current, ast.DictComp) else (current.elt,)
                with self.values.inside(current, depends):
                    for part in (*made, *(test for generator in current.generators for test in generator.ifs)):
                        self._expression(part, inner)
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
        receiver, _, method = callee.rpartition(".")
        if method in _FILLS and receiver:
            self.values.fill(receiver, guard)
        view, program = self.view, self.view.program
        known = self.left + (guard.known if guard else ())
        if ALONE in known:
            return
        keywords = tuple(k.arg for k in node.keywords if k.arg)
        fact = CallFact(callee, node.lineno, len(node.args), keywords, groups_of(node), "", known)
        operation = program.operation(view.index, callee)
        if operation is not None:
            text = program.group_of(view.index, fact, operation)
            axes: Axes | str = program.resolve_group(view.index, text) if text else operation.axes
            if isinstance(axes, str):
                axes = UNKNOWN
            entry = Reached(operation.kind, axes, operation.is_explicit, operation.is_sure, node.lineno, -1, 0, "")
            ranks = _ranks_given(node, ("ranks",)) if operation.kind == "new_group" else None
            depends = self.values.depends(ranks) if ranks is not None else {}
            view.events.append(Event(node, callee, (entry,), guard, text, ranks, depends))
            if operation.is_explicit:
                self.values.agree(node, axes)
            return
        reached = self.reached_by(fact, program.targets(view.index, callee))
        if reached:
            ranks = _ranks_given(node, self._parameters(reached)) if _only_makes_a_group(reached) else None
            depends = self.values.depends(ranks) if ranks is not None else {}
            view.events.append(Event(node, callee, reached, guard, "", ranks, depends))
            return
        if method == "state_dict" and _gathers_state(guard):
            entry = Reached("state_dict", frozenset(("dp",)), True, True, node.lineno, -1, 0, "")
            view.events.append(Event(node, callee, (entry,), guard))
            return
        if self._is_iteration(node, callee):
            entry = Reached("DataLoader.__iter__", WORLD, False, False, node.lineno, -1, 0, "")
            view.events.append(Event(node, callee, (entry,), guard))
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

    def _parameters(self, reached: tuple[Reached, ...]) -> tuple[str, ...]:
        parameters = self.view.program.functions[reached[0].through].parameters
        return parameters[1:] if parameters[:1] in (("self",), ("cls",)) else parameters

    def _is_iteration(self, node: ast.Call, callee: str) -> bool:
        """Return whether a call starts the iteration of a DataLoader, which may broadcast a shared seed."""
        if callee == "super().__iter__":
            class_ = self.view.file.classes.get(self.view.fact.class_name)
            return class_ is not None and any("DataLoader" in base for base in class_.bases)
        return callee == "iter" and bool(node.args) and "loader" in dotted(node.args[0]).lower()

    def reached_by(self, fact: CallFact, targets: tuple[Target, ...]) -> tuple[Reached, ...]:
        """Return what a call of these functions reaches, most certain first.

        Groups that callers choose are resolved.
        """
        view = self.view
        found: dict[tuple[str, Axes], Reached] = {}
        for target in targets:
            for entry in view.reach.of[target.function].values():
                at_call = view.reach.at_call(view.index, fact, target.function, entry, target.is_sure)
                if at_call is None:
                    continue
                if isinstance(at_call.axes, str):
                    at_call = replace(at_call, axes=UNKNOWN)
                found.setdefault((at_call.kind, at_call.axes), at_call)  # type: ignore[arg-type]
        return tuple(sorted(found.values(), key=lambda r: (not r.is_explicit, not r.is_sure, r.depth)))


def _only_makes_a_group(reached: tuple[Reached, ...]) -> bool:
    """Return True for a plain wrapper of `new_group`: one that agrees on the ranks first reaches more collectives."""
    return all(each.kind == "new_group" and each.depth == 1 for each in reached)


def _ranks_given(node: ast.Call, parameters: tuple[str, ...]) -> ast.expr | None:
    """Return the list of ranks that a call passes for a new group."""
    named = next((k.value for k in node.keywords if k.arg == "ranks"), None)
    place = parameters.index("ranks") if "ranks" in parameters else len(node.args)
    if named is not None or place >= len(node.args) or any(isinstance(a, ast.Starred) for a in node.args):
        return named
    return node.args[place]


def _gathers_state(guard: Guard | None) -> bool:
    """Return whether a state dict is taken where FSDP gathers it from all ranks."""
    return any(
        isinstance(item.context_expr, ast.Call) and dotted(item.context_expr.func).endswith("state_dict_type")
        for around in (guard.chain() if guard else ())
        if isinstance(around.node, ast.With)
        for item in around.node.items
    )


def is_forward(callee: str, view: FunctionView) -> bool:
    """Return whether a call looks like the forward pass of a module."""
    tables = view.program.libraries
    return not view.program.targets(view.index, callee) and is_module_call(
        callee, tables.implicit_calls, tables.implicit_methods
    )
