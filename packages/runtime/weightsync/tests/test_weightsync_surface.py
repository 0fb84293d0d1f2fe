"""What the package must not import."""

import ast
from pathlib import Path

import offbeat_weightsync


def test_no_module_imports_pickle() -> None:
    for path in Path(offbeat_weightsync.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not imported & {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}, path.name
        assert "torch.load" not in path.read_text()
