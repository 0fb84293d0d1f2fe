"""Releases one package: what has to be released, under which number, and which ranges follow.

python tools/release.py                     every package: released, in the workspace, what has changed since
python tools/release.py --check             fail where versions or ranges break the rules (the contracts do too)
python tools/release.py --mend              raise versions and change ranges until they hold
python tools/release.py --prepare PACKAGE   version, heading of the CHANGELOG, and the ranges of its dependants
python tools/release.py --keep PACKAGE      build its wheel into releases/, which makes the version a released one

`--prepare` takes `--breaking` for a change that no name shows (a default, a format), and
`--behind DEPENDANT=REASON` for each dependant that does not admit the new version yet.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ranges import edges, is_changed, mend, need, problems, set_version
from released import FOLDER, KeptWheel, Version, kept_wheels, version_of
from workspace import ROOT, Package, packages

UNRELEASED = re.compile(r"(?m)^## Unreleased[ \t]*$")


class ReleaseError(Exception):
    """A release that cannot be made as asked; the text says what to do."""


def find_package(key: str, root: Path = ROOT) -> Package:
    """Return the package with this folder or distribution name.

    Raises:
        ReleaseError: there is none.
    """
    for package in packages(root):
        if key in (package.key, package.name):
            return package
    raise ReleaseError(f"no package {key!r}; there are {', '.join(package.key for package in packages(root))}")


def status(root: Path = ROOT) -> list[str]:
    """Return one line for each package: released version, version of the workspace, what has changed since."""
    found, kept = packages(root), kept_wheels(root)
    return [_status_of(package, kept.get(package.name, [])) for package in found]


def _status_of(package: Package, kept: Sequence[KeptWheel]) -> str:
    present, needed = version_of(package), need(package, kept)
    if needed is None:
        return f"{package.name}: {present} in the workspace, never released"
    last = kept[-1].version
    if needed.version == last and present == last:
        if not is_changed(package, kept[-1]):
            return f"{package.name}: {last} released, unchanged"
        return f"{package.name}: {last} released, code has changed: release as {last.next_patch}"
    wanted = max(present, needed.version)
    why = f": {needed.reason}" if needed.version > last else ""
    return f"{package.name}: {last} released, {present} in the workspace, release as {wanted}{why}"


def next_version(package: Package, kept: Sequence[KeptWheel], *, breaking: bool) -> Version:
    """Return the version that the next release of a package has.

    Raises:
        ReleaseError: nothing has changed since the last one.
    """
    present, needed = version_of(package), need(package, kept)
    if needed is None:
        return present
    last = kept[-1].version
    if needed.version == last and present == last and not breaking and not is_changed(package, kept[-1]):
        raise ReleaseError(f"{package.name} is as in {last}: there is nothing to release")
    least = last.next_breaking if breaking else last.next_patch
    return max(present, needed.version, least)


def head_changelog(text: str, version: Version) -> str:
    """Return a CHANGELOG with its heading "Unreleased" replaced by the version.

    Raises:
        ReleaseError: there is no such heading.
    """
    if not UNRELEASED.search(text):
        raise ReleaseError('the CHANGELOG has no heading "## Unreleased": write under one what has changed')
    return UNRELEASED.sub(f"## {version}", text, count=1)


def stay_behind(dependant: Package, other: Package, reason: str) -> None:
    """Write into the dependant's pyproject.toml why it does not admit the new version of the other yet.

    A reason that is there already is replaced.
    """
    path = dependant.folder / "pyproject.toml"
    text, heading = path.read_text(), "[tool.offbeat.behind]\n"
    if heading not in text:
        text = text.replace("[build-system]\n", f"{heading}\n[build-system]\n", 1)
    before, _, after = text.partition(heading)
    section, following, rest = after.partition("\n[")
    section = re.sub(rf'(?m)^"?{re.escape(other.name)}"? *=.*\n?', "", section)
    # A string of JSON is one of TOML too.
    quoted = json.dumps(reason, ensure_ascii=False)
    path.write_text(f"{before}{heading}{other.name} = {quoted}\n{section}{following}{rest}")


def prepare(key: str, *, breaking: bool, behind: Mapping[str, str], root: Path = ROOT) -> list[str]:
    """Edit what a release of one package changes: its version and CHANGELOG, and its dependants' ranges.

    Args:
        key: folder or distribution name of the package.
        breaking: whether it is a breaking one although no public name is gone.
        behind: dependants that do not admit the new version yet, each with the reason.
        root: of the workspace.

    Returns:
        A line for each edit.

    Raises:
        ReleaseError: nothing has changed, the CHANGELOG says nothing, or a name is that of no dependant.
    """
    package, found, kept = find_package(key, root), packages(root), kept_wheels(root)
    version = next_version(package, kept.get(package.name, []), breaking=breaking)
    changelog = package.folder / "CHANGELOG.md"
    headed = head_changelog(changelog.read_text(), version)
    dependants = {edge.package.key: edge.package for edge in edges(found, kept) if edge.other == package}
    if unknown := sorted(behind.keys() - dependants.keys()):
        raise ReleaseError(f"{', '.join(unknown)} do not depend on {package.name}; {', '.join(dependants)} do")
    changelog.write_text(headed)
    set_version(package, version)
    for dependant, reason in behind.items():
        stay_behind(dependants[dependant], package, reason)
    done = [f"{package.name} {version_of(package)} -> {version}"]
    return done + [f"{dependant} stays behind: {reason}" for dependant, reason in behind.items()] + mend(root)


def keep(key: str, root: Path = ROOT) -> Path:
    """Build the wheel of a package into releases/ and return its path.

    Raises:
        ReleaseError: the version is released already, the CHANGELOG lacks it, a rule is broken, or uv cannot build it.
    """
    package = find_package(key, root)
    version, first = version_of(package), f"run --prepare {package.key} first"
    if any(wheel.version == version for wheel in kept_wheels(root).get(package.name, [])):
        raise ReleaseError(f"{package.name} {version} is released already: {first}")
    if not re.search(rf"(?m)^## {re.escape(str(version))}\b", (package.folder / "CHANGELOG.md").read_text()):
        raise ReleaseError(
            f"the CHANGELOG of {package.name} has no heading {version}: run --prepare {package.key} first"
        )
    if found := problems(root):
        raise ReleaseError("\n".join(found))
    command = ["uv", "build", "--quiet", "--wheel", f"--out-dir={root / FOLDER}", "--no-create-gitignore"]
    done = subprocess.run([*command, str(package.folder)], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise ReleaseError(f"uv build fails: {done.stderr.strip()}")
    return kept_wheels(root)[package.name][-1].path


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    text = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=text[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="fail where versions or ranges break the rules")
    mode.add_argument("--mend", action="store_true", help="raise versions and change ranges until the rules hold")
    mode.add_argument("--prepare", metavar="PACKAGE", help="edit version, CHANGELOG and the ranges of dependants")
    mode.add_argument("--keep", metavar="PACKAGE", help="build its wheel into releases/")
    parser.add_argument("--breaking", action="store_true", help="with --prepare: breaking, though no name is gone")
    parser.add_argument("--behind", metavar="DEPENDANT=REASON", action="append", default=[], help="with --prepare")
    chosen = parser.parse_args(arguments)
    if wrong := [each for each in chosen.behind if not all(each.partition("="))]:
        parser.error(f"--behind needs DEPENDANT=REASON: got {wrong[0]!r}")
    return chosen


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line."""
    chosen = parse_arguments(arguments)
    try:
        if chosen.check:
            found = problems(root)
            print("\n".join(found) or "versions and ranges hold")
            return 1 if found else 0
        if chosen.mend:
            print("\n".join(mend(root)) or "versions and ranges hold")
        elif chosen.prepare:
            behind = dict(each.split("=", 1) for each in chosen.behind)
            print("\n".join(prepare(chosen.prepare, breaking=chosen.breaking, behind=behind, root=root)))
            print(f'next: nox -s "versions({find_package(chosen.prepare, root).key})", then --keep {chosen.prepare}')
        elif chosen.keep:
            path = keep(chosen.keep, root)
            wheel = KeptWheel(path)
            print(f"{path.relative_to(root)}; commit it, and tag the commit {wheel.name}=={wheel.version}")
        else:
            print("\n".join(status(root)))
    except (ReleaseError, ValueError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
