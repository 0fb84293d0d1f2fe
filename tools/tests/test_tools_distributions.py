"""Builds of a package are equal wherever and by whomever they are made, and a difference is found."""

import subprocess

import distributions
import pytest

PYPROJECT = """\
[project]
name = "tiny"
version = "0.1.0"
requires-python = ">=3.11"

[build-system]
requires = ["uv_build>=0.13,<0.14"]
build-backend = "uv_build"
"""
# A backend that writes where it was built.
BACKEND = """\
import pathlib, zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(pathlib.Path(folder) / "tiny-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny/__init__.py", f"HERE = {str(pathlib.Path.cwd())!r}")
        wheel.writestr("tiny-0.1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 0.1.0\\n")
        wheel.writestr("tiny-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr("tiny-0.1.0.dist-info/RECORD", "")
    return "tiny-0.1.0-py3-none-any.whl"

def build_sdist(folder, config_settings=None):
    import shutil
    here = pathlib.Path.cwd()
    name = pathlib.Path(folder) / "tiny-0.1.0"
    return pathlib.Path(shutil.make_archive(str(name), "gztar", here.parent, here.name)).name
"""


@pytest.fixture
def workspace(tmp_path):
    root = tmp_path / "root"
    package = root / "packages/core/tiny"
    (package / "src/tiny").mkdir(parents=True)
    (package / "src/tiny/__init__.py").write_text("")
    (package / "pyproject.toml").write_text(PYPROJECT)
    (package / "CHANGELOG.md").write_text("# Changes\n\n## 0.1.0\n- first\n")
    head = '[project]\nname = "root"\nversion = "0"\nrequires-python = ">=3.11"\n'
    (root / "pyproject.toml").write_text(head + '[tool.uv]\npackage = false\nworkspace.members = ["packages/core/*"]\n')
    author = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    subprocess.run(["git", *author, "commit", "--quiet", "-m", "first"], cwd=root, check=True)
    return root


def test_two_builds_of_one_source_are_equal(workspace, tmp_path):
    found = distributions.build_twice(tmp_path / "dist", workspace)
    assert list(found) == ["tiny-0.1.0-py3-none-any.whl", "tiny-0.1.0.tar.gz"]
    distributions.write_checksums(found, tmp_path / "dist/SHA256SUMS")
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "dist", check=True)


def test_a_build_that_depends_on_its_folder_is_found(workspace, tmp_path):
    package = workspace / "packages/core/tiny"
    (package / "backend.py").write_text(BACKEND)
    own = PYPROJECT.replace('["uv_build>=0.13,<0.14"]', "[]").replace('"uv_build"', '"backend"\nbackend-path = ["."]')
    (package / "pyproject.toml").write_text(own)
    with pytest.raises(distributions.DistributionError, match=r"differ: .*tiny-0\.1\.0-py3-none-any\.whl"):
        distributions.build_twice(tmp_path / "dist", workspace)


@pytest.mark.parametrize(("heading", "holds"), [("0.1.0", True), ("Unreleased", True), ("0.0.9", False)])
def test_a_changelog_begins_with_the_version_or_with_unreleased(workspace, heading, holds):
    (workspace / "packages/core/tiny/CHANGELOG.md").write_text(f"# Changes\n\n## {heading}\n- it\n")
    assert (distributions.changelog_problems(workspace) == []) is holds
