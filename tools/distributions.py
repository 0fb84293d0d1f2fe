"""Wheels and source archives of every package, built twice: once here, once from a copy in another folder.

Builds are made by uv's own backend (`uv_build`), which writes fixed times and modes into wheels and archives.
`SOURCE_DATE_EPOCH`, the time of the last commit, is for a backend that would write the time of the build.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from released import version_of
from workspace import ROOT, committed_files, packages

UV_TIMEOUT_S: Final = 300.0
PRIVATE_UMASK: Final = 0o077
"""Umask of the second build: modes of files must not depend on who builds them."""


class DistributionError(Exception):
    """Wheels and archives that are not fit for a release; the text names them."""


def build_twice(folder: Path, root: Path = ROOT) -> dict[str, str]:
    """Build every wheel and source archive into a folder, and again from a copy of the files that git tracks.

    Args:
        folder: where the first build goes; it is emptied.
        root: of the workspace.

    Returns:
        SHA-256 in hexadecimal, by file name.

    Raises:
        DistributionError: the builds differ, or lack a package.
    """
    _build(root, folder)
    with tempfile.TemporaryDirectory(prefix="offbeat-release-") as temporary:
        copy, again = Path(temporary) / "copy", Path(temporary) / "dist"
        for path in committed_files(root):
            target = copy / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            # Without modes and times, which must not matter.
            shutil.copyfile(path, target)
        _build(copy, again, umask=PRIVATE_UMASK, epoch=_last_commit_s(root))
        first, second = digests(folder), digests(again)
    if differs := sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name)):
        raise DistributionError(f"two builds of one source differ: {', '.join(differs)}")
    if missing := sorted(_expected(root) - first.keys()):
        raise DistributionError(f"not built: {', '.join(missing)}")
    return first


def _expected(root: Path) -> set[str]:
    named = [f"{package.import_name}-{version_of(package)}" for package in packages(root)]
    return {name + suffix for name in named for suffix in ("-py3-none-any.whl", ".tar.gz")}


def _build(root: Path, folder: Path, *, umask: int = -1, epoch: str | None = None) -> None:
    command = ["uv", "build", "--quiet", "--all-packages", "--clear", "--no-create-gitignore", f"--out-dir={folder}"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch or _last_commit_s(root)}
    done = subprocess.run(
        command,
        cwd=root,
        env=environment,
        umask=umask,
        capture_output=True,
        text=True,
        check=False,
        timeout=UV_TIMEOUT_S,
    )
    if done.returncode:
        raise DistributionError(f"uv build fails: {done.stderr.strip()}")


def _last_commit_s(root: Path) -> str:
    command = ["git", "log", "-1", "--format=%ct"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder, in hexadecimal, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def write_checksums(found: Mapping[str, str], path: Path) -> None:
    """Write what `sha256sum --check` reads."""
    path.write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(found.items())))


def changelog_problems(root: Path = ROOT) -> list[str]:
    """Return a line for each package whose CHANGELOG does not begin with "Unreleased" or its version."""
    found = []
    for package in packages(root):
        path = package.folder / "CHANGELOG.md"
        first = re.search(r"(?m)^## (\S+)", path.read_text())
        version = str(version_of(package))
        if first is None or first[1] not in ("Unreleased", version):
            got = first[1] if first else "none"
            found.append(f"{package.name}: the first heading of its CHANGELOG is Unreleased or {version}: got {got}")
    return found
