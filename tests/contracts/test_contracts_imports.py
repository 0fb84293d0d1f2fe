"""Light packages stay light, and every package imports and has the names it promises."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from released import declared_names
from workspace import ROOT, Package, committed_files, packages

PACKAGES = packages()
LIGHT = {
    *("core", "hanglint", "http", "placement", "actors", "run", "data", "async-policy", "simulation"),
    *("grpo-async-app", "sft-app", "offbeat"),
}
HEAVY = ("torch", "transformers", "vllm", "ray", "megatron")
light_package = pytest.mark.parametrize(
    "package", [package for package in PACKAGES if package.key in LIGHT], ids=lambda package: package.key
)
command_line = pytest.mark.parametrize(
    ("package", "target"),
    [
        pytest.param(package, target, id=command)
        for package in PACKAGES
        for command, target in package.metadata["project"].get("scripts", {}).items()
    ],
)
LIST_HEAVY = f"import sys; sys.exit(', '.join(name for name in {HEAVY} if name in sys.modules) or 0)"
HELP = """
import sys
from {module} import {function}
sys.argv = ["command", "--help"]
try:
    {function}()
except SystemExit as left:
    assert not left.code, left.code
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


@light_package
def test_a_light_package_imports_no_engine(package: Package) -> None:
    done = run_python(f"import {package.import_name}\n{LIST_HEAVY}")
    assert done.returncode == 0, f"importing {package.import_name} brings in {done.stderr}"


@command_line
def test_asking_for_help_imports_no_engine(package: Package, target: str) -> None:
    module, function = target.split(":")
    done = run_python(f"{HELP.format(module=module, function=function)}\n{LIST_HEAVY}")
    assert done.returncode == 0, f"{package.key} --help brings in {done.stderr}"
    assert "usage" in done.stdout or package.name in done.stdout


@pytest.mark.parametrize("application", ["grpo_async_app._commands.dispatch", "sft_app._commands"])
def test_commands_import_transformers_only_where_they_need_it(application: str) -> None:
    """It takes seconds, of every command."""
    done = run_python(f"import {application}, sys; sys.exit('transformers' in sys.modules)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.key)
def test_every_public_name_is_there(package: Package) -> None:
    module = importlib.import_module(package.import_name)
    assert [name for name in declared_names(package) if not hasattr(module, name)] == []


def is_there(package: Package, dotted: str) -> bool:
    """Return whether a dotted name is a module of the package, or written in the module that it would be in.

    Read and not imported: engines are not installed here.
    """
    *parents, name = Path(*dotted.split(".")[1:]).parts
    path = package.source.joinpath(*parents)
    if (path / name).is_dir() or (path / f"{name}.py").is_file():
        return True
    module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return module.is_file() and re.search(rf"\b{name}\b", module.read_text()) is not None


def test_what_is_imported_from_our_packages_is_there() -> None:
    """In functions and in tests of the night too, which would find a module that moved a day later."""
    ours = {package.import_name: package for package in PACKAGES}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}"
        for path in committed_files()
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for package in [ours.get(node.module.split(".")[0])]
        for alias in node.names
        if package and not is_there(package, f"{node.module}.{alias.name}")
    ]
    assert found == []
