"""Packages are found by folder, and public names are pinned from them."""

import subprocess

import public_names
import pytest
from workspace import committed_files, dist_name, packages


def add_package(root, key, names='["a", "b"]'):
    """Add a minimal package folder."""
    folder = root / "packages" / key
    source = folder / "src" / f"offbeat_{key}"
    source.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "offbeat-{key}"\ndependencies = ["numpy>=2"]\n'
        '[project.optional-dependencies]\nengine = ["torch"]\n'
    )
    (source / "__init__.py").write_text(f"__all__ = {names}\n")


@pytest.mark.parametrize("requirement", ["offbeat-data[math]>=0.1,<0.2", "Offbeat_Data", "offbeat.data ; x == 'y'"])
def test_a_requirement_names_its_distribution(requirement):
    assert dist_name(requirement) == "offbeat-data"


def test_a_folder_is_a_package(tmp_path):
    add_package(tmp_path, "one")
    (tmp_path / "packages" / "no_metadata").mkdir()
    (found,) = packages(tmp_path)
    assert (found.key, found.name, found.import_name, found.is_app) == ("one", "offbeat-one", "offbeat_one", False)
    assert found.dependencies == ["numpy>=2"]
    assert found.extras == {"engine": ["torch"]}
    assert (found.source / "__init__.py").is_file()


def test_tests_on_an_engine_name_packages_beside_them_with_extras(tmp_path):
    add_package(tmp_path, "one")
    with (tmp_path / "packages" / "one" / "pyproject.toml").open("a") as file:
        file.write('[tool.offbeat]\nengine-tests-beside = ["serve", "grpo-async-app[ray,images]"]\n')
    (found,) = packages(tmp_path)
    assert found.engine_tests_beside == {"serve": "", "grpo-async-app": "[ray,images]"}


def test_ignored_files_are_not_committed(tmp_path):
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    for name, text in {".gitignore": "ignored\n", "ignored": "", "kept": ""}.items():
        (tmp_path / name).write_text(text)
    assert committed_files(tmp_path) == [tmp_path / ".gitignore", tmp_path / "kept"]


def test_a_changed_public_name_is_reported_until_it_is_pinned(tmp_path):
    add_package(tmp_path, "one")
    add_package(tmp_path, "gone")
    public_names.renew(tmp_path)
    assert public_names.differences(tmp_path) == []
    source = tmp_path / "packages" / "one" / "src" / "offbeat_one" / "__init__.py"
    source.write_text('__all__ = ["b", "c"]\n')
    (tmp_path / "packages" / "gone" / "pyproject.toml").unlink()
    assert public_names.differences(tmp_path) == ["offbeat_one: added ['c'], lost ['a']"]
    public_names.renew(tmp_path)
    assert public_names.differences(tmp_path) == []
    assert [path.name for path in (tmp_path / "tests/contracts/public_names").iterdir()] == ["offbeat_one.txt"]


def test_a_package_without_public_names_is_refused(tmp_path):
    add_package(tmp_path, "one")
    (tmp_path / "packages/one/src/offbeat_one/__init__.py").write_text("")
    with pytest.raises(ValueError, match="offbeat_one needs a plain list `__all__`"):
        public_names.renew(tmp_path)
