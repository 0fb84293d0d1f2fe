"""The tests of a row for the reward `code`, as data sets write them."""

import ast
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

_DECLARING: Final = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom),
    *(ast.Assign, ast.AnnAssign, ast.Pass),
)
"""Statements that do not test anything."""
_ASKED: Final = """
import json as _json
try:
    _function = Solution().{name}
except NameError:
    _function = {name}
assert _json.loads(_json.dumps(_function(*_json.loads({given!r})))) in _json.loads({expected!r})
"""
"""A call with arguments, and its result, as JSON: whether a sequence is a list or a tuple is not asked."""
_RUNNING: Final = ("eval", "exec", "compile", "getattr", "hasattr")
"""Functions of Python that find names in texts."""
_SPACES: Final = ("globals", "locals", "vars")


@dataclass(frozen=True, kw_only=True)
class CodeTests:
    """The tests of one row.

    Args:
        pairs: what a program reads, and what it should print then.
        assertions: statements, run one after another where the program has run: each that raises has failed.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    assertions: tuple[str, ...] = ()


def read_tests(found: Any, max_tests: int = 0, entry: str = "") -> CodeTests:
    """Read tests.

    Args:
        found: pairs as a list of {input, output}, or as {inputs, outputs} (APPS, TACO); the same with arguments and
            results of a function, named by fn_name (APPS) or `entry` (LiveCodeBench, whose entries have the testtype
            functional); assertions as a list of texts (MBPP); one text of Python, such as a function `check` and its
            call; or any of these as JSON text.
        max_tests: so many at most; 0: all.
        entry: name of the function under test, where it is known: what `check` is called with (HumanEval).

    Raises:
        ValueError, TypeError, KeyError: it is none of these.
    """
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            return _of_text(found, entry)
    if isinstance(found, dict) and (name := found.get("fn_name") or ""):
        calls = list(zip(found["inputs"], found["outputs"], strict=True))[: max_tests or None]
        return CodeTests(assertions=tuple(_call(name, given, wanted) for given, wanted in calls))
    if isinstance(found, dict):
        found = [
            {"input": given, "output": wanted} for given, wanted in zip(found["inputs"], found["outputs"], strict=True)
        ]
    if not isinstance(found, list) or not found:
        raise ValueError("no tests are there")
    found = found[: max_tests or None]
    if all(isinstance(each, str) for each in found):
        _check_tests(found)
        return CodeTests(assertions=tuple(found))
    if other := [each for each in found if not isinstance(each, dict)]:
        raise ValueError(
            f"each is a text of Python, or each has an input and an output; {str(other[0])[:40]!r} does not fit"
        )
    if any(each.get("testtype") == "functional" for each in found):
        return CodeTests(assertions=tuple(_functional(entry, each) for each in found))
    return CodeTests(pairs=tuple((_lines(each["input"]), _lines(each["output"])) for each in found))


def _of_text(text: str, entry: str) -> CodeTests:
    defined = {each.name for each in _statements(text) if isinstance(each, ast.FunctionDef)}
    if "check" in defined and not _can_fail(text):
        if not entry:
            raise ValueError(
                "check is defined and not called: name the column with the function under test, such as entry_point, "
                "as reward.code.entry_column"
            )
        text = f"{text}\n\ncheck({entry})\n"
    _check_tests([text])
    return CodeTests(assertions=(text,))


def _check_tests(texts: Sequence[str]) -> None:
    """Refuse tests that hold for every program."""
    if not any(_can_fail(text) for text in texts):
        raise ValueError("they call nothing and assert nothing: functions are only defined")


def _can_fail(text: str) -> bool:
    return any(not _only_declares(each) for each in _statements(text))


def _only_declares(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):  # of `if __name__ == "__main__"`, nothing is run
        return any(isinstance(each, ast.Name) and each.id == "__name__" for each in ast.walk(statement.test))
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or isinstance(statement, _DECLARING)


def _statements(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, RecursionError, MemoryError) as error:  # the latter two: nested too deep
        raise ValueError(f"they are not Python: {str(error) or 'nested too deep'}") from error


def names_used(texts: Sequence[str]) -> list[str]:
    """Find the names that tests use as code, sorted: what of a program they may ask for.

    The program is sent them, so words of other texts and of comments are not among them: expected results are there.
    """
    names = set[str]()
    for text in texts:
        try:
            names.update(_names_in(_statements(text)))
        except ValueError:  # it fails where it is run
            continue
    return sorted(name for name in names if not name.startswith("__"))


def _names_in(statements: Sequence[ast.stmt]) -> Iterator[str]:
    nodes = [node for statement in statements for node in ast.walk(statement)]
    modules = {each.asname or each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
    for node in nodes:
        match node:
            case ast.Name(id=name):
                yield name
            case ast.ImportFrom(names=imported):
                yield from (each.name for each in imported)
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in modules:
                yield name
            case ast.Call(func=ast.Name(id=function)) if function in _RUNNING:
                yield from _names_in_texts(node)
            case ast.Call() | ast.Subscript() | ast.Compare() if any(_is_space(each) for each in _parts(node)):
                yield from _names_in_texts(node)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Give what a node consists of, and of a method that it calls the object: globals() of globals().get("f")."""
    for each in ast.iter_child_nodes(node):
        yield from (each, each.value) if isinstance(each, ast.Attribute) else (each,)


def _is_space(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return False
    return node.func.id in _SPACES and not node.args  # vars of an object has what is expected beside it


def _names_in_texts(node: ast.AST) -> Iterator[str]:
    """Find names in texts that are run, such as those of eval; words where one is a part of a program alone."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            try:
                yield from _names_in(_statements(each.value))
            except ValueError:
                yield from re.findall(r"[^\W\d]\w*", each.value)


def _functional(entry: str, test: dict[str, Any]) -> str:
    """Read a test of LiveCodeBench: an argument a line, each as JSON."""
    if not entry:
        raise ValueError(
            "testtype functional needs the name of the function: name its column as reward.code.entry_column"
        )
    given = [json.loads(line) for line in _lines(test["input"]).splitlines() if line.strip()]
    return _call(entry, given, json.loads(test["output"]))


def _call(name: Any, given: Any, wanted: Any) -> str:
    """Write a call with arguments as an assertion; APPS often has a result in a list of its own."""
    if not (isinstance(name, str) and name.isidentifier() and isinstance(given, list)):
        raise ValueError(f"a call needs the name of a function and a list of arguments, got {name!r} and {given!r}")
    expected = [wanted, *(wanted if isinstance(wanted, list) and len(wanted) == 1 else [])]
    return _ASKED.format(name=name, given=json.dumps(given), expected=json.dumps(expected))


def _lines(value: Any) -> str:
    """Return a text, also where a data set holds its lines as a list."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
