"""The package's face: its entry point, and what it must not import."""

import ast
import subprocess
import sys
from pathlib import Path

import offbeat_actors
from offbeat_actors import Launcher, LocalLauncher
from offbeat_actors.ray import RayLauncher
from offbeat_core import load_backend


def test_the_local_launcher_is_found_by_its_entry_point() -> None:
    assert load_backend("offbeat.launcher", "local") is LocalLauncher
    launcher: Launcher = LocalLauncher("a run")  # the type checker holds the interface to it
    assert launcher is not None


def test_the_ray_launcher_is_found_by_its_entry_point() -> None:
    assert load_backend("offbeat.launcher", "ray") is RayLauncher
    launcher: Launcher = RayLauncher("a run")
    assert launcher is not None


def test_importing_it_brings_neither_torch_nor_ray() -> None:
    code = (
        "import offbeat_actors.ray, offbeat_actors._server, sys; "
        "print(*{'torch', 'ray', 'offbeat_mesh'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout == "\n"


def test_no_module_imports_pickle() -> None:
    for path in Path(offbeat_actors.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not imported & {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}, path.name
