"""The walks of docs/architecture.md: the files that are named there exist, hold what is named, and are few enough."""

import ast
import re

import pytest
from workspace import ROOT, packages

PAGE = (ROOT / "docs" / "architecture.md").read_text()
APP = ROOT / "apps" / "grpo-async-app" / "src" / "grpo_async_app"
# Heading of a table, and how many files it may name.
WALKS = {"A trajectory, from a prompt to the loss": 26, "The weights, from a step to the next sample": 14}
KEY = {"A key of the configuration": 6}
MAX_STEPS_OF_CHECK_RUN = 20


def rows(heading: str) -> list[str]:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    table = section[section.index("| step |") :].split("\n\n")[0]
    return table.splitlines()[2:]


def named_file(name: str) -> str:
    """Relative to the repository, of `PACKAGE/FILE.py` or a file of the application."""
    key, _, rest = name.partition("/")
    found = [package.source / rest for package in packages() if package.key == key] or [APP / name]
    return found[0].relative_to(ROOT).as_posix()


def defined(path: str) -> set[str]:
    """Classes, functions, and methods as CLASS.METHOD."""
    tree = ast.parse((ROOT / path).read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{each.name}" for each in methods}
    return found


@pytest.mark.parametrize(("heading", "most"), [*WALKS.items(), *KEY.items()])
def test_a_walk_passes_few_files_which_hold_what_is_named(heading: str, most: int) -> None:
    files: set[str] = set()
    for row in rows(heading):
        for name, symbol in re.findall(r"`([\w/-]+\.py)`(?: `([\w.]+)`)?", row):
            path = named_file(name)
            assert (ROOT / path).is_file(), f"{heading}: there is no {name}"
            assert not symbol or symbol in defined(path), f"{heading}: {name} has no {symbol}"
            files.add(path)
    assert 0 < len(files) <= most, sorted(files)


def test_a_run_is_checked_in_few_steps() -> None:
    path = APP / "_preflight" / "preflight.py"
    [check_run] = (node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "check_run")
    called = {
        node.func.id for node in ast.walk(check_run) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert "resolve" in called
    assert len(called) <= MAX_STEPS_OF_CHECK_RUN, sorted(called)
