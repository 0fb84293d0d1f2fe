"""Rules for versions and for the ranges between packages, and the edits that satisfy them.

A range says which released versions of another package will do: each of them, read from its kept wheel, has every name
that is imported from it. The version in the workspace is among them, or the package says why it stays behind.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from metadata import Metadata
from released import BOUNDS, KeptWheel, Range, Version, declared_names, extras_of, kept_wheels, version_of
from workspace import ROOT, Package, dist_name, packages

UNRELEASED: Final = "## Unreleased\n"
ADVICE: Final = "run `python tools/release.py --mend`"


@dataclass(frozen=True)
class Need:
    """The lowest version that a package may have now, and the reason."""

    version: Version
    reason: str


def behind(package: Package) -> dict[str, str]:
    """Return packages whose newest version this one does not admit yet, with the reason: `[tool.offbeat.behind]`."""
    named = package.metadata.get("tool", {}).get("offbeat", {}).get("behind", {})
    return {dist_name(name): str(reason) for name, reason in named.items()}


def own_requirements(package: Package, names: set[str]) -> list[str]:
    """Return its requirements on packages of the workspace, always and in extras, each once."""
    return list(dict.fromkeys(each for each in package.requirements if dist_name(each) in names))


def is_changed(package: Package, wheel: KeptWheel) -> bool:
    """Return whether a file of the package differs from that of a kept version."""
    root = package.folder / "src"
    paths = [path for path in package.source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths} != wheel.files


def need(package: Package, kept: Sequence[KeptWheel]) -> Need | None:
    """Return the version that a package must have by its names and metadata; None before its first release.

    Args:
        package: as it is in the workspace.
        kept: its released versions, oldest first.
    """
    if not kept:
        return None
    last = kept[-1]
    names, metadata = set(declared_names(package)), Metadata.of_package(package)
    if lost := sorted(set(last.public_names) - names) + metadata.lost_since(last.metadata):
        return Need(last.version.next_breaking, f"{last.version} had {', '.join(lost)}, which is gone")
    if added := sorted(names - set(last.public_names)) + metadata.added_since(last.metadata):
        return Need(last.version.next_patch, f"{last.version} has no {', '.join(added)}")
    if changed := sorted({dist_name(each) for each in metadata.requirements ^ last.metadata.requirements}):
        return Need(last.version.next_patch, f"{last.version} has other requirements on {', '.join(changed)}")
    return Need(last.version, f"{last.version} is released")


def imports_of(source: str, modules: set[str]) -> set[tuple[str, str]]:
    """Return what a module's source takes from import packages: pairs of a module and a name in it.

    Names are taken by `from … import`, or as attributes after `import …`, also inside functions.
    """
    taken: set[tuple[str, str]] = set()
    aliases: dict[str, str] = {}
    attributes: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), level=0) if module.split(".")[0] in modules:
                taken |= {(module, alias.name) for alias in node.names}
            case ast.Import():
                for alias in node.names:
                    top = alias.name.split(".")[0]
                    if top in modules:
                        aliases[alias.asname or top] = alias.name if alias.asname else top
            case ast.Attribute(value=ast.Name(id=name)):
                attributes.append((name, node.attr))
    return taken | {(aliases[name], attribute) for name, attribute in attributes if name in aliases}


def uses(package: Package, modules: set[str]) -> dict[str, set[tuple[str, str]]]:
    """Return what the source of a package takes from other import packages, by the name of the import package."""
    others = modules - {package.import_name}
    found: dict[str, set[tuple[str, str]]] = {module: set() for module in others}
    for path in package.source.rglob("*.py"):
        for module, name in imports_of(path.read_text(), others):
            found[module.split(".")[0]].add((module, name))
    return found


def lacks(wheel: KeptWheel, taken: set[tuple[str, str]], extras: set[str]) -> list[str]:
    """Return what a kept version does not have of the names and extras asked of it."""
    names = sorted(f"{module}.{name}" for module, name in taken if not wheel.has(module, name))
    return names + sorted(
        f"extra [{extra}]" for extra in {dist_name(extra) for extra in extras} - wheel.metadata.extras
    )


@dataclass(frozen=True)
class Edge:
    """One package's need of another, both of the workspace.

    Args:
        package: which needs.
        other: which is needed.
        requirement: as pyproject.toml has it.
        taken: what the source of the one takes from the other: pairs of a module and a name in it.
        kept: released versions of the other, oldest first.
        reason_behind: why the version in the workspace is not admitted; None where it must be.
        gone: packages that were released and are not in the workspace any more.
    """

    package: Package
    other: Package
    requirement: str
    taken: set[tuple[str, str]]
    kept: Sequence[KeptWheel]
    reason_behind: str | None
    gone: frozenset[str] = frozenset()

    @property
    def lacking(self) -> dict[Version, list[str]]:
        """Return missing names and extras by kept version.

        A version built on a package that has another name now brings its contracts a second time: the classes of one
        are not those of the other.
        """
        extras = extras_of(self.requirement)
        found = {
            wheel.version: lacks(wheel, self.taken, extras)
            + [f"a build without {name}, which is gone" for name in self._built_on(wheel)]
            for wheel in self.kept
        }
        return {version: missing for version, missing in found.items() if missing}

    def _built_on(self, wheel: KeptWheel) -> list[str]:
        return sorted({dist_name(each) for each in wheel.metadata.requirements} & self.gone)

    @property
    def mended(self) -> Range:
        """Return the range by the rules: from the oldest version with everything needed to the one in the workspace."""
        given, present, lacking = Range.of(self.requirement), version_of(self.other), self.lacking
        upper = given.upper
        if self.reason_behind is None and not given.lower <= present < upper <= present.next_breaking:
            upper = present.next_breaking
        after = [version for version in lacking if version < upper]
        known = sorted({present, *(wheel.version for wheel in self.kept)})
        fitting = [version for version in known if version >= given.lower and all(version > one for one in after)]
        lower = min(fitting, default=present)
        return Range(lower, upper) if lower < upper else given

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the range."""
        at = f"{self.package.name}: {self.requirement}"
        given, present = Range.of(self.requirement), version_of(self.other)
        admits = present in given
        if not admits and self.reason_behind is None:
            yield f"{at} does not admit {present}, which the workspace has; {ADVICE}"
        if admits and self.reason_behind is not None:
            yield f"{at} admits {present}: remove the line of [tool.offbeat.behind] that says why not"
        if given.upper > present.next_breaking:
            yield f"{at} admits versions after {present.next_breaking}, which do not exist yet; {ADVICE}"
        asked = {dist_name(extra) for extra in extras_of(self.requirement)}
        unknown = sorted(asked - Metadata.of_package(self.other).extras)
        if unknown and self.reason_behind is None:
            yield f"{at} asks for [{', '.join(unknown)}], which {present} in the workspace does not have"
        known = {present, *(wheel.version for wheel in self.kept)}
        if given.lower not in known:
            yield f"{at} begins with a version that is neither kept in releases/ nor the one of the workspace; {ADVICE}"
        advice = (
            "it can stay behind no longer: remove its line of [tool.offbeat.behind]" if self.reason_behind else ADVICE
        )
        for version, missing in self.lacking.items():
            if version in given:
                yield f"{at} admits {version}, which lacks {', '.join(missing)}; {advice}"


def edges(found: Sequence[Package], kept: Mapping[str, Sequence[KeptWheel]]) -> Iterator[Edge]:
    """Yield every need of a package of the workspace for another."""
    by_name = {package.name: package for package in found}
    modules = {package.import_name for package in found}
    gone = frozenset(kept.keys() - by_name.keys())
    for package in found:
        taken, reasons = uses(package, modules), behind(package)
        for requirement in own_requirements(package, set(by_name)):
            other = by_name[dist_name(requirement)]
            yield Edge(
                package=package,
                other=other,
                requirement=requirement,
                taken=taken.get(other.import_name, set()),
                kept=kept.get(other.name, ()),
                reason_behind=reasons.get(other.name),
                gone=gone,
            )


def malformed(found: Sequence[Package]) -> list[str]:
    """Return ranges between packages that have another form than ">=0.1,<0.2", a line each."""
    names, errors = {package.name for package in found}, []
    for package in found:
        for requirement in own_requirements(package, names):
            try:
                Range.of(requirement)
            except ValueError as error:
                errors.append(f"{package.name}: {error}")
    return errors


def problems(root: Path = ROOT) -> list[str]:
    """Return what breaks the rules for versions and ranges, a line each."""
    found, kept = packages(root), kept_wheels(root)
    if errors := malformed(found):
        return errors
    for package in found:
        needed = need(package, kept.get(package.name, ()))
        if needed and version_of(package) < needed.version:
            errors.append(f"{package.name} must be {needed.version} or higher: {needed.reason}; {ADVICE}")
    return errors + [problem for edge in edges(found, kept) for problem in edge.problems()]


def mend(root: Path = ROOT) -> list[str]:
    """Raise versions and change ranges until the rules hold; return a line for each edit.

    Raises:
        ValueError: a range has another form.
    """
    if errors := malformed(packages(root)):
        raise ValueError("; ".join(errors))
    done: list[str] = []
    while edited := [*_raise_versions(root), *_mend_ranges(root)]:
        done += edited
    return done


def _raise_versions(root: Path) -> list[str]:
    found, kept = packages(root), kept_wheels(root)
    done = []
    for package in found:
        needed = need(package, kept.get(package.name, ()))
        if needed and version_of(package) < needed.version:
            done.append(f"{package.name} {version_of(package)} -> {needed.version}: {needed.reason}")
            set_version(package, needed.version)
            head_unreleased(package)
    return done


def _mend_ranges(root: Path) -> list[str]:
    done = []
    for edge in edges(packages(root), kept_wheels(root)):
        given, mended = Range.of(edge.requirement), edge.mended
        if given != mended:
            set_range(edge, mended)
            note_range(edge, mended)
            done.append(f"{edge.package.name}: {edge.other.name}{given} -> {mended}")
    return done


def set_version(package: Package, version: Version) -> None:
    """Write the version into a package's pyproject.toml.

    Raises:
        ValueError: it has another form.
    """
    path = package.folder / "pyproject.toml"
    changed, num_found = re.subn(r'(?m)^version = "[^"]*"', f'version = "{version}"', path.read_text(), count=1)
    if not num_found:
        raise ValueError(f'{path} needs a line of the form version = "0.1.0": found none')
    path.write_text(changed)


def set_range(edge: Edge, wanted: Range) -> None:
    """Write another range into the requirement of an edge.

    Raises:
        ValueError: the requirement is not written as a plain string.
    """
    path = edge.package.folder / "pyproject.toml"
    text, changed = path.read_text(), BOUNDS.sub(str(wanted), edge.requirement, count=1)
    written = [quote for quote in "\"'" if f"{quote}{edge.requirement}{quote}" in text]
    if not written:
        raise ValueError(f"{path} needs the requirement {edge.requirement!r} as a plain string: found none")
    for quote in written:
        text = text.replace(f"{quote}{edge.requirement}{quote}", f"{quote}{changed}{quote}")
    path.write_text(text)


def head_unreleased(package: Package) -> None:
    """Put the heading "Unreleased" above the versions of a package's CHANGELOG, where it is not there."""
    path = package.folder / "CHANGELOG.md"
    text = path.read_text()
    if UNRELEASED not in text:
        path.write_text(re.sub(r"(?m)^## ", f"{UNRELEASED}\n## ", text, count=1))


def note_range(edge: Edge, wanted: Range) -> None:
    """Write into a package's CHANGELOG which versions of another it admits now, in place of an earlier such line."""
    head_unreleased(edge.package)
    path = edge.package.folder / "CHANGELOG.md"
    before, heading, rest = path.read_text().partition(UNRELEASED)
    section, following, older = rest.partition("\n## ")
    section = re.sub(rf"(?m)^- Admits {re.escape(edge.other.name)}>=.*\n?", "", section)
    path.write_text(f"{before}{heading}- Admits {edge.other.name}{wanted}.\n{section}{following}{older}")
