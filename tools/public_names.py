"""Keeps the list of each package's public names, so that one is never lost or added unnoticed.

python tools/public_names.py            compare tests/contracts/public_names/ with each package's `__all__`
python tools/public_names.py --renew    write them anew, and raise versions and ranges as tools/release.py --mend does
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ranges import mend
from released import declared_names
from workspace import ROOT, Package, packages


def pinned_names_file(package: Package, root: Path = ROOT) -> Path:
    """Return where the public names of a package are pinned, one a line."""
    return root / "tests" / "contracts" / "public_names" / f"{package.import_name}.txt"


def pinned_names(package: Package, root: Path = ROOT) -> list[str]:
    """Return the pinned names; empty when the package is not pinned yet."""
    path = pinned_names_file(package, root)
    return path.read_text().split() if path.is_file() else []


def renew(root: Path = ROOT) -> None:
    """Pin the names of every package, and forget packages that are gone."""
    current = {pinned_names_file(package, root): declared_names(package) for package in packages(root)}
    folder = root / "tests" / "contracts" / "public_names"
    folder.mkdir(parents=True, exist_ok=True)
    for path in set(folder.glob("*.txt")) - set(current):
        path.unlink()
    for path, names in current.items():
        path.write_text("".join(f"{name}\n" for name in names))


def differences(root: Path = ROOT) -> list[str]:
    """Return one line per package whose names differ from the pinned ones."""
    found = []
    for package in packages(root):
        declared, pinned = set(declared_names(package)), set(pinned_names(package, root))
        if declared != pinned:
            added, lost = sorted(declared - pinned), sorted(pinned - declared)
            found.append(f"{package.import_name}: added {added}, lost {lost}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--renew", action="store_true", help="write the pinned names anew")
    if parser.parse_args(arguments).renew:
        renew()
        print("\n".join(mend()) or "versions and ranges hold")
    found = differences()
    for line in found:
        print(f"{line}; if that is meant, say so in the CHANGELOG and run tools/public_names.py --renew")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
