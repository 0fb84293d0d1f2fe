"""Expressions as short texts: what is called, and which names a value comes from."""

import ast
from collections.abc import Iterator
from typing import Final

from offbeat_hanglint._axes import rank_axes

MAX_TEXT: Final = 120
# More tests than that around one call of an expression add no information.
MAX_TESTS: Final = 4
# Where an argument chooses whose rank is asked for: `dist.get_rank(group)`, `mesh.get_local_rank("tp")`.
_ASKS_FOR_RANK: Final = frozenset(
    ("get_rank", "get_local_rank", "get_group_rank", "get_coordinate", "rank", "getenv", "get")
)


def _expression_fields(class_: type[ast.AST]) -> tuple[str, ...]:
    if issubclass(class_, ast.stmt):
        blocks = (
            "body",
            "orelse",
            "finalbody",
            "handlers",
            "cases",
            "names",
            "decorator_list",
            "args",
            "bases",
            "keywords",
            "type_params",
        )
        return tuple(f for f in class_._fields if f not in blocks)
    if class_ in (ast.Name, ast.Constant) or not issubclass(
        class_, ast.expr | ast.keyword | ast.comprehension | ast.withitem
    ):
        return ()
    return class_._fields


class _Fields(dict[type[ast.AST], tuple[str, ...]]):
    """Fields of a kind of node that can hold expressions; looked up far more often than made."""

    def __missing__(self, class_: type[ast.AST]) -> tuple[str, ...]:
        self[class_] = _expression_fields(class_)
        return self[class_]


_FIELDS: Final = _Fields()


def parts(node: ast.AST) -> list[ast.AST]:
    """Return the expressions directly within an expression or a statement, without a statement's blocks."""
    found: list[ast.AST] = []
    for name in _FIELDS[node.__class__]:
        value = getattr(node, name, None)
        if value.__class__ is list:
            found += [v for v in value if isinstance(v, ast.AST)]
        elif isinstance(value, ast.AST):
            found.append(value)
    return found


def comparisons_in(node: ast.AST) -> list[ast.Compare]:
    """Comparisons of an assigned or tested expression, without those within calls."""
    found: list[ast.Compare] = []
    stack = [node]
    while stack:
        current = stack.pop()
        if isinstance(current, ast.Compare):
            found.append(current)
        elif isinstance(current, ast.BoolOp | ast.UnaryOp | ast.IfExp):
            stack += parts(current)
    return found


def asks_whether_known(node: ast.Compare) -> bool:
    """Return whether a comparison asks only if there is a value: `rank >= 0`, `rank != -1`, `rank is None`.

    Ranks of a distributed run all have one, so it says the same on each of them.
    """
    right = node.comparators[0]
    if isinstance(right, ast.UnaryOp) and isinstance(right.op, ast.USub):
        return True
    if not isinstance(right, ast.Constant):
        return False
    return right.value is None or (right.value == 0 and isinstance(node.ops[0], ast.GtE | ast.Lt))


def calls_in(node: ast.AST) -> list[tuple[ast.Call, tuple[tuple[ast.expr, bool], ...]]]:
    """Return every call within an expression, with the tests of `a if test else b` around it and their outcome."""
    found: list[tuple[ast.Call, tuple[tuple[ast.expr, bool], ...]]] = []
    sides: list[tuple[ast.AST, tuple[tuple[ast.expr, bool], ...]]] = [(node, ())]
    while sides:
        side, tests = sides.pop()
        stack = [side]
        while stack:
            current = stack.pop()
            class_ = current.__class__
            if class_ is ast.Call:
                found.append((current, tests))  # type: ignore[arg-type]
                inner = passed_call(current)  # type: ignore[arg-type]
                if inner is not None:
                    found.append((inner, tests))
            elif isinstance(current, ast.IfExp) and len(tests) < MAX_TESTS:
                stack.append(current.test)
                sides += [
                    (current.orelse, (*tests, (current.test, False))),
                    (current.body, (*tests, (current.test, True))),
                ]
                continue
            for name in _FIELDS[class_]:
                value = getattr(current, name, None)
                if value.__class__ is list:
                    stack += value
                elif isinstance(value, ast.AST):
                    stack.append(value)
    return found


def dotted(node: ast.expr | None) -> str:
    """`a.b().c` for names, attributes, calls and subscripts of constants; "" for anything else."""
    parts: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            parts.append("." + node.attr)
            node = node.value
        elif isinstance(node, ast.Name):
            parts.append(node.id)
            return "".join(reversed(parts))[:MAX_TEXT]
        elif isinstance(node, ast.Call):
            parts.append("()")
            node = node.func
        elif isinstance(node, ast.Subscript):
            parts.append(f"[{_constant(node.slice)}]")
            node = node.value
        elif isinstance(node, ast.Await):
            node = node.value
        else:
            return ""


def _constant(node: ast.expr) -> str:
    return str(node.value)[:40] if isinstance(node, ast.Constant) and isinstance(node.value, str | int) else ""


def group_text(node: ast.expr) -> str:
    """Text of an expression that gives a group, with a getter's options: `get_group(with_context_parallel=True)`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Call):
        options = ",".join([*(_text(a) for a in node.args), *(f"{k.arg}={_text(k.value)}" for k in node.keywords)])
        return f"{dotted(node.func)}({options})"[:MAX_TEXT]
    if isinstance(node, ast.IfExp):
        first = group_text(node.body)
        return first if first != "None" else group_text(node.orelse)
    if isinstance(node, ast.BoolOp):
        return group_text(node.values[-1])
    if isinstance(node, ast.List | ast.Tuple) and len(node.elts) == 1:
        return group_text(node.elts[0])
    return dotted(node)


def _text(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else dotted(node)


def atoms(node: ast.expr) -> Iterator[str]:
    """The names, attributes and calls that a value is made of, longest first: `int(self.mesh.get_rank("tp") == 0)`."""
    stack: list[ast.expr] = [node]
    while stack:
        current = stack.pop()
        if isinstance(current, ast.Name | ast.Attribute):
            text = dotted(current)
            if text:
                yield text
            elif isinstance(current, ast.Attribute):
                stack.append(current.value)
        elif isinstance(current, ast.Call):
            yield call_atom(current)
            if is_passing_on(current):
                stack += current.args
        elif isinstance(current, ast.Subscript):
            text = dotted(current)
            if text:
                yield text
            if not element_of_call(current):
                stack.append(current.value)
        elif isinstance(current, ast.Compare) and asks_whether_known(current):
            yield from (atom for atom in atoms(current.left) if not rank_axes(atom.rsplit(".", 1)[-1]))
        elif isinstance(current, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            continue
        else:
            stack += parts(current)  # type: ignore[arg-type]


# Calls that run a function which is given as an argument: how many arguments come before it.
_RUNS_ARGUMENT: Final = {
    "to_thread": 0,
    "run_in_executor": 1,
    "partial": 0,
    "run_sync": 0,
    "map_async": 0,
    "apply_async": 0,
}


def passed_call(node: ast.Call) -> ast.Call | None:
    """Return the call that `asyncio.to_thread(function, *arguments)` and its like make, as if written directly."""
    name = (
        node.func.attr
        if isinstance(node.func, ast.Attribute)
        else node.func.id
        if isinstance(node.func, ast.Name)
        else ""
    )
    place = _RUNS_ARGUMENT.get(name)
    if place is None or len(node.args) <= place or not isinstance(node.args[place], ast.Name | ast.Attribute):
        return None
    inner = ast.Call(func=node.args[place], args=node.args[place + 1 :], keywords=node.keywords)
    return ast.copy_location(inner, node)


_PASSES_ON: Final = frozenset(
    (
        "int",
        "bool",
        "str",
        "float",
        "max",
        "min",
        "any",
        "all",
        "abs",
        "tensor",
        "divmod",
        "tuple",
        "list",
        "getenv",
        "get",
        "index",
        "range",
        "sorted",
    )
)


def is_passing_on(node: ast.Call) -> bool:
    """Return whether a call's result reveals its arguments: `int(os.environ["RANK"])` does, a sampler does not."""
    name = (
        node.func.attr
        if isinstance(node.func, ast.Attribute)
        else node.func.id
        if isinstance(node.func, ast.Name)
        else ""
    )
    return name in _PASSES_ON


def element_of_call(node: ast.expr) -> bool:
    """Return True for one of the values that a call returns: `context()[1]`."""
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Call)
        and isinstance(node.slice, ast.Constant)
        and type(node.slice.value) is int
        and bool(dotted(node.value.func))
    )


def unpacked(targets: list[ast.expr], value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each target of `a, b = value` with what it gets: an entry of a tuple, `f()[0]` of a call, or the value."""
    is_starred = any(isinstance(target, ast.Starred) for target in targets)
    for index, target in enumerate(targets):
        if isinstance(value, ast.Tuple) and len(value.elts) == len(targets):
            yield target, value.elts[index]
        elif isinstance(value, ast.Call) and not is_starred:
            place = ast.copy_location(ast.Constant(index), value)
            yield target, ast.copy_location(ast.Subscript(value=value, slice=place, ctx=ast.Load()), value)
        else:
            yield target, value


def entered_calls(node: ast.stmt) -> list[ast.Call]:
    """Return the calls of `__enter__` and `__exit__` that a `with` statement makes on what it constructs."""
    found: list[ast.Call] = []
    for item in node.items if isinstance(node, ast.With | ast.AsyncWith) else ():
        if isinstance(item.context_expr, ast.Call):
            for name in ("__enter__", "__exit__"):
                function = ast.Attribute(value=item.context_expr.func, attr=name, ctx=ast.Load())
                found.append(ast.copy_location(ast.Call(func=function, args=[], keywords=[]), item.context_expr))
    return found


def call_atom(node: ast.Call) -> str:
    """`f()`, or `f(argument)` where the argument says whose rank is asked for."""
    name = dotted(node.func)
    last = name.rsplit(".", 1)[-1]
    if last not in _ASKS_FOR_RANK:
        return f"{name}()"
    arguments = [group_text(a) for a in node.args] + [group_text(k.value) for k in node.keywords]
    return f"{name}({arguments[0] if arguments else ''})"


def terminates(body: list[ast.stmt]) -> ast.stmt | None:
    """Return the statement that leaves the block at its end: return, raise, continue or break; else nothing."""
    if not body:
        return None
    last = body[-1]
    if isinstance(last, ast.Return | ast.Raise | ast.Continue | ast.Break):
        return last
    if isinstance(last, ast.If) and last.orelse:
        first = terminates(last.body)
        return first if first is not None and terminates(last.orelse) is not None else None
    if isinstance(last, ast.With | ast.AsyncWith):
        return terminates(last.body)
    return None
