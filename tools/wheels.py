"""Sessions that install wheels: each package alone, beside the newest and the oldest versions that its ranges admit."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import nox
from environments import NOX, PACKAGES, install, make_once, run, shared_environment
from own_versions import build_all, choose, offer
from ranges import own_requirements
from workspace import Package, dist_name

BUILT: Final = NOX / "wheels"
OURS: Final = {package.name for package in PACKAGES}
# uv's cache knows a wheel of a folder by its path and version, and would install the one that lay here before.
ANEW: Final = [f"--reinstall-package={name}" for name in sorted(OURS)]
# Of mypy, with the folder of the wheels as MYPYPATH: it goes before the editable packages of the environment.
TYPES: Final = ("--config-file=pyproject.toml", "--follow-imports=silent")
# A name may need a package of an extra, which is then missing whole; a module that is missing in one is an error.
IMPORT: Final = """
import {module} as it
assert 'site-packages' in it.__file__, it.__file__
for name in getattr(it, '__all__', ()):
    try:
        getattr(it, name)
    except ModuleNotFoundError as error:
        if not {has_extras} or '.' in error.name:
            raise
"""


def built() -> Path:
    """Return the folder of the working tree's wheels, made once in a run of nox."""
    make_once(BUILT, lambda: build_all(BUILT))
    return BUILT


def offered(which: Literal["oldest", "newest"]) -> Path:
    """Return a folder of wheels of the working tree and kept ones, made once in a run of nox.

    Where a released version has changed since, "oldest" has it as it was released, and "newest" as it is here.
    """
    folder = NOX / f"wheels-{which}"
    make_once(folder, lambda: offer(which, built(), folder))
    return folder


def test_wheel(session: nox.Session, package: Package) -> None:
    """Install one wheel in an empty environment and use its public names; then again with the oldest of our others."""
    newest, oldest = offered("newest"), offered("oldest")
    # The same folder each time: bytecode is then found again, and an import of torch costs a third.
    venv = NOX / "wheel"
    install(session, venv, "--no-sources", f"--find-links={newest}", *ANEW, package.name, fresh=True)
    use_wheel(session, venv, package)
    if any(dist_name(requirement) in OURS for requirement in package.dependencies):
        lowest = ("--no-sources", "--resolution=lowest", f"--find-links={oldest}", *ANEW)
        install(session, venv, *lowest, wheel_of(package))
        use_wheel(session, venv, package)


def use_wheel(session: nox.Session, venv: Path, package: Package) -> None:
    """Check an environment, and load every public name of the package installed in it."""
    run(session, "uv", "pip", "check", "--quiet", f"--python={venv}")
    with session.chdir(built()):
        code = IMPORT.format(module=package.import_name, has_extras=bool(package.extras))
        run(session, venv / "bin" / "python", "-P", "-c", code)


def wheel_of(package: Package) -> Path:
    """Return the wheel of a package as the working tree has it."""
    (path,) = built().glob(f"{package.import_name}-*.whl")
    return path


def test_versions(session: nox.Session, package: Package) -> None:
    """Check the types of a package against the oldest versions of our others that it admits.

    Names that a version lacks are found by the contracts; parameters and attributes that it lacks are found here.
    """
    bin_folder, folder = shared_environment(session), NOX / "versions"
    wheels = [wheel_of(package), *oldest_others(package)]
    shutil.rmtree(folder, ignore_errors=True)
    run(session, "uv", "pip", "install", "--quiet", "--no-deps", *ANEW, f"--target={folder}", *wheels)
    run(
        session,
        bin_folder / "mypy",
        *TYPES,
        f"--cache-dir={NOX / 'mypy-versions'}",
        "-p",
        package.import_name,
        MYPYPATH=str(folder),
    )


def oldest_others(package: Package) -> Sequence[Path]:
    """Return the wheels of the oldest of our others that a package admits, those of its extras among them."""
    oldest = offered("oldest")
    chosen = choose(own_requirements(package, OURS), oldest, "lowest")
    return [next(oldest.glob(f"{name.replace('-', '_')}-{version}-*.whl")) for name, version in chosen.items()]
