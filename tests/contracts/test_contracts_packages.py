"""Every package folder has the same form, is known to the root, and names itself well."""

import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from public_names import pinned_names
from ranges import problems
from released import declared_names, kept_wheels, version_of
from source_rules import is_catch_all
from workspace import ROOT, Package, packages

PACKAGES = packages()
ROOT_METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())
every_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.key)


@every_package
def test_a_package_folder_is_complete(package: Package) -> None:
    for name, num_words in {"README.md": 40, "CHANGELOG.md": 6}.items():
        path = package.folder / name
        assert path.is_file(), f"{path.relative_to(ROOT)} is missing"
        assert len(path.read_text().split()) > num_words, f"{path.relative_to(ROOT)} says next to nothing"
    assert (package.source / "py.typed").is_file(), "without py.typed no type checker reads the package's types"
    assert [path.name for path in (package.folder / "src").iterdir() if (path / "__init__.py").is_file()] == [
        package.import_name
    ], "one wheel holds one import package, named after the distribution"
    assert list((package.folder / "tests").rglob("test_*.py")), "a package without tests"


@every_package
def test_metadata_is_static_and_of_one_form(package: Package) -> None:
    project = package.metadata["project"]
    assert "dynamic" not in project
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    is_released = version_of(package) in {wheel.version for wheel in kept_wheels().get(package.name, [])}
    heading = rf"(?m)^## {re.escape(project['version'])}\b" + ("" if is_released else r"|^## Unreleased")
    assert re.search(heading, (package.folder / "CHANGELOG.md").read_text()), "the CHANGELOG lacks this version"
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    assert (package.folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes(), "link it to the root's"
    assert project["requires-python"] == ROOT_METADATA["project"]["requires-python"]
    assert project["readme"] == "README.md"
    assert project["description"].strip()
    assert package.metadata["build-system"]["build-backend"] == "uv_build"
    assert package.metadata["tool"]["uv"]["build-backend"]["module-name"] == package.import_name


SCRIPTS = [(package, name) for package in packages() for name in package.metadata["project"].get("scripts", {})]


@pytest.mark.parametrize(("package", "script"), SCRIPTS, ids=[name for _, name in SCRIPTS])
def test_a_command_says_its_version(package: Package, script: str) -> None:
    command = [Path(sys.executable).with_name(script), "--version"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert said == [script, package.metadata["project"]["version"]]


def test_versions_and_ranges_between_packages_hold() -> None:
    assert problems() == []


@every_package
def test_the_root_knows_the_package(package: Package) -> None:
    assert ROOT_METADATA["tool"]["uv"]["sources"][package.name] == {"workspace": True}
    linter = ROOT_METADATA["tool"]["importlinter"]
    assert package.import_name in linter["root_packages"]
    layers = next(contract["layers"] for contract in linter["contracts"] if contract["id"] == "layers")
    assert package.import_name in re.split(r"[ |]+", " ".join(layers)), "give it a layer in pyproject.toml"


def test_the_root_knows_no_package_that_is_gone() -> None:
    assert set(ROOT_METADATA["tool"]["uv"]["sources"]) == {package.name for package in PACKAGES}


@every_package
def test_public_names_change_only_on_purpose(package: Package) -> None:
    assert declared_names(package) == pinned_names(package), (
        "public names changed: if that is meant, note it in the CHANGELOG and run tools/public_names.py --renew"
    )


@every_package
def test_modules_are_named_for_what_they_hold(package: Package) -> None:
    modules = [path.relative_to(ROOT) for path in package.source.rglob("*.py")]
    assert not [path for path in modules if any(is_catch_all(part) for part in path.with_suffix("").parts)]


def test_test_files_have_names_of_their_own() -> None:
    folders = [package.folder / "tests" for package in PACKAGES] + [ROOT / "tests", ROOT / "tools"]
    names = Counter(path.name for folder in folders for path in folder.rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]


def test_the_licence_is_the_one_declared() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert Path(ROOT / "CONTRIBUTING.md").is_file()
