"""Random programs: valid syntax, no sense, and words that hanglint looks for.

A tree is grown and written out with `ast.unparse`, so that every form of the grammar of the running interpreter comes
up, alone and inside others.
"""

import ast
import random
import sys
from collections.abc import Callable, Sequence
from typing import Final

MODULES: Final = (
    "torch",
    "torch.distributed",
    "ray",
    "accelerate",
    "megatron.core",
    "queue",
    "threading",
    "asyncio",
    "os",
)
NAMES: Final = (
    *("dist", "torch", "rank", "local_rank", "world_size", "group", "model", "loader", "batch", "self", "cls", "mpu"),
    *("ray", "queue", "accelerator", "mesh", "tensor", "a", "b", "c", "f", "g", "h", "A", "B", "_", "__all__", "é"),
)
ATTRIBUTES: Final = (
    *(
        "all_reduce",
        "all_gather",
        "barrier",
        "broadcast",
        "new_group",
        "get_rank",
        "is_main_process",
        "rank",
        "get_group",
    ),
    *(
        "remote",
        "get",
        "wait",
        "put",
        "join",
        "forward",
        "backward",
        "step",
        "items",
        "values",
        "append",
        "group",
        "f",
        "g",
    ),
)
KEYWORDS: Final = ("group", "src", "dst", "timeout", "async_op", "ranks", "world_size", "rank", "target", "args", "key")
CONSTANTS: Final = (None, True, False, ..., 0, 1, -1, 10**40, 1.5, 2j, "", "nccl", "RANK", "é\n'\"", b"\x00\xff", "{x}")
OPERATORS: Final = (
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.MatMult,
    ast.Div,
    ast.Mod,
    ast.Pow,
    ast.LShift,
    ast.BitOr,
    ast.FloorDiv,
)
COMPARISONS: Final = (ast.Eq, ast.NotEq, ast.Lt, ast.GtE, ast.Is, ast.IsNot, ast.In, ast.NotIn)
HAS_TYPE_PARAMETERS: Final = sys.version_info >= (3, 12)


class ProgramMaker:
    """Grows one program after the other from a seed.

    Args:
        seed: the same one gives the same programs.
        depth: how deep statements and expressions may lie in each other.
    """

    def __init__(self, seed: int, depth: int = 5) -> None:
        self._random = random.Random(seed)
        self._depth = depth
        self._statements: list[Callable[[int], ast.stmt]] = [
            *[self._call_statement] * 6,
            *[self._if] * 4,
            *(self._for, self._while, self._with, self._try, self._match, self._assign, self._function, self._class),
            *(self._simple, self._simple, self._augment, self._annotate, self._import, self._raise, self._delete),
        ]
        self._expressions: list[Callable[[int], ast.expr]] = [
            *[self._call] * 6,
            *[self._attribute] * 3,
            *(self._compare, self._boolean, self._binary, self._unary, self._lambda, self._choice, self._walrus),
            *(
                self._dict,
                self._sequence,
                self._comprehension,
                self._await,
                self._formatted,
                self._subscript,
                self._yield,
            ),
        ]

    def modules(self, names: Sequence[str]) -> dict[str, str]:
        """Source by name of a file; the modules import each other."""
        return {name: self.source([other.removesuffix(".py") for other in names]) for name in names}

    def source(self, siblings: Sequence[str] = ()) -> str:
        """One module; statements that cannot be written as source are thrown away."""
        imports = [self._import_sibling(name) for name in siblings if self._chance(0.5)]
        return "\n".join([*imports, *(self._written() for _ in self._many(2, 7))])

    def _import_sibling(self, name: str) -> str:
        return f"from {self._pick(['', '.', '..'])}{name} import {self._pick(['*', 'f', 'A', 'f as g'])}"

    def _written(self) -> str:
        while True:
            tree = ast.Module(body=[self._statement(0)], type_ignores=[])
            try:
                source = ast.unparse(ast.fix_missing_locations(tree))
                ast.parse(source)
            except (ValueError, SyntaxError):  # such as a quote inside an f-string, before 3.12
                continue
            return source

    def _pick(self, choices: Sequence[object]) -> object:
        return self._random.choice(choices)

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _many(self, least: int, most: int) -> range:
        return range(self._random.randint(least, most))

    # Statements

    def _block(self, depth: int, most: int = 4) -> list[ast.stmt]:
        return [self._statement(depth) for _ in self._many(1, most)]

    def _statement(self, depth: int) -> ast.stmt:
        if depth >= self._depth:
            return self._simple(depth)
        return self._random.choice(self._statements)(depth + 1)

    def _simple(self, depth: int) -> ast.stmt:
        forms: list[Callable[[], ast.stmt]] = [
            ast.Pass,
            ast.Break,
            ast.Continue,
            lambda: ast.Return(value=self._expression(depth) if self._chance(0.7) else None),
            lambda: ast.Global(names=[self._name()]),
            lambda: ast.Nonlocal(names=[self._name()]),
            lambda: ast.Assert(test=self._expression(depth), msg=None),
        ]
        return self._random.choice(forms)()

    def _call_statement(self, depth: int) -> ast.stmt:
        return ast.Expr(value=self._call(depth))

    def _if(self, depth: int) -> ast.stmt:
        return ast.If(test=self._expression(depth), body=self._block(depth), orelse=self._else(depth))

    def _else(self, depth: int) -> list[ast.stmt]:
        return self._block(depth) if self._chance(0.3) else []

    def _for(self, depth: int) -> ast.stmt:
        kind = ast.AsyncFor if self._chance(0.2) else ast.For
        parts = {"target": self._target(depth), "iter": self._expression(depth), "body": self._block(depth)}
        return kind(**parts, orelse=self._else(depth))

    def _while(self, depth: int) -> ast.stmt:
        return ast.While(test=self._expression(depth), body=self._block(depth), orelse=self._else(depth))

    def _with(self, depth: int) -> ast.stmt:
        items = [
            ast.withitem(
                context_expr=self._expression(depth), optional_vars=self._target(depth) if self._chance(0.5) else None
            )
            for _ in self._many(1, 2)
        ]
        return (ast.AsyncWith if self._chance(0.2) else ast.With)(items=items, body=self._block(depth))

    def _try(self, depth: int) -> ast.stmt:
        is_star = self._chance(0.2)
        handlers = [
            ast.ExceptHandler(
                type=self._expression(depth) if is_star or self._chance(0.8) else None,
                name=None,
                body=self._block(depth),
            )
            for _ in self._many(0, 2)
        ]
        handlers.sort(key=lambda handler: handler.type is None)  # `except:` comes last, and once
        handlers = [each for number, each in enumerate(handlers) if each.type or number == len(handlers) - 1]
        end = self._block(depth) if not handlers or self._chance(0.4) else []
        parts = {"body": self._block(depth), "handlers": handlers, "finalbody": end}
        return (ast.TryStar if is_star and handlers else ast.Try)(**parts, orelse=self._else(depth) if handlers else [])

    def _match(self, depth: int) -> ast.stmt:
        cases = [
            ast.match_case(
                pattern=self._pattern(depth),
                guard=self._expression(depth) if self._chance(0.3) else None,
                body=self._block(depth),
            )
            for _ in self._many(1, 3)
        ]
        return ast.Match(subject=self._expression(depth), cases=cases)

    def _pattern(self, depth: int) -> ast.pattern:
        if depth >= self._depth:
            return ast.MatchAs(pattern=None, name=self._name())
        parts = [self._pattern(depth + 1) for _ in self._many(1, 2)]
        name = ast.Attribute(value=self._load(), attr=str(self._pick(ATTRIBUTES)), ctx=ast.Load())
        forms: list[Callable[[], ast.pattern]] = [
            lambda: ast.MatchValue(value=name),
            lambda: ast.MatchSingleton(value=self._random.choice([None, True, False])),
            lambda: ast.MatchSequence(patterns=[*parts, ast.MatchStar(name=self._name())]),
            lambda: ast.MatchMapping(keys=[name], patterns=parts[:1], rest=self._name()),
            lambda: ast.MatchClass(cls=name, patterns=parts, kwd_attrs=["a"], kwd_patterns=parts[:1]),
            lambda: ast.MatchAs(pattern=parts[0], name=self._name()),
            lambda: ast.MatchOr(patterns=[*parts, *parts]),
        ]
        return self._random.choice(forms)()

    def _assign(self, depth: int) -> ast.stmt:
        return ast.Assign(targets=[self._target(depth) for _ in self._many(1, 2)], value=self._expression(depth))

    def _augment(self, depth: int) -> ast.stmt:
        target = self._random.choice([self._store(), self._attribute(depth, ast.Store())])
        return ast.AugAssign(target=target, op=self._random.choice(OPERATORS)(), value=self._expression(depth))

    def _annotate(self, depth: int) -> ast.stmt:
        if HAS_TYPE_PARAMETERS and self._chance(0.3):
            return ast.TypeAlias(name=self._store(), type_params=self._type_parameters(), value=self._expression(depth))
        value = self._expression(depth) if self._chance(0.5) else None
        return ast.AnnAssign(target=self._store(), annotation=self._expression(depth), value=value, simple=1)

    def _import(self, depth: int) -> ast.stmt:
        alias = ast.alias(name=str(self._pick(MODULES)), asname=self._name() if self._chance(0.5) else None)
        if self._chance(0.5):
            return ast.Import(names=[alias])
        taken = ast.alias(name=str(self._pick(ATTRIBUTES)), asname=alias.asname)
        return ast.ImportFrom(module=alias.name, names=[taken], level=self._random.choice([0, 0, 0, 1, 3]))

    def _raise(self, depth: int) -> ast.stmt:
        error = self._expression(depth) if self._chance(0.8) else None
        return ast.Raise(exc=error, cause=self._expression(depth) if error and self._chance(0.3) else None)

    def _delete(self, depth: int) -> ast.stmt:
        return ast.Delete(targets=[self._random.choice([self._store(), self._attribute(depth, ast.Del())])])

    def _function(self, depth: int) -> ast.stmt:
        parts = {
            "name": self._name(),
            "args": self._arguments(depth),
            "body": self._block(depth, 6),
            "decorator_list": [self._expression(depth) for _ in self._many(0, 2)],
            "returns": self._expression(depth) if self._chance(0.2) else None,
        }
        if HAS_TYPE_PARAMETERS:
            parts["type_params"] = self._type_parameters()
        return (ast.AsyncFunctionDef if self._chance(0.3) else ast.FunctionDef)(**parts)

    def _class(self, depth: int) -> ast.stmt:
        parts = {
            "name": self._name(),
            "bases": [self._expression(depth) for _ in self._many(0, 2)],
            "keywords": [ast.keyword(arg="metaclass", value=self._expression(depth))] if self._chance(0.2) else [],
            "body": [self._function(depth) if self._chance(0.7) else self._statement(depth) for _ in self._many(1, 4)],
            "decorator_list": [self._expression(depth) for _ in self._many(0, 1)],
        }
        if HAS_TYPE_PARAMETERS:
            parts["type_params"] = self._type_parameters()
        return ast.ClassDef(**parts)

    def _type_parameters(self) -> list[ast.AST]:
        kinds = (lambda: ast.TypeVar(name="T", bound=self._load()), lambda: ast.TypeVarTuple(name="Ts"))
        return [self._random.choice(kinds)() for _ in self._many(0, 2)]

    def _arguments(self, depth: int) -> ast.arguments:
        names = self._random.sample(NAMES, 6)
        taken = [ast.arg(arg=name, annotation=self._load() if self._chance(0.2) else None) for name in names]
        return ast.arguments(
            posonlyargs=taken[:1] if self._chance(0.2) else [],
            args=taken[1 : self._random.randint(1, 3)],
            vararg=taken[3] if self._chance(0.2) else None,
            kwonlyargs=taken[4:5],
            kw_defaults=[self._expression(depth)],
            kwarg=taken[5] if self._chance(0.2) else None,
            defaults=[],
        )

    # Expressions

    def _name(self) -> str:
        return str(self._pick(NAMES))

    def _load(self) -> ast.expr:
        return ast.Name(id=self._name(), ctx=ast.Load())

    def _store(self) -> ast.Name:
        return ast.Name(id=self._name(), ctx=ast.Store())

    def _target(self, depth: int) -> ast.expr:
        parts: list[ast.expr] = [self._store(), ast.Starred(value=self._store(), ctx=ast.Store())]
        forms: list[ast.expr] = [
            self._store(),
            self._attribute(depth, ast.Store()),
            ast.Tuple(elts=parts, ctx=ast.Store()),
        ]
        return self._random.choice(forms)

    def _expression(self, depth: int) -> ast.expr:
        if depth >= self._depth or self._chance(0.25):
            return self._load() if self._chance(0.6) else ast.Constant(value=self._pick(CONSTANTS))
        return self._random.choice(self._expressions)(depth + 1)

    def _call(self, depth: int) -> ast.expr:
        arguments = [self._expression(depth) for _ in self._many(0, 2)]
        if self._chance(0.1):
            arguments.append(ast.Starred(value=self._load(), ctx=ast.Load()))
        named = [str(self._pick(KEYWORDS)), None] if self._chance(0.1) else [str(self._pick(KEYWORDS))]
        keywords = [ast.keyword(arg=name, value=self._expression(depth)) for name in named] if self._chance(0.4) else []
        called = self._attribute(depth) if self._chance(0.8) else self._expression(depth)
        return ast.Call(func=called, args=arguments, keywords=keywords)

    def _attribute(self, depth: int, context: ast.expr_context | None = None) -> ast.expr:
        owner = self._load() if self._chance(0.7) else self._expression(depth)
        if isinstance(owner, ast.Constant):
            owner = self._load()
        return ast.Attribute(value=owner, attr=str(self._pick(ATTRIBUTES)), ctx=context or ast.Load())

    def _compare(self, depth: int) -> ast.expr:
        count = self._random.randint(1, 2)
        others = [self._expression(depth) for _ in range(count)]
        operators = [self._random.choice(COMPARISONS)() for _ in range(count)]
        return ast.Compare(left=self._expression(depth), ops=operators, comparators=others)

    def _boolean(self, depth: int) -> ast.expr:
        operator = self._random.choice((ast.And, ast.Or))()
        return ast.BoolOp(op=operator, values=[self._expression(depth) for _ in range(self._random.randint(2, 4))])

    def _binary(self, depth: int) -> ast.expr:
        operator = self._random.choice(OPERATORS)()
        return ast.BinOp(left=self._expression(depth), op=operator, right=self._expression(depth))

    def _unary(self, depth: int) -> ast.expr:
        operator = self._random.choice((ast.Not, ast.USub, ast.UAdd, ast.Invert))()
        return ast.UnaryOp(op=operator, operand=self._expression(depth))

    def _lambda(self, depth: int) -> ast.expr:
        return ast.Lambda(args=self._arguments(depth), body=self._expression(depth))

    def _choice(self, depth: int) -> ast.expr:
        return ast.IfExp(test=self._expression(depth), body=self._expression(depth), orelse=self._expression(depth))

    def _walrus(self, depth: int) -> ast.expr:
        return ast.NamedExpr(target=self._store(), value=self._expression(depth))

    def _dict(self, depth: int) -> ast.expr:
        keys = [self._expression(depth) if self._chance(0.8) else None for _ in self._many(0, 3)]
        return ast.Dict(keys=keys, values=[self._load() for _ in keys])

    def _sequence(self, depth: int) -> ast.expr:
        parts = [self._expression(depth) for _ in self._many(1, 3)]
        if self._chance(0.2):
            parts.append(ast.Starred(value=self._load(), ctx=ast.Load()))
        if self._chance(0.3):
            return ast.Set(elts=parts)
        return self._random.choice((ast.List, ast.Tuple))(elts=parts, ctx=ast.Load())

    def _comprehension(self, depth: int) -> ast.expr:
        rounds = [
            ast.comprehension(
                target=self._target(depth),
                iter=self._expression(depth),
                ifs=[self._expression(depth) for _ in self._many(0, 1)],
                is_async=int(self._chance(0.2)),
            )
            for _ in self._many(1, 2)
        ]
        if self._chance(0.25):
            return ast.DictComp(key=self._load(), value=self._expression(depth), generators=rounds)
        kind = self._random.choice((ast.ListComp, ast.SetComp, ast.GeneratorExp))
        return kind(elt=self._expression(depth), generators=rounds)

    def _await(self, depth: int) -> ast.expr:
        return ast.Await(value=self._call(depth))

    def _yield(self, depth: int) -> ast.expr:
        if self._chance(0.3):
            return ast.YieldFrom(value=self._expression(depth))
        return ast.Yield(value=self._expression(depth) if self._chance(0.7) else None)

    def _formatted(self, depth: int) -> ast.expr:
        return ast.JoinedStr(
            values=[ast.Constant(value="x "), ast.FormattedValue(value=self._call(depth), conversion=-1)]
        )

    def _subscript(self, depth: int) -> ast.expr:
        forms: list[ast.expr] = [
            self._expression(depth),
            ast.Slice(lower=self._load(), upper=None, step=self._load()),
            ast.Tuple(elts=[ast.Slice(), self._load()], ctx=ast.Load()),
        ]
        return ast.Subscript(value=self._load(), slice=self._random.choice(forms), ctx=ast.Load())
