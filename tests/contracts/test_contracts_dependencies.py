"""What a package imports is what it declares, and its modules import each other in one direction.

All tests share one environment, so nothing else would notice a dependency that is not declared.
"""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from source_rules import imported_modules
from workspace import Package, dist_name, packages

PACKAGES = packages()
every_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.key)
# Declared for what it does when present, never imported by us.
NEVER_IMPORTED = {"accelerate", "kaleido", "gguf", "jinja2", "protobuf", "sentencepiece", "tiktoken"}
FLOORS = (("core", "hangs"), ("rl", "runtime"), ("engines", "planner"), ("testing",), ("apps",))

# Modules of engines, which are not installed here, where they are not named like their distribution.
ENGINES = {"megatron": ["megatron-core"]}


def imported(package: Package) -> set[str]:
    """Return distributions that a package imports, in functions too, except itself and the standard library."""
    modules: set[str] = set()
    for path in package.source.rglob("*.py"):
        modules |= imported_modules(path.read_text())
    known = ENGINES | dict(packages_distributions())
    foreign = modules - sys.stdlib_module_names - {package.import_name}
    return {dist_name(known.get(module, [module])[0]) for module in foreign}


def declared(package: Package) -> set[str]:
    """Return distributions that a package names as a dependency, always or in an extra."""
    return {dist_name(requirement) for requirement in package.requirements}


def found_by_entry_point(name: str) -> bool:
    """Return whether a package of ours is a backend, loaded by name and never imported."""
    package = next((other for other in PACKAGES if other.name == name), None)
    groups = package.metadata["project"].get("entry-points", {}) if package else {}
    return any(group.startswith("offbeat.") for group in groups)


@every_package
def test_a_wing_imports_only_itself_and_wings_of_lower_floors(package: Package) -> None:
    floor = {wing: number for number, wings in enumerate(FLOORS) for wing in wings}
    found = imported(package)
    wings = {other.wing for other in PACKAGES if other.name in found}
    assert {wing for wing in wings - {package.wing} if floor[wing] >= floor[package.wing]} == set()


@every_package
def test_every_import_is_declared(package: Package) -> None:
    assert imported(package) - declared(package) == set()


@every_package
def test_every_dependency_is_used(package: Package) -> None:
    always = {dist_name(requirement) for requirement in package.dependencies}
    unused = always - imported(package) - NEVER_IMPORTED
    assert {name for name in unused if not found_by_entry_point(name)} == set()


def modules_imported(path: Path, package: Package) -> set[str]:
    """Return every module that a module may import, in functions and for type checkers too."""
    home = path.relative_to(package.folder / "src").parts
    named = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = [*home[: -node.level], node.module] if node.level else [node.module]
            module = ".".join(part for part in start if part)
            named |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return named


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.key)
def test_modules_of_a_package_import_each_other_in_one_direction(package: Package) -> None:
    modules = {
        ".".join(path.relative_to(package.folder / "src").with_suffix("").parts): path
        for path in package.source.rglob("*.py")
        if path.name != "__init__.py"  # which imports all of them, and gives them the package's public names
    }
    graph = {name: modules_imported(path, package) & modules.keys() - {name} for name, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
