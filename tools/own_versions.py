"""Versions of the workspace's packages that an installer chooses, asked of uv without the rest of an environment.

Released versions come from releases/, the others from wheels of the working tree.
"""

import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterable, Sequence
from email import message_from_bytes
from pathlib import Path
from typing import Final, Literal

from released import FOLDER, Version
from workspace import ROOT, dist_name, packages

UV_TIMEOUT_S: Final = 120.0


def build_all(folder: Path, root: Path = ROOT) -> None:
    """Build the wheel of every package of the working tree into a folder, which is emptied first."""
    command = ["uv", "build", "--quiet", "--all-packages", "--wheel", "--clear", f"--out-dir={folder}"]
    subprocess.run(command, cwd=root, check=True, timeout=UV_TIMEOUT_S)


def offer(which: Literal["oldest", "newest"], built: Path, folder: Path, root: Path = ROOT) -> None:
    """Fill a folder with kept wheels and those of the working tree; where both have a version, `which` decides.

    Args:
        which: "oldest" takes the kept one, "newest" the one of the working tree.
        built: what `build_all` has filled.
        folder: is emptied first.
        root: of the workspace.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    first, last = (built, root / FOLDER) if which == "oldest" else (root / FOLDER, built)
    for path in (*first.glob("*.whl"), *last.glob("*.whl")):
        shutil.copy2(path, folder)


def _required_by(folder: Path) -> set[str]:
    """Return the names of what wheels of a folder require: kept ones may need what nothing here needs any more."""
    found = set[str]()
    for path in folder.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            [name] = (each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
            required = message_from_bytes(wheel.read(name)).get_all("Requires-Dist") or []
        found |= {dist_name(each) for each in required}
    return found


def choose(
    requirements: Iterable[str], offered: Path, resolution: Literal["lowest", "highest"], root: Path = ROOT
) -> dict[str, Version]:
    """Return the versions of our packages that uv installs for some requirements, by distribution name.

    Raises:
        ValueError: uv finds no solution, in its own words.
    """
    # A kept wheel may be of a package that is not here any more, and stays installable.
    kept = {dist_name(path.name.partition("-")[0]) for path in offered.glob("*.whl")}
    ours = {package.name for package in packages(root)} | kept
    here = {dist_name(each) for package in packages(root) for each in package.requirements}
    others = {*here, *_required_by(offered)} - ours
    settings = offered / "uv.toml"
    settings.write_text(f"exclude-dependencies = {sorted(others)!r}\n")
    command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-index", "--no-sources", "-"]
    options = [f"--config-file={settings}", f"--find-links={offered}", f"--resolution={resolution}"]
    asked = "\n".join(requirements)
    done = subprocess.run(
        [*command, *options],
        input=asked,
        cwd=offered,
        capture_output=True,
        text=True,
        check=False,
        timeout=UV_TIMEOUT_S,
    )
    if done.returncode:
        raise ValueError(f"uv finds no versions for {asked!r}: {done.stderr.strip()}")
    return {dist_name(name): Version.parse(version) for name, version in _pins(done.stdout)}


def _pins(listed: str) -> Sequence[tuple[str, str]]:
    return re.findall(r"(?m)^([A-Za-z0-9._-]+)==([0-9.]+)", listed)
