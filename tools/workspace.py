"""Contents of the workspace, read from its folders: every tool and every nox session finds packages here.

Standard library only, because nox and the lock read it before anything is installed.
"""

import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent


def dist_name(requirement: str) -> str:
    """Return the normalised distribution name of a requirement: "Foo_Bar[x]>=1" becomes "foo-bar"."""
    matched = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    if matched is None:
        raise ValueError(f"a requirement starts with a distribution's name: got {requirement!r}")
    return re.sub(r"[-_.]+", "-", matched.group()).lower()


@dataclass(frozen=True, kw_only=True)
class Package:
    """One folder of a wing under packages/, or one under apps/.

    Args:
        folder: where it lives.
        metadata: its pyproject.toml, parsed.
    """

    folder: Path
    metadata: dict[str, Any]

    @property
    def key(self) -> str:
        """Return the folder name, as used in session names: `test(core)`."""
        return self.folder.name

    @property
    def is_app(self) -> bool:
        """Return whether it lives under apps/."""
        return self.wing == "apps"

    @property
    def wing(self) -> str:
        """Return the wing that it belongs to, such as engines: a folder under packages/, or `testing` or `apps`."""
        folder = self.folder.parent.name
        return self.key if folder == "packages" else folder

    @property
    def name(self) -> str:
        """Return the distribution name, such as offbeat-core."""
        return str(self.metadata["project"]["name"])

    @property
    def import_name(self) -> str:
        """Return the one import package of the wheel, such as offbeat_core."""
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        """Return the folder of the import package."""
        return self.folder / "src" / self.import_name

    @property
    def dependencies(self) -> list[str]:
        """Return the requirements it always has."""
        return list(self.metadata["project"].get("dependencies", []))

    @property
    def extras(self) -> dict[str, list[str]]:
        """Return requirements by extra."""
        return dict(self.metadata["project"].get("optional-dependencies", {}))

    @property
    def engine_extras(self) -> list[str]:
        """Return the extras that install the whole engine it adapts: those of its build for CPUs, where it has one."""
        names = [name for name in self.extras if name.partition("-")[0] == "engine"]
        return [name for name in names if name.startswith("engine-cpu")] or names[:1]

    @property
    def light_extras(self) -> list[str]:
        """Return extras that fit beside all others: an engine needs an environment of its own."""
        return [name for name in self.extras if name.partition("-")[0] != "engine"]

    @property
    def engine_tests(self) -> Path:
        """Return the folder of the tests that run on the real engine."""
        return self.folder / "tests" / "engine"

    @property
    def engine_tests_beside(self) -> dict[str, str]:
        """Return other packages that those tests use, by folder name, each with its extras, such as "[ray]", or "".

        From `engine-tests-beside` of `[tool.offbeat]`, where an entry reads "grpo-async-app[ray]".
        """
        entries = self.metadata.get("tool", {}).get("offbeat", {}).get("engine-tests-beside", [])
        split = [str(entry).partition("[") for entry in entries]
        return {key: bracket + extras for key, bracket, extras in split}

    @property
    def requirements(self) -> list[str]:
        """Return the requirements it always has, and those of its extras."""
        return [*self.dependencies, *(one for extra in self.extras.values() for one in extra)]


def packages(root: Path = ROOT) -> list[Package]:
    """Return every package and application that has a pyproject.toml, packages first, by name."""
    of_wings = sorted(root.glob("packages/*/*/pyproject.toml"), key=lambda path: path.parent.name)
    found = [*of_wings, *sorted(root.glob("packages/*/pyproject.toml")), *sorted(root.glob("apps/*/pyproject.toml"))]
    return [Package(folder=path.parent, metadata=tomllib.loads(path.read_text())) for path in found]


def supported_versions(root: Path = ROOT) -> dict[str, str]:
    """Return the versions of others that are supported, such as ">=2.11,<2.14": `[tool.offbeat.bounds]`, by name."""
    return dict(tomllib.loads((root / "pyproject.toml").read_text())["tool"]["offbeat"]["bounds"])


def committed_files(root: Path = ROOT) -> list[Path]:
    """Return files that git tracks or would track, as absolute paths, without deleted ones."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [root / name for name in sorted(set(listed.split("\0"))) if name and (root / name).is_file()]
