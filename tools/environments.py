"""Environments of the nox sessions, made once in a run of nox, and commands run in them.

All tests share one environment (.nox/cpu): a heavy one costs seconds each time. Real engines have their own.
"""

import fcntl
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

import nox
from find_links import find_links
from workspace import ROOT, Package, packages, supported_versions

PACKAGES: Final = packages(ROOT)
SUPPORTED: Final = supported_versions(ROOT)
NOX: Final = ROOT / ".nox"
# Suites whose wall-clock time two workers shorten where they run alone: they compute, or wait (grpo-async-app takes 4
# minutes instead of 7). The others start processes that compute, or are over before a second worker has imported torch:
# two workers cost them a third to twice of their processor time (data 33 s instead of 25, core 8 s instead of 4).
TWO_WORKERS: Final = {
    **dict.fromkeys(
        ("grpo-async-app", "liveness", "mesh", "objectives", "rollout-trtllm", "testing", "tools", "weightsync"), "load"
    ),
    # Ranks wait for messages a third of the time; tests of a file continue from what its other tests have saved.
    "engine-megatron-engine": "loadfile",
}
PER_TEST_TIMEOUT_S: Final = 120
OLDEST_TORCH: Final = SUPPORTED["torch"].removeprefix(">=").partition(",")[0] + ".0"
# Whose suites run with it: machines with a GPU often hold it, and some can fetch no other.
ON_OLDEST_TORCH: Final = frozenset(
    ("core", "device", "liveness", "mesh", "objectives", "training", "weightsync", "engine-torch", "rollout-torch")
)
BESIDE_OLDEST_TORCH: Final = {*ON_OLDEST_TORCH, "data", "placement", "recipes", "run", "testing"}
# Whose suites run with the newest transformers that the bounds admit: they use it most, and the lock lags behind.
ON_NEWEST_TRANSFORMERS: Final = ("training", "engine-torch", "rollout-torch")
TEST_TOOLS: Final = (
    *("aiohttp", "httpx", "requests", "hypothesis", "openai>=3.50", "pillow"),
    *("pytest>=9", "pytest-asyncio>=1.4", "pytest-timeout>=2.4", "pytest-xdist>=3.8"),
)
# Of this run of nox, which the session `cpu` hands to those that it runs side by side.
RUN: Final = os.environ.get("OFFBEAT_NOX_RUN") or uuid.uuid4().hex
IS_SIDE_BY_SIDE: Final = "OFFBEAT_NOX_RUN" in os.environ


def python_version() -> str:
    """Return the Python of every environment: OFFBEAT_PYTHON, or nox's where it fits, else one that does."""
    fits = (3, 11) <= sys.version_info < (3, 14)
    own = f"{sys.version_info.major}.{sys.version_info.minor}" if fits else "3.13"
    return os.environ.get("OFFBEAT_PYTHON") or own


def environment() -> dict[str, str | None]:
    """Return what every command gets: nothing from a hub, one thread per process, and bytecode kept between processes.

    Without bytecode each process compiles torch and transformers anew: 9 s instead of 4 s (CI forbids writing it).
    """
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": None,
        "PYTHONPYCACHEPREFIX": str(NOX / "pycache"),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VIRTUAL_ENV": None,
    }


def run(session: nox.Session, *command: str | Path, **extra: str | None) -> None:
    """Run a command of an environment of ours, or uv."""
    session.run(*map(str, command), external=True, env={**environment(), **extra})


def install(session: nox.Session, venv: Path, *what: str | Path, fresh: bool = False) -> None:
    """Make `venv` and install into it, under the pins of the lock, which uv reads from pyproject.toml."""
    kept = "--clear" if fresh else "--allow-existing"
    run(session, "uv", "venv", "--quiet", kept, "--python", python_version(), venv)
    links = [f"--find-links={link}" for link in find_links()]
    run(session, "uv", "pip", "install", "--quiet", f"--python={venv}", *links, *what)


def make_once(what: Path, make: Callable[[], None]) -> None:
    """Make an environment or folder once in a run of nox; sessions beside this one wait for it."""
    NOX.mkdir(exist_ok=True)
    with (NOX / f"{what.name}.made").open("a+") as made:
        fcntl.flock(made, fcntl.LOCK_EX)
        made.seek(0)
        if made.read() != RUN:
            make()
            made.truncate(0)
            made.write(RUN)


def install_workspace(session: nox.Session, venv: Path) -> None:
    """Install every package in editable form, with its light extras, and the tools for tests and linting."""
    editable = [
        f"--editable={package.folder}" + (f"[{','.join(package.light_extras)}]" if package.light_extras else "")
        for package in PACKAGES
    ]
    install(session, venv, *editable, "--group=dev")


def guest_tests(package: Package) -> list[Path]:
    """Return folders `tests/on-KEY` of other packages: their tests that need this package's engine."""
    found = [other.folder / "tests" / f"on-{package.key}" for other in PACKAGES]
    return [folder for folder in found if folder.is_dir()]


def engine_environment(session: nox.Session, package: Package) -> Path:
    """Return an environment with the package, the engine it adapts and what its tests need; its bin folder."""
    venv = NOX / f"{package.key}-engine"
    own = f"--editable={package.folder}[{','.join(package.engine_extras)}]"
    folders = {other.key: other.folder for other in PACKAGES}
    guests = dict.fromkeys((folder.parts[-3] for folder in guest_tests(package)), "")
    beside = {"testing": "", **guests, **package.engine_tests_beside}
    others = [f"--editable={folders[key]}{extras}" for key, extras in beside.items()]
    make_once(venv, lambda: install(session, venv, own, *others, "--group=test"))
    return venv / "bin"


def shared_environment(session: nox.Session) -> Path:
    """Return the environment of all tests, made once per run of nox; its bin folder."""
    venv = NOX / "cpu"
    make_once(venv, lambda: install_workspace(session, venv))
    return venv / "bin"


def pytest(
    session: nox.Session,
    name: str,
    *arguments: str | Path,
    bin_folder: Path | None = None,
    marks: str = "not nightly",
    **extra: str | None,
) -> Path:
    """Run pytest with a hard limit per test, in the shared environment or another; the JUnit file it wrote."""
    bin_folder = bin_folder or shared_environment(session)
    junit = NOX / "junit" / f"{name}.xml"
    limits = ["-m", marks, f"--timeout={PER_TEST_TIMEOUT_S}"]
    shown = [f"--junitxml={junit}", "--durations=5", "--durations-min=2"]
    workers = ["-n2", f"--dist={TWO_WORKERS[name]}"] if name in TWO_WORKERS and not IS_SIDE_BY_SIDE else []
    run(session, bin_folder / "pytest", "--no-header", *workers, *limits, *shown, *arguments, *session.posargs, **extra)
    return junit


def oldest_torch_environment(session: nox.Session) -> Path:
    """Return an environment with the oldest torch; its bin folder."""
    return _unpinned_environment(session, "oldest-torch", f"torch=={OLDEST_TORCH}")


def newest_transformers_environment(session: nox.Session) -> Path:
    """Return an environment with the newest transformers that the bounds admit; its bin folder."""
    links = [f"--find-links={link}" for link in find_links()]
    newest = f"transformers{SUPPORTED['transformers']}"
    return _unpinned_environment(session, "newest-transformers", "torch==2.13.0", newest, "--upgrade", *links)


def _unpinned_environment(session: nox.Session, name: str, *what: str) -> Path:
    """Make an environment without the pins of the lock, which hold other versions."""
    venv = NOX / name

    def make() -> None:
        run(session, "uv", "venv", "--quiet", "--allow-existing", "--python", python_version(), venv)
        own = [f"--editable={package.folder}" for package in PACKAGES if package.key in BESIDE_OLDEST_TORCH]
        run(session, "uv", "pip", "install", "--quiet", "--no-config", f"--python={venv}", *what, *own, *TEST_TOOLS)

    make_once(venv, make)
    return venv / "bin"
