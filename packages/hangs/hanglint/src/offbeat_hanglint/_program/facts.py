"""Facts kept of a file after it is read: functions, calls, classes, imports. Compact, without the syntax tree."""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from offbeat_hanglint._axes import words
from offbeat_hanglint._program.conditions import MAX_KNOWN, known_where
from offbeat_hanglint._program.expressions import (
    atoms,
    calls_in,
    comparisons_in,
    dotted,
    entered_calls,
    group_text,
    terminates,
    unpacked,
)

MAX_ATOMS: Final = 12
_GROUP_WORDS: Final = ("group", "mesh", "comm", "_pg", "pg_")


class Gate(NamedTuple):
    """Conditions for a statement to run: a parameter that must be true, and the facts that tests establish."""

    parameter: str = ""
    known: tuple[str, ...] = ()


OPEN: Final = Gate()


class CallFact(NamedTuple):
    """One call.

    Attributes:
        callee: as written, `self.engine.step`; "" never.
        keywords: names of the keyword arguments.
        groups: (position or keyword, text) of arguments that speak of a group, or pass on a parameter.
        gate: a parameter of the function that must be true for the call to run, "" if none.
        known: facts that the conditions around it establish, as `known_where` writes them.
        is_brief: True with `timeout=0`: the call returns at once.
    """

    callee: str
    line: int
    num_positional: int
    keywords: tuple[str, ...]
    groups: tuple[tuple[int | str, str], ...]
    gate: str
    known: tuple[str, ...] = ()
    is_brief: bool = False


@dataclass(slots=True)
class FunctionFact:
    """One function, method, nested function or the module's own statements ("<module>").

    Attributes:
        returns: atoms of its value.
        elements: the same for each value, where every return has as many; empty otherwise.
    """

    name: str
    qualified: str
    class_name: str
    line: int
    end_line: int
    parameters: tuple[str, ...]
    falsy: frozenset[str]
    parent: int
    is_async: bool
    decorators: tuple[str, ...]
    calls: list[CallFact] = field(default_factory=list)
    returns: tuple[str, ...] = ()
    elements: tuple[tuple[str, ...], ...] = ()
    groups: dict[str, str] = field(default_factory=dict)
    nested: dict[str, int] = field(default_factory=dict)
    raises: tuple[str, ...] = ()


@dataclass(slots=True)
class ClassFact:
    """One class. `attributes`: what `self.x` is made of; `types`: the class or call that `self.x` was made by."""

    name: str
    line: int
    bases: tuple[str, ...]
    decorators: tuple[str, ...]
    methods: dict[str, int] = field(default_factory=dict)
    attributes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class FileFact:
    """One file.

    Attributes:
        globals: what the module's variables are made of.
        set_later: attributes that something other than a constructor assigns.
        protected: calls in a `try` with a handler for an exception of the program's own, and that exception.
        group_ranks: names that are compared with a rank within a group.
        sets_timeouts: True if a socket gets a timeout here, or never blocks.
        sets_hooks: True if a function is set here that is called with exceptions, `sys.excepthook`.
    """

    path: str
    module: str
    num_lines: int
    imports: dict[str, str]
    functions: list[FunctionFact]
    classes: dict[str, ClassFact]
    globals: dict[str, tuple[str, ...]]
    set_later: frozenset[str] = frozenset()
    protected: dict[str, str] = field(default_factory=dict)
    group_ranks: set[str] = field(default_factory=set)
    sets_timeouts: bool = False
    sets_hooks: bool = False


def module_name(path: str) -> str:
    """`src/a/b/__init__.py` is `src.a.b`."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def extract(path: str, tree: ast.Module, num_lines: int) -> FileFact:
    """Return the facts of a parsed file. Recursion is bounded by the parser's own limit on nesting of statements."""
    fact = FileFact(path, module_name(path), num_lines, {}, [], {}, {})
    reader = _Reader(fact)
    module = FunctionFact("<module>", "<module>", "", 1, num_lines, (), frozenset(), -1, False, ())
    fact.functions.append(module)
    reader.block(tree.body, 0, "", OPEN, ())
    fact.set_later = frozenset(reader.set_later)
    return fact


class _Reader:
    def __init__(self, fact: FileFact) -> None:
        self.fact = fact
        self.package = fact.module if fact.path.endswith("__init__.py") else fact.module.rpartition(".")[0]
        self.set_later: set[str] = set()
        self.locals: dict[str, tuple[str, ...]] = {}
        self.mixed: set[int] = set()
        """Functions that return different numbers of values."""

    def block(self, body: list[ast.stmt], owner: int, class_name: str, gate: Gate, under: tuple[str, ...]) -> None:
        """Read statements of function `owner`; `under` are atoms of the conditions around them."""
        for statement in body:
            self.statement(statement, owner, class_name, gate, under)
            if isinstance(statement, ast.If) and not statement.orelse and terminates(statement.body):
                gate = self.gate_where(gate, statement.test, owner, holds=False)

    def statement(self, node: ast.stmt, owner: int, class_name: str, gate: Gate, under: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.function(node, owner, class_name)
        elif isinstance(node, ast.ClassDef):
            self.class_(node, owner)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self.import_(node)
        elif isinstance(node, ast.If):
            self.calls(node.test, owner, gate)
            self.compared(node.test)
            conditions = (under + tuple(self.local_atoms(node.test)))[:MAX_ATOMS]
            inside = self.gate_where(gate, node.test, owner, holds=True)
            self.block(node.body, owner, class_name, inside, conditions)
            self.block(node.orelse, owner, class_name, self.gate_where(gate, node.test, owner, holds=False), conditions)
            if any(isinstance(s, ast.Return) for s in node.body):
                self.made_of(node.test, owner)
        else:
            self.simple(node, owner, gate, under)
            if isinstance(node, ast.Try):
                self.protect(node)
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(node, name, None)
                if inner:
                    self.block(inner, owner, class_name, gate, under)
            for handler in getattr(node, "handlers", ()):
                self.block(handler.body, owner, class_name, gate, under)
            for case in getattr(node, "cases", ()):
                self.block(case.body, owner, class_name, gate, under)

    def simple(self, node: ast.stmt, owner: int, gate: Gate, under: tuple[str, ...]) -> None:
        """Calls of a statement's own expressions, and what it assigns or returns."""
        self.calls(node, owner, gate)
        for entered in entered_calls(node):
            self.calls(entered, owner, gate)
        if isinstance(node, ast.Assign):
            self.compared(node.value)
            for target in node.targets:
                self.assign(target, node.value, owner, under)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
            self.assign(node.target, node.value, owner, under)
        elif isinstance(node, ast.Return) and node.value is not None:
            self.returned(node.value, owner, under)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            function = self.fact.functions[owner]
            if len(function.raises) < 4:
                function.raises += (dotted(node.exc).removesuffix("()"),)

    def protect(self, node: ast.Try) -> None:
        own = [
            name
            for handler in node.handlers
            if (name := dotted(handler.type)) and not hasattr(builtins, name) and "." not in name
        ]
        if own:
            for call in (call for statement in node.body for call, _ in calls_in(statement)):
                self.fact.protected.setdefault(dotted(call.func), own[0])

    def compared(self, node: ast.expr) -> None:
        """Note names that are compared with a rank within a group: they hold such a rank, too."""
        for comparison in comparisons_in(node):
            sides = (comparison.left, comparison.comparators[0])
            for rank, other in (sides, sides[::-1]):
                if is_group_rank(rank) and isinstance(other, ast.Name | ast.Attribute):
                    self.fact.group_ranks.add(dotted(other).rsplit(".", 1)[-1])

    def gate_where(self, gate: Gate, test: ast.expr, owner: int, holds: bool) -> Gate:
        """Return the gate within another one, where a condition holds or does not."""
        is_negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        asked = test.operand if is_negated else test  # type: ignore[attr-defined]
        parameter = gate.parameter if is_negated == holds else self.gate_of(asked, owner) or gate.parameter
        known = (*gate.known, *known_where(test, holds))
        return Gate(parameter, tuple(dict.fromkeys(known))[:MAX_KNOWN])

    def gate_of(self, test: ast.expr, owner: int) -> str:
        """Return the parameter that must be true for a condition to hold, if it still has the caller's value."""
        if isinstance(test, ast.Name):
            is_given = test.id in self.fact.functions[owner].parameters and test.id not in self.locals
            return test.id if is_given else ""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return next((gate for value in test.values if (gate := self.gate_of(value, owner))), "")
        if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and isinstance(test.ops[0], ast.IsNot):
            return self.gate_of(test.left, owner)
        return ""

    def calls(self, node: ast.AST, owner: int, gate: Gate) -> None:
        function = self.fact.functions[owner]
        for child, tests in calls_in(node):
            callee = dotted(child.func)
            if not callee:
                continue
            self.fact.sets_timeouts |= sets_timeout(child, callee)
            keywords = tuple(k.arg for k in child.keywords if k.arg) if child.keywords else ()
            passed = (*groups_of(child), *self.passed_on(child, function))
            known = gate.known
            for test, holds in tests:
                known += tuple(known_where(test, holds))
            rest = (gate.parameter, known[:MAX_KNOWN])
            function.calls.append(
                CallFact(
                    callee, child.lineno, len(child.args), keywords, passed, *rest, is_brief=returns_at_once(child)
                )
            )
            if function.nested:
                for argument in child.args:
                    if isinstance(argument, ast.Name) and argument.id in function.nested:
                        function.calls.append(CallFact(argument.id, child.lineno, 0, (), (), *rest))

    def passed_on(self, call: ast.Call, function: FunctionFact) -> Iterator[tuple[int | str, str]]:
        """Arguments that are parameters of the function itself which may be left off, by position or keyword."""
        if function.falsy:
            given: list[tuple[int | str, ast.expr]] = list(enumerate(call.args[:8]))
            given += [(k.arg, k.value) for k in call.keywords if k.arg]
            for place, value in given:
                if isinstance(value, ast.Name) and value.id in function.falsy and value.id not in self.locals:
                    yield place, value.id

    def assign(self, target: ast.expr, value: ast.expr, owner: int, under: tuple[str, ...]) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for element, part in unpacked(target.elts, value):
                self.assign(element, part, owner, under)
            return
        text = dotted(target)
        if not text:
            return
        self.fact.sets_timeouts |= text.rsplit(".", 1)[-1].upper() == "RCVTIMEO"
        self.fact.sets_hooks |= text.endswith(".excepthook")
        function = self.fact.functions[owner]
        made_of = (tuple(self.local_atoms(value)) + under)[:MAX_ATOMS]
        if "." in text and function.name != "__init__":
            self.set_later.add(text.rsplit(".", 1)[-1])
        if text.startswith("self.") and text.count(".") == 1 and function.class_name in self.fact.classes:
            owner_class = self.fact.classes[function.class_name]
            name = text[5:]
            known = owner_class.attributes.get(name, ())
            owner_class.attributes[name] = tuple(dict.fromkeys(known + made_of))[:MAX_ATOMS]
            if isinstance(value, ast.Call):
                owner_class.types.setdefault(name, dotted(value.func))
            if any(word in name for word in _GROUP_WORDS):
                owner_class.groups.setdefault(name, group_text(value))
        elif isinstance(target, ast.Name):
            if owner == 0:
                known = self.fact.globals.get(text, ())
                self.fact.globals[text] = tuple(dict.fromkeys(known + made_of))[:MAX_ATOMS]
            else:
                self.locals[text] = tuple(dict.fromkeys(self.locals.get(text, ()) + made_of))[:MAX_ATOMS]
            if any(word in text for word in _GROUP_WORDS):
                function.groups.setdefault(text, group_text(value))

    def local_atoms(self, node: ast.expr) -> list[str]:
        """Atoms of a value, with local variables replaced by what they were made of."""
        found: list[str] = []
        for atom in atoms(node):
            found.append(atom)
            if atom in self.locals:
                found += self.locals[atom]
            if len(found) > MAX_ATOMS:
                break
        return found

    def returned(self, value: ast.expr, owner: int, under: tuple[str, ...]) -> None:
        self.returned_together(value, owner, under)
        if not isinstance(value, ast.Dict | ast.List | ast.JoinedStr):
            self.made_of(value, owner, under)

    def made_of(self, value: ast.expr, owner: int, under: tuple[str, ...] = ()) -> None:
        """Note an expression that a function's value depends on: a returned value, or a condition to return."""
        function = self.fact.functions[owner]
        made_of = (*self.local_atoms(value), *under)
        function.returns = tuple(dict.fromkeys(function.returns + made_of))[:MAX_ATOMS]

    def returned_together(self, value: ast.expr, owner: int, under: tuple[str, ...]) -> None:
        """Note the atoms of each of several returned values, as long as every return has as many."""
        function = self.fact.functions[owner]
        made_of = [(*self.local_atoms(each), *under) for each in value.elts] if isinstance(value, ast.Tuple) else []
        if not made_of or len(function.elements or made_of) != len(made_of):
            self.mixed.add(owner)
        before = function.elements or ((),) * len(made_of)
        function.elements = tuple(
            tuple(dict.fromkeys(old + new))[:MAX_ATOMS] for old, new in zip(before, made_of, strict=False)
        )
        if owner in self.mixed:
            function.elements = ()

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, owner: int, class_name: str) -> None:
        functions = self.fact.functions
        index = len(functions)
        for decorator in node.decorator_list:
            self.calls(decorator, owner, OPEN)
        arguments = node.args
        parameters = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if class_name:
            qualified = f"{class_name}.{node.name}"
            self.fact.classes[class_name].methods.setdefault(node.name, index)
        else:
            qualified = node.name if owner == 0 else f"{functions[owner].qualified}.{node.name}"
            functions[owner].nested.setdefault(node.name, index)
        functions.append(
            FunctionFact(
                node.name, qualified, class_name or functions[owner].class_name,
                node.lineno, node.end_lineno or node.lineno,
                tuple(parameters), _falsy(arguments), owner, isinstance(node, ast.AsyncFunctionDef),
                tuple(dotted(d).removesuffix("()") for d in node.decorator_list),
            )
        )  # fmt: skip
        outer, self.locals = self.locals, {}
        self.block(node.body, index, "", OPEN, ())
        self.locals = outer

    def class_(self, node: ast.ClassDef, owner: int) -> None:
        if node.name not in self.fact.classes:
            bases = tuple(text for base in node.bases if (text := dotted(base)))
            decorators = tuple(dotted(d).removesuffix("()") for d in node.decorator_list)
            self.fact.classes[node.name] = ClassFact(node.name, node.lineno, bases, decorators)
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                self.function(statement, owner, node.name)
            elif isinstance(statement, ast.If | ast.Try):
                self.block(statement.body, owner, node.name, OPEN, ())
            else:
                self.statement(statement, owner, node.name, OPEN, ())

    def import_(self, node: ast.Import | ast.ImportFrom) -> None:
        imports = self.fact.imports
        if isinstance(node, ast.Import):
            for alias in node.names:
                imports[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
            return
        base = node.module or ""
        if node.level:
            parts = self.package.split(".")
            kept = parts[: len(parts) - node.level + 1]
            base = ".".join([*kept, base] if base else kept)
        for alias in node.names:
            imports[alias.asname or alias.name] = f"{base}.{alias.name}"


def sets_timeout(call: ast.Call, callee: str) -> bool:
    """Return True if a call gives a socket a timeout, or makes it never block."""
    last = callee.rsplit(".", 1)[-1]
    if last in ("settimeout", "setblocking", "setdefaulttimeout"):
        return True
    return last in ("setsockopt", "set", "setsockopt_int") and any(
        "RCVTIMEO" in ast.unparse(each) for each in call.args[:1]
    )


def returns_at_once(call: ast.Call) -> bool:
    """Return True for `timeout=0`, which turns a wait into a look."""
    given = next((k.value for k in call.keywords if k.arg == "timeout"), None)
    return isinstance(given, ast.Constant) and type(given.value) in (int, float) and given.value == 0


def is_group_rank(node: ast.expr) -> bool:
    """Return whether an expression gives the caller's rank within a group: `dist.get_rank(group)`, `self.dp_rank`."""
    name = dotted(node).removesuffix("()").rsplit(".", 1)[-1]
    named = set(words(name))
    if "rank" not in named or named & {"size", "ranks", "lora", "global"}:
        return False
    if (
        isinstance(node, ast.Call)
        and (node.args or node.keywords)
        and name in ("get_rank", "get_local_rank", "get_group_rank")
    ):
        return True
    return bool(named & {"local", "group", "dp", "tp", "cp", "sp", "pp", "ep", "parallel"})


def groups_of(call: ast.Call) -> tuple[tuple[int | str, str], ...]:
    """Arguments of a call that speak of a group, by position or keyword."""
    found: list[tuple[int | str, str]] = []
    for position, argument in enumerate(call.args[:8]):
        if isinstance(argument, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            text = group_text(argument)
            if any(word in text for word in _GROUP_WORDS):
                found.append((position, text))
    named = [(k.arg, group_text(k.value)) for k in call.keywords if k.arg and is_group_word(k.arg)]
    return (*found, *named)


def is_group_word(keyword: str) -> bool:
    """Return whether an argument of this name is a group or a mesh."""
    return any(word in keyword for word in ("group", "mesh", "comm", "pg"))


def _falsy(arguments: ast.arguments) -> frozenset[str]:
    """Parameters whose default is None, False, 0 or empty."""
    plain = (*arguments.posonlyargs, *arguments.args)
    pairs = [
        *zip(reversed(plain), reversed(arguments.defaults), strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return frozenset(a.arg for a, default in pairs if isinstance(default, ast.Constant) and not default.value)
