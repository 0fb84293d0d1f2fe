"""Versions, ranges between packages, and the wheels of released versions that are kept in releases/.

Standard library only, as everything that nox and the contracts read before an installation.
"""

import ast
import re
import zipfile
from dataclasses import dataclass
from email import message_from_string
from functools import cached_property
from pathlib import Path
from typing import Final

from metadata import Metadata
from workspace import ROOT, Package, dist_name

FOLDER: Final = "releases"
BOUNDS: Final = re.compile(r">=(?P<lower>\d+\.\d+(\.\d+)?),\s*<(?P<upper>\d+\.\d+(\.\d+)?)")
RANGE: Final = re.compile(rf"(?P<extras>\[[^\]]*\])?\s*{BOUNDS.pattern}\s*(;.*)?")


@dataclass(frozen=True, order=True)
class Version:
    """A released or coming version of a package, such as 0.1.2."""

    major: int
    minor: int
    patch: int = 0

    @classmethod
    def parse(cls, text: str) -> "Version":
        """Read "0.1" or "0.1.2"."""
        return cls(*(int(part) for part in text.split(".")))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"

    @property
    def short(self) -> str:
        """Return the form for ranges: 0.1 for 0.1.0, and 0.1.2 unchanged."""
        return str(self).removesuffix(".0") if self.patch == 0 else str(self)

    @property
    def next_patch(self) -> "Version":
        """Return the next version, which removes nothing."""
        return Version(self.major, self.minor, self.patch + 1)

    @property
    def next_breaking(self) -> "Version":
        """Return the next version that may remove names: a minor one before 1.0, a major one after."""
        return Version(0, self.minor + 1) if self.major == 0 else Version(self.major + 1, 0)


@dataclass(frozen=True)
class Range:
    """The versions from `lower` on and before `upper`."""

    lower: Version
    upper: Version

    @classmethod
    def of(cls, requirement: str) -> "Range":
        """Return the range of a requirement such as "offbeat-data[math]>=0.1.2,<0.3".

        Raises:
            ValueError: the requirement has another form.
        """
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        found = RANGE.fullmatch(requirement[name.end() if name else 0 :].strip())
        if found is None:
            raise ValueError(f'a range between packages has the form "name>=0.1,<0.2": got {requirement!r}')
        return cls(Version.parse(found["lower"]), Version.parse(found["upper"]))

    def __contains__(self, version: Version) -> bool:
        return self.lower <= version < self.upper

    def __str__(self) -> str:
        return f">={self.lower.short},<{self.upper.short}"


def extras_of(requirement: str) -> set[str]:
    """Return the extras that a requirement asks for."""
    found = re.match(r"[A-Za-z0-9._-]+\[([^\]]*)\]", requirement)
    return {extra.strip() for extra in found[1].split(",")} if found else set()


def all_of(source: str) -> list[str] | None:
    """Return `__all__` of a module's source, or None where it has no plain list of that name."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def bound_names(source: str) -> set[str]:
    """Return names that a module binds at its top level, also under an `if` or a `try`."""
    names: set[str] = set()
    waiting: list[ast.stmt] = list(ast.parse(source).body)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
            case ast.If() | ast.Try():
                waiting += [*node.body, *node.orelse]
    return names


@dataclass(frozen=True)
class KeptWheel:
    """A released version of a package, as it was built.

    Args:
        path: the wheel; its file name says the distribution and the version.
    """

    path: Path

    @property
    def name(self) -> str:
        """Return the distribution name, such as offbeat-core."""
        return dist_name(self.path.name.split("-")[0])

    @property
    def version(self) -> Version:
        """Return the version in its file name."""
        return Version.parse(self.path.name.split("-")[1])

    @cached_property
    def files(self) -> dict[str, bytes]:
        """Return contents by path inside the wheel, without its metadata."""
        with zipfile.ZipFile(self.path) as wheel:
            names = [name for name in wheel.namelist() if not name.endswith("/") and ".dist-info/" not in name]
            return {name: wheel.read(name) for name in names}

    @cached_property
    def public_names(self) -> list[str]:
        """Return `__all__` of its import package; an application may have none."""
        return all_of(self.files[f"{self.name.replace('-', '_')}/__init__.py"].decode()) or []

    @cached_property
    def metadata(self) -> Metadata:
        """Return what an installer reads of it."""
        with zipfile.ZipFile(self.path) as wheel:
            texts = {
                name.rpartition("/")[2]: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name
            }
        return Metadata.of_wheel(message_from_string(texts["METADATA"]), texts.get("entry_points.txt", ""))

    def has(self, module: str, name: str) -> bool:
        """Return whether `from module import name` finds a public or private name, or a module."""
        path = module.replace(".", "/")
        if f"{path}/{name}.py" in self.files or f"{path}/{name}/__init__.py" in self.files:
            return True
        if module == self.name.replace("-", "_"):
            return name in self.public_names
        source = self.files.get(f"{path}.py", self.files.get(f"{path}/__init__.py"))
        return source is not None and name in bound_names(source.decode())


def kept_wheels(root: Path = ROOT) -> dict[str, list[KeptWheel]]:
    """Return the kept versions of every package by distribution name, oldest first."""
    kept: dict[str, list[KeptWheel]] = {}
    for path in (root / FOLDER).glob("*.whl"):
        wheel = KeptWheel(path)
        kept.setdefault(wheel.name, []).append(wheel)
    return {name: sorted(wheels, key=lambda wheel: wheel.version) for name, wheels in sorted(kept.items())}


def version_of(package: Package) -> Version:
    """Return the version in a package's pyproject.toml: the last one released, or the one that comes next."""
    return Version.parse(str(package.metadata["project"]["version"]))


def declared_names(package: Package) -> list[str]:
    """Return `__all__` of a package, read without importing it. An application may have none, as nothing imports it.

    Raises:
        ValueError: it has none, or one that is not a plain list of strings.
    """
    names = all_of((package.source / "__init__.py").read_text())
    if names is None and not package.is_app:
        raise ValueError(f"{package.import_name} needs a plain list `__all__` in its __init__.py: found none")
    return names or []
