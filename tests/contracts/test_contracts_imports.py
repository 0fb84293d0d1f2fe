"""Light packages stay light, and every package imports and has the names it promises."""

import importlib
import subprocess
import sys

import pytest
from released import declared_names
from workspace import Package, packages

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
