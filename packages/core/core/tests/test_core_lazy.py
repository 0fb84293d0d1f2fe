"""A package whose names are loaded when they are asked for."""

import subprocess
import sys

import pytest

PACKAGE = """
from offbeat_core import load_lazily
__getattr__, __dir__ = load_lazily(__name__, {"_first": "one two", "_second": "three"})
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "lazy_package"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "_first.py").write_text("one, two = 1, 2")
    (folder / "_second.py").write_text("import sys\nthree = sys.no_such_thing")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__("lazy_package")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazy_package"]:
        del sys.modules[name]


def test_a_module_is_imported_with_the_first_name_of_it(package):
    assert "lazy_package._first" not in sys.modules
    assert {"one", "two", "three"} <= set(dir(package))
    assert package.two == 2
    assert "lazy_package._first" in sys.modules
    assert "lazy_package._second" not in sys.modules
    with pytest.raises(AttributeError, match="module 'lazy_package' has no attribute 'four'"):
        _ = package.four


def test_an_error_in_a_module_is_not_reported_as_a_missing_name(package):
    with pytest.raises(ImportError, match=r"three of lazy_package cannot be loaded: .*no_such_thing"):
        _ = package.three


def test_torch_is_not_imported_with_the_packages_that_are_lazy():
    names = "offbeat_core", "offbeat_testing"
    code = f"import sys, {', '.join(names)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
