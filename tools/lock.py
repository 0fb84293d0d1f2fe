"""Keeps the address-free lock: `requirements.lock` and the same pins in pyproject.toml.

`uv.lock` records the address of the registry it was made with, so it stays out of git and the first `uv run` makes
it anew. What makes that the same lock everywhere is the committed list of exact versions under
`[tool.uv] constraint-dependencies`. `requirements.lock` holds the same versions with hashes, for pip and for review.

    python tools/lock.py --check    the committed files agree with each other and with what uv resolves (the default)
    python tools/lock.py --add      keep every pin, add what new dependencies need, drop what is no longer needed
    python tools/lock.py --renew    the newest versions that the packages' ranges and `hold` allow
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from workspace import ROOT, packages

LOCK_NAME: Final = "requirements.lock"
HEADER: Final = """\
# Made by `nox -s lock`: every third-party version of the workspace, with hashes and without addresses. Extras that
# exclude each other are all in it: not every line can be installed beside every other.
# Do not edit. The same versions stand in pyproject.toml, where `uv run` and `uv sync` read them.
"""
PINS_START: Final = "# >>> pins: written by tools/lock.py, do not edit"
PINS_END: Final = "# <<< pins"
PINS_BLOCK: Final = re.compile(rf"{re.escape(PINS_START)}\n.*?{re.escape(PINS_END)}\n", re.DOTALL)
# What a machine may set that changes which versions uv finds; a lock must not depend on the machine.
MACHINE_SETTINGS: Final = (
    "UV_FIND_LINKS",
    "UV_CONSTRAINT",
    "UV_OVERRIDE",
    "UV_EXCLUDE_NEWER",
    "UV_PRERELEASE",
    "UV_RESOLUTION",
    "UV_NO_SOURCES",
    "UV_FROZEN",
    "UV_LOCKED",
    "VIRTUAL_ENV",
)
EXPORT: Final = (
    *("uv", "export", "--quiet", "--frozen", "--all-packages", "--all-extras", "--all-groups"),
    *("--no-emit-workspace", "--no-header", "--no-annotate"),
)


UV_TIMEOUT_S: Final = 600.0


class LockError(Exception):
    """A lock that cannot be made, or does not hold; the text says what to do."""


def held(root: Path = ROOT) -> list[str]:
    """Return versions kept back on purpose: `[tool.offbeat.lock] hold` in pyproject.toml."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    return list(settings["tool"]["offbeat"]["lock"]["hold"])


def pins_of(lock: str) -> list[str]:
    """Return the exact versions of an exported lock, sorted.

    The marker stays only where a package has several versions.
    """
    lines = [line.removesuffix("\\").strip() for line in lock.splitlines() if re.match(r"[a-z0-9]", line)]
    versions = Counter(line.split("==")[0] for line in lines)
    return sorted(line if versions[line.split("==")[0]] > 1 else line.split(" ;")[0] for line in lines)


def hashes_of(lock: str) -> dict[str, set[str]]:
    """Return hashes by "name==version" of an exported lock."""
    hashes: dict[str, set[str]] = {}
    pin = ""
    for line in lock.splitlines():
        if found := re.match(r"([a-z0-9][^ ;]*==[^ ;\\]+)", line):
            pin = found.group(1)
        elif found := re.search(r"--hash=(\S+)", line):
            hashes.setdefault(pin, set()).add(found.group(1))
    return hashes


def excluded_extras(pyproject: str) -> list[list[str]]:
    """Return which extras to leave out of each export, so that each is in one: `[tool.uv] conflicts`."""
    rivals = [
        {side["extra"] for side in conflict}
        for conflict in tomllib.loads(pyproject).get("tool", {}).get("uv", {}).get("conflicts", [])
    ]
    if not rivals:
        return [[]]
    names = sorted(set().union(*rivals))
    return [sorted({other for group in rivals if name in group for other in group - {name}}) for name in names]


def merged(exports: Sequence[str]) -> str:
    """Return one lock of several exports that differ in their extras.

    Raises:
        LockError: a version with two sets of files.
    """
    markers: dict[str, list[str]] = {}
    hashes: dict[str, list[str]] = {}
    for export in exports:
        for block in re.split(r"\n(?=[a-z0-9])", export.strip()):
            first, *rest = block.splitlines()
            pin, _, marker = first.removesuffix(" \\").partition(" ; ")
            markers.setdefault(pin, []).append(marker)
            if hashes.setdefault(pin, rest) != rest:
                raise LockError(f"{pin} has other files in another export: {rest} and {hashes[pin]}")
    lines = []
    for pin in sorted(markers, key=lambda each: each.split("==")):
        marker = "" if "" in markers[pin] else " or ".join(sorted(set(markers[pin])))
        lines += [pin + (f" ; {marker}" if marker else "") + " \\", *hashes[pin]]
    return "\n".join(lines) + "\n"


def with_pins(pyproject: str, pins: Sequence[str]) -> str:
    """Return the text of pyproject.toml with its block of pins replaced."""
    if not PINS_BLOCK.search(pyproject):
        raise LockError(
            f"pyproject.toml lacks the lines {PINS_START!r} and {PINS_END!r} under [tool.uv]: put them back"
        )
    listed = "".join(f'    "{pin}",\n' for pin in pins)
    block = f"{PINS_START}\nconstraint-dependencies = [\n{listed}]\n{PINS_END}\n"
    return PINS_BLOCK.sub(lambda _: block, pyproject)


def resolve(pins: Sequence[str], root: Path = ROOT) -> str:
    """Lock the workspace as a fresh clone would, under `pins`, and return the export.

    Raises:
        LockError: uv finds no solution, in its own words, or does not answer.
    """
    environment = {name: value for name, value in os.environ.items() if name not in MACHINE_SETTINGS}
    with tempfile.TemporaryDirectory(prefix="offbeat-lock-") as folder:
        clone = Path(folder)
        (clone / "pyproject.toml").write_text(with_pins((root / "pyproject.toml").read_text(), pins))
        for package in packages(root):
            target = clone / package.folder.relative_to(root)
            target.mkdir(parents=True)
            shutil.copy(package.folder / "pyproject.toml", target)
        _run_uv(("uv", "lock", "--quiet"), clone, environment)
        exports = [
            _run_uv((*EXPORT, *(f"--no-extra={extra}" for extra in excluded)), clone, environment)
            for excluded in excluded_extras((clone / "pyproject.toml").read_text())
        ]
    export = exports[0] if len(exports) == 1 else merged(exports)
    if "://" in export:
        raise LockError("uv export wrote an address; remove index settings from the workspace's pyproject.toml")
    return export


def _run_uv(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=UV_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        asked = " ".join(command[:2])
        raise LockError(f"{asked} gave no answer for {UV_TIMEOUT_S:g} s; is the registry reachable?") from error
    if done.returncode:
        raise LockError(f"uv finds no versions that fit together:\n{done.stderr.strip()}")
    return done.stdout


def write(lock: str, root: Path = ROOT) -> None:
    """Write both committed forms of the lock."""
    (root / LOCK_NAME).write_text(HEADER + lock)
    pyproject = root / "pyproject.toml"
    pyproject.write_text(with_pins(pyproject.read_text(), pins_of(lock)))


def committed_pins(root: Path = ROOT) -> list[str]:
    """Return the pins that `uv run` reads from pyproject.toml."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    return list(settings["tool"]["uv"].get("constraint-dependencies", []))


def difference(expected: Sequence[str], got: Sequence[str]) -> str:
    """Return lines that only one of the two has, marked - and +."""
    gone, new = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
    return "\n".join([*(f"  - {line}" for line in gone), *(f"  + {line}" for line in new)])


def check(root: Path = ROOT) -> None:
    """Check that the committed files agree and that a fresh clone resolves to them.

    Raises:
        LockError: they differ; the text lists the lines.
    """
    advice = "run `nox -s lock` and commit what changed"
    committed = (root / LOCK_NAME).read_text()
    pins = committed_pins(root)
    if differs := difference(pins_of(committed), pins):
        raise LockError(f"{LOCK_NAME} (-) and the pins of pyproject.toml (+) disagree; {advice}\n{differs}")
    fresh = resolve(pins, root)
    if differs := difference(pins, pins_of(fresh)):
        raise LockError(f"the pins (-) and what the packages' metadata needs (+) disagree; {advice}\n{differs}")
    # A registry may add files to a version later, such as a wheel for a new Python; none may go or change.
    offered = hashes_of(fresh)
    if lost := sorted(pin for pin, hashes in hashes_of(committed).items() if not hashes <= offered.get(pin, set())):
        raise LockError(f"files pinned by hash are no longer offered, of {', '.join(lost)}; {advice}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare only (the default)")
    mode.add_argument("--add", action="store_true", help="keep pins, follow the packages' metadata")
    mode.add_argument("--renew", action="store_true", help="take the newest versions allowed")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.renew or chosen.add:
            write(resolve(held() if chosen.renew else [*committed_pins(), *held()]))
        check()
    except LockError as error:
        print(f"lock: {error}", file=sys.stderr)
        return 1
    print(f"lock: {len(committed_pins())} pins hold")
    return 0


if __name__ == "__main__":
    sys.exit(main())
