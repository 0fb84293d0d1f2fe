"""What the sources of this package use of another library, read from their text: so no list has to be kept by hand."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCES = sorted((Path(__file__).parents[1] / "src").rglob("*.py"))


def uses_of(*holders: str) -> Iterator[tuple[str, ast.Call | None]]:
    """Attributes taken of these names, such as `self._runtime` or `adaptor`, each with the call if it is one."""
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in holders:
                yield node.attr, calls.get(id(node))


def fits(call: ast.Call, parameters: list[dict[str, str]]) -> bool:
    """Whether a recorded function takes the arguments of a call: as many by place, and the others by name."""
    names = [each["name"] for each in parameters if each["kind"] in ("positional", "either")]
    by_name = {word.arg for word in call.keywords}
    given = {*names[: len(call.args)], *by_name}
    required = {each["name"] for each in parameters if "default" not in each and each["kind"] in ("either", "keyword")}
    known = {each["name"] for each in parameters}
    return len(call.args) <= len(names) and by_name <= known - {*names[: len(call.args)]} and required <= given
