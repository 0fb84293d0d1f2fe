"""Checks of the workspace. `nox -t cpu` runs those of CI together; `nox -s "test(core)"` runs one.

Everything of a backend has its tag: `nox -l | grep vllm` lists it, and `nox -t vllm` runs it. The tags are
{backends}; `nightly` for what is too long for CI; and `hardware` for what needs a device, which is
listed everywhere and skipped with the reason where the device is not.

Listed below: the whole workspace, packages of no backend, applications, one backend after another, and long sessions.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

import nox

ROOT: Final = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tools"))

import find_bubblewrap  # noqa: E402
import find_chromium  # noqa: E402
from environments import (  # noqa: E402
    NOX,
    OLDEST_TORCH,
    ON_NEWEST_TRANSFORMERS,
    ON_OLDEST_TORCH,
    PACKAGES,
    RUN,
    TEST_TOOLS,
    engine_environment,
    guest_tests,
    install,
    install_workspace,
    make_once,
    newest_transformers_environment,
    oldest_torch_environment,
    pytest,
    python_version,
    run,
    shared_environment,
)
from find_links import find_links  # noqa: E402
from hardware import HardwareTests, hardware_tests, num_passed, why_absent  # noqa: E402
from ranges import own_requirements  # noqa: E402
from release_sessions import check_install_lines, check_release, release_tools  # noqa: E402
from sessions import (  # noqa: E402
    add_all_of,
    add_session,
    backends,
    in_order,
    tags_of,
    text_of,
    text_of_versions,
    text_of_wheel,
)
from side_by_side import run_side_by_side  # noqa: E402
from wheels import OURS, test_versions, test_wheel  # noqa: E402
from workspace import Package  # noqa: E402

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["cpu"]

__doc__ = (__doc__ or "").format(backends=backends(PACKAGES))
HARDWARE: Final = hardware_tests(PACKAGES)
MAX_AT_ONCE: Final = 8
BY_DAY_AND_NIGHT: Final = "nightly or not nightly"
# Training frameworks that liveness lets be; nothing of ours needs them, so the lock does not have them.
FRAMEWORKS: Final = ("accelerate>=1.10,<2", "lightning>=2.5,<3", "trl>=1,<2")
# Whose losses and advantages ours are compared with.
PEERS: Final = ("trl>=1,<2", "verl>=0.9,<0.10")
# Whose losses sft-app has: those of its release 1.16 are compared.
TRL: Final = "trl>=1.16,<2"
# Run the notebooks of examples/.
NOTEBOOKS: Final = ("nbclient>=0.10,<0.12", "ipykernel>=7,<8")
# Asks the endpoint of offbeat-serve.
LM_EVAL: Final = "lm-eval[api]>=0.4.9,<0.5"
# Whose servers are asked by offbeat-data's adapter.
OPENENV: Final = "openenv>=0.10,<0.11"


@nox.session(tags=["cpu"])
def cpu(session: nox.Session) -> None:
    """All that CI runs, several sessions at a time: one alone leaves two cores idle for a third of its time."""
    tests = [name for name in ADDED if name.startswith(("test(", "engines("))]
    names = ["lint", "contracts", "tools", "lock_check", "docs", *tests, "wheels", "e2e"]
    run_at_once(session, names, (os.cpu_count() or 1) + 1)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, layers, and calls that not all ranks of a group reach."""
    bin_folder = shared_environment(session)
    commands = {
        "ruff check": (".",),
        "ruff format": ("--check", "."),
        "mypy": tuple(str(package.folder / "src") for package in PACKAGES),
        "mypy --explicit-package-bases --exclude=tools/tests tools": ("noxfile.py",),
        "lint-imports": ("--no-cache",),
        "hanglint": ("--no-cache", *(str(package.folder.relative_to(ROOT) / "src") for package in PACKAGES)),
    }
    failed = []
    for command, arguments in commands.items():
        program, *rest = command.split()
        try:
            run(session, bin_folder / program, *rest, *arguments)
        except nox.command.CommandFailed:
            failed.append(command)
    if failed:
        session.error(f"not clean: {', '.join(failed)}")


@nox.session
def contracts(session: nox.Session) -> None:
    """What holds for every package."""
    pytest(session, "contracts", "tests/contracts")


@nox.session
def tools(session: nox.Session) -> None:
    """Tests of tools/: the lock, the benchmarks, what the other sessions ask of the machine."""
    pytest(session, "tools", "tools/tests")


@nox.session
def lock_check(session: nox.Session) -> None:
    """The committed lock agrees with the packages' metadata, and a fresh clone resolves to it."""
    run(session, shared_environment(session) / "python", "tools/lock.py", "--check")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation as a site in build/site; a dead link or a page that no menu names fails."""
    run(session, shared_environment(session) / "python", "tools/docs_site.py", ROOT / "build" / "site")


@nox.session
def e2e(session: nox.Session) -> None:
    """Tests that cross packages."""
    pytest(session, "e2e", "tests/e2e")


def test_package(session: nox.Session, package: Package, *, engine: bool, marks: str) -> None:
    """Run what `test` runs, or the tests of it that are marked nightly."""
    if engine:
        bin_folder = engine_environment(session, package)
        pytest(session, f"{package.key}-engine", package.engine_tests, bin_folder=bin_folder, marks=marks)
        for folder in guest_tests(package):
            # In a process of their own: torch counts devices at its first backward pass, before a stand-in is there.
            if marks != "nightly" or has_marks(folder):
                name = f"{package.key}-engine-{folder.parent.parent.name}"
                pytest(session, name, folder, bin_folder=bin_folder, marks=marks)
        return
    folder = package.folder / "tests"
    others = [f"--ignore={tests.folder}" for tests in HARDWARE if tests.package == package]
    others += [f"--ignore={package.engine_tests}"] * package.engine_tests.is_dir()
    browser = on_machine(session, find_chromium.find_if_required) if package.key == "run" else None
    if package.key in ("data", "grpo-async-app"):
        on_machine(session, find_bubblewrap.find_if_required)
    pytest(session, package.key, folder, *others, marks=marks, OFFBEAT_CHROMIUM=browser)


def has_long_tests(package: Package, engine: bool) -> bool:
    """Return whether any of its tests is marked nightly: it takes long, and shorter ones keep most of its promise."""
    found = [path for path in (package.folder / "tests").rglob("test_*.py") if "mark.nightly" in path.read_text()]
    return any(path.is_relative_to(package.engine_tests) == engine for path in found)


def has_marks(folder: Path) -> bool:
    """Return whether a test of the folder is marked nightly."""
    return any("mark.nightly" in path.read_text() for path in folder.rglob("test_*.py"))


def test_engine_pair(session: nox.Session, folder: Path, *, marks: str) -> None:
    """Run what `engines` runs, or the tests of it that are marked nightly."""
    found = {package.key: package for package in PACKAGES}
    first, other = (engine_environment(session, found[key]) for key in folder.name.split("+"))
    pytest(session, folder.name, folder, bin_folder=first, marks=marks, OFFBEAT_PARTNER_PYTHON=str(other / "python"))


def on_machine(session: nox.Session, find: Callable[[], str | None]) -> str | None:
    """A program that some tests need; installed by CI where it may, and done without elsewhere."""
    try:
        return find()
    except FileNotFoundError as error:
        session.error(str(error))


def test_on_device(session: nox.Session, tests: HardwareTests) -> None:
    """Run tests that need a device; skip with the reason where it is not, fail where none of them passes."""
    if reason := why_absent(tests):
        session.skip(reason)
    junit = pytest(session, f"hardware-{tests.key}", tests.folder)
    if num_passed(junit) == 0:
        session.error(f"{tests.device} is here, but no test of {tests.folder} passed: all were skipped")


def test_on_oldest_torch(session: nox.Session, package: Package) -> None:
    """Run the tests of one package with the oldest torch that it supports."""
    bin_folder = oldest_torch_environment(session)
    marks = BY_DAY_AND_NIGHT if package.key == "liveness" else "not nightly"
    pytest(session, f"oldest-torch-{package.key}", package.folder / "tests", bin_folder=bin_folder, marks=marks)


def test_on_newest_transformers(session: nox.Session, package: Package) -> None:
    """Run the tests of one package with the newest transformers that the bounds admit; the lock has an older one."""
    bin_folder = newest_transformers_environment(session)
    pytest(session, f"newest-transformers-{package.key}", package.folder / "tests", bin_folder=bin_folder)


# Names of the sessions that follow from the folders, in the order of the listing.
ADDED: Final[list[str]] = []


def add(name: str, text: str, body: Callable[[nox.Session], None], *tags: str) -> None:
    """Add a session; one tagged nightly runs only where it is named or its tag is."""
    ADDED.append(name)
    add_session(name, text, body, tags, default="nightly" not in tags)


def add_sessions_of(package: Package) -> None:
    """Add all sessions of one package, one below the other."""
    key, tags = package.key, tags_of(package)
    kinds = [("", False)] * (package.folder / "tests").is_dir() + [("+engine", True)] * package.engine_tests.is_dir()
    for suffix, engine in kinds:
        body = partial(test_package, package=package, engine=engine)
        add(
            f"test({key}{suffix})",
            text_of(package, "engine" if engine else "test"),
            partial(body, marks="not nightly"),
            *tags,
        )
        if has_long_tests(package, engine):
            text = text_of(package, "long-engine" if engine else "long")
            add(f"long({key}{suffix})", text, partial(body, marks="nightly"), *tags, "nightly")
    for tests in (tests for tests in HARDWARE if tests.package == package):
        text = text_of(package, tests.device)
        add(f"hardware({tests.key})", text, partial(test_on_device, tests=tests), *tags, "hardware")
    add(f"wheels({key})", text_of_wheel(package), partial(test_wheel, package=package), *tags)
    if own_requirements(package, OURS):
        add(f"versions({key})", text_of_versions(package, OURS), partial(test_versions, package=package), *tags)
    if key in ON_OLDEST_TORCH:
        text = f"The tests of {package.name} with torch {OLDEST_TORCH}, the oldest that it supports."
        add(f"oldest_torch({key})", text, partial(test_on_oldest_torch, package=package), *tags, "nightly")
    if key in ON_NEWEST_TRANSFORMERS:
        text = f"The tests of {package.name} with the newest transformers of those that it admits."
        body = partial(test_on_newest_transformers, package=package)
        add(f"newest_transformers({key})", text, body, *tags, "nightly")


def add_sessions_of_pair(folder: Path) -> None:
    """Add those of two engines that exclude each other: the environment of the first gets the other's Python."""
    first, second = folder.name.split("+")
    tags = [tag for package in PACKAGES if package.key in (first, second) for tag in tags_of(package)]
    body = partial(test_engine_pair, folder=folder)
    text = f"{first} and {second}, each in its own environment and process: what one sends the other serves."
    add(f"engines({folder.name})", text, partial(body, marks="not nightly"), *tags)
    text = f"{first} and {second} together, the tests that are too long for CI."
    add(f"long_engines({folder.name})", text, partial(body, marks="nightly"), *tags, "nightly")


for each in in_order(PACKAGES):
    add_sessions_of(each)
for pair in sorted(ROOT.glob("tests/engines/*+*")):
    add_sessions_of_pair(pair)
for kind in (
    "test",
    "long",
    "hardware",
    "wheels",
    "versions",
    "oldest_torch",
    "newest_transformers",
    "engines",
    "long_engines",
):
    # All of them share one folder, so that the night has them one after another.
    nightly_as_one = ["nightly"] if kind == "versions" else []
    add_all_of(kind, [name for name in ADDED if name.startswith(f"{kind}(")], nightly_as_one)


def kill_at_random(session: nox.Session, launcher: str) -> None:
    """Run for five minutes while processes are killed at random."""
    name, file = f"chaos-{launcher}", "tests/e2e/test_chaos.py"
    pytest(session, name, file, marks=BY_DAY_AND_NIGHT, OFFBEAT_CHAOS_S="300", OFFBEAT_CHAOS_LAUNCHER=launcher)


for launcher, tags in {"local": ["nightly"], "ray": ["ray", "nightly"]}.items():
    text = f"Five minutes of a run with the launcher {launcher}, whose processes are killed at random."
    add(f"chaos({launcher})", text, partial(kill_at_random, launcher=launcher), *tags)


@nox.session(tags=["nightly"], default=False)
def sight(session: nox.Session) -> None:
    """A tiny vision-language model learns from drawn figures what only the picture shows."""
    pytest(session, "sight", "tests/nightly/test_learns_to_see.py", "-rP")


@nox.session(tags=["nightly"], default=False)
def models(session: nox.Session) -> None:
    """Every causal family of transformers, tiny: trained faithfully, or refused in one line, as docs/models.md says."""
    renew = os.environ.get("OFFBEAT_RENEW")
    pytest(session, "models", "tests/nightly/test_models.py", OFFBEAT_RENEW=renew)


@nox.session(tags=["nightly"], default=False)
def mutants(session: nox.Session) -> None:
    """Faults planted in every package, one at a time: at least 95 % are seen by the package's own tests."""
    python = shared_environment(session) / "python"
    run(session, python, "tools/mutants.py", "--json", NOX / "mutants.json", *session.posargs)


@nox.session(tags=["nightly"], default=False)
def simulation(session: nox.Session) -> None:
    """The simulator beside real runs."""
    pytest(session, "simulation", "tests/nightly/test_simulation_meets_runs.py")


@nox.session(tags=["nightly"], default=False)
def healthy(session: nox.Session) -> None:
    """Healthy programs with pauses of minutes, and random ones for as long as OFFBEAT_HEALTHY_HOURS says."""
    pytest(session, "healthy", "tests/nightly/test_healthy_zoo_long.py")
    file = "tests/e2e/test_healthy_agents.py"
    pytest(session, "healthy-agents", file, marks=BY_DAY_AND_NIGHT, OFFBEAT_HEALTHY_EXITS="50")


@nox.session(tags=["nightly"], default=False)
def zoo(session: nox.Session) -> None:
    """accelerate, Lightning and TRL under the monitor, in an environment of their own."""
    venv = NOX / "zoo"
    liveness = next(package for package in PACKAGES if package.key == "liveness")
    install(session, venv, f"--editable={liveness.folder}", *FRAMEWORKS, "--group=test")
    pytest(session, "zoo", "tests/nightly/test_healthy_frameworks.py", bin_folder=venv / "bin")


@nox.session(tags=["nightly"], default=False)
def peers(session: nox.Session) -> None:
    """Losses and advantages beside verl's and TRL's own functions, in an environment of their own."""
    venv = NOX / "peers"

    def make() -> None:
        # verl wants an older transformers than the lock has, so the pins are left out.
        run(session, "uv", "venv", "--quiet", "--allow-existing", "--python", python_version(), venv)
        own = [f"--editable={package.folder}" for package in PACKAGES if package.key in ("core", "objectives")]
        links = [f"--find-links={link}" for link in find_links()]
        command = ("uv", "pip", "install", "--quiet", "--no-config", f"--python={venv}", *links)
        run(session, *command, "torch==2.13.0", *PEERS, *own, *TEST_TOOLS)

    make_once(venv, make)
    pytest(session, "peers", "tests/nightly/test_losses_beside_peers.py", "-rP", bin_folder=venv / "bin")


@nox.session(tags=["nightly"], default=False)
def preferences(session: nox.Session) -> None:
    """Losses of sft-app and of TRL's trainers on the same batch, in an environment of their own."""
    venv = NOX / "trl"
    folders = {package.key: package.folder for package in PACKAGES}
    own = [f"--editable={folders['sft-app']}", f"--editable={folders['testing']}[models]"]
    install(session, venv, *own, TRL, "--group=test")
    file = "tests/nightly/test_preferences_meet_trl.py"
    pytest(session, "preferences", file, "-rP", bin_folder=venv / "bin", marks=BY_DAY_AND_NIGHT)


@nox.session(tags=["nightly"], default=False)
def start(session: nox.Session) -> None:
    """docs/start.md is followed as it is written, in an empty environment, beside an index and a Hub on loopback."""
    dist = NOX / "start" / "dist"
    run(session, "uv", "build", "--quiet", "--all-packages", "--wheel", f"--out-dir={dist}")
    tools, file = str(release_tools(session)), "tests/nightly/test_start_page.py"
    pytest(
        session, "start", file, "-rP", OFFBEAT_DIST=str(dist), OFFBEAT_INDEX_TOOLS=tools, PYTHONPATH=str(ROOT / "tools")
    )


@nox.session(tags=["nightly"], default=False)
def notebooks(session: nox.Session) -> None:
    """The notebooks of examples/, executed by a kernel in an environment of its own."""
    venv = NOX / "notebooks"
    folders = {package.key: package.folder for package in PACKAGES}
    own = [f"--editable={folders['offbeat']}", f"--editable={folders['testing']}[models]"]
    install(session, venv, *own, *NOTEBOOKS, "--group=test")
    pytest(session, "notebooks", "tests/nightly/test_notebooks.py", bin_folder=venv / "bin")


@nox.session(tags=["nightly"], default=False)
def lm_eval(session: nox.Session) -> None:
    """lm-eval, in an environment of its own, asks offbeat-serve."""
    venv = NOX / "lm-eval"
    install(session, venv, LM_EVAL)
    pytest(session, "lm-eval", "tests/nightly/test_lm_eval.py", "-rP", OFFBEAT_LM_EVAL_PYTHON=str(venv / "bin/python"))


@nox.session(tags=["nightly"], default=False)
def openenv(session: nox.Session) -> None:
    """Episodes on a server of OpenEnv's own library, in an environment of its own."""
    venv = NOX / "openenv"
    # It wants mcp 1 (by fastmcp 3), and the lock has mcp 2, so the pins are left out.
    run(session, "uv", "venv", "--quiet", "--allow-existing", "--python", python_version(), venv)
    run(session, "uv", "pip", "install", "--quiet", "--no-config", f"--python={venv}", OPENENV)
    python = str(venv / "bin/python")
    pytest(session, "openenv", "tests/nightly/test_openenv_server.py", OFFBEAT_OPENENV_PYTHON=python)


@nox.session(tags=["nightly"], default=False)
def recipes(session: nox.Session) -> None:
    """Every recipe for one machine trains SmolLM2-135M, which is made in an environment of its own."""
    venv, model = NOX / "smollm2", NOX / "smollm2-135m"
    if not (model / "tokenizer.json").exists():  # written last
        shutil.rmtree(model, ignore_errors=True)
        install(session, venv, "torch", "transformers", "gguf", "accelerate")
        run(session, venv / "bin/python", "tools/make_smollm2.py", model)
    pytest(session, "recipes", "tests/nightly/test_recipes_train.py", "-rP", OFFBEAT_SMOLLM2=str(model))


@nox.session(tags=["nightly"], default=False)
def release(session: nox.Session) -> None:
    """A release in build/release: equal builds, metadata, licences, bill of materials, versions; README.md sums up."""
    check_release(session)


@nox.session(tags=["nightly"], default=False)
def install_lines(session: nox.Session) -> None:
    """Every install line of the pages in an empty environment, from an index server; build/release/install-lines.md."""
    check_install_lines(session)


# Begun first: the others fill the time until they end.
LONGEST: Final = (
    *("test(engine-megatron+engine)", "e2e", "test(rollout-vllm+engine)", "test(grpo-async-app)"),
    *("test(actors)", "test(engine-torch)", "lint", "test(liveness)", "wheels"),
    *("test(data)", "test(sft-app)", "test(weightsync)", "test(rollout-torch)", "tools"),
    *("long(grpo-async-app)", "recipes", "chaos(ray)", "long_across", "healthy", "long(hanglint)", "sight"),
)


def run_at_once(session: nox.Session, names: Iterable[str], at_once: int) -> None:
    """Run sessions, several at a time, and fail where one does."""
    first = sorted(names, key=lambda name: LONGEST.index(name) if name in LONGEST else len(LONGEST))
    nox_command = (sys.executable, "-m", "nox", f"--noxfile={__file__}", "--session")
    commands = {name: (*nox_command, name, "--", *session.posargs) for name in first}
    failed = run_side_by_side(commands, min(at_once, MAX_AT_ONCE), {**os.environ, "OFFBEAT_NOX_RUN": RUN})
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session(tags=["nightly"], default=False)
def long_across(session: nox.Session) -> None:
    """Those of `e2e` and `tools` that are too long for CI."""
    pytest(session, "long-across", "tests/e2e", "tools/tests", marks="nightly")


@nox.session(default=False)
def nightly(session: nox.Session) -> None:
    """All that is tagged nightly, as many at a time as there are CPUs: its runs have several processes each."""
    listing = [sys.executable, "-m", "nox", f"--noxfile={__file__}", "--tags", "nightly", "--list", "--json"]
    listed = json.loads(subprocess.run(listing, capture_output=True, text=True, check=True).stdout)
    run_at_once(session, [each["session"] for each in listed], os.cpu_count() or 1)


@nox.session(default=False)
def lock(session: nox.Session) -> None:
    """Renew the lock: newest versions that fit. `nox -s lock -- --add` keeps the pins there are."""
    run(session, sys.executable, "tools/lock.py", *(session.posargs or ["--renew"]))


@nox.session(default=False)
def dev(session: nox.Session) -> None:
    """Make .venv for working here: every package editable, the CPU build of torch where pip knows one."""
    install_workspace(session, ROOT / ".venv")
    session.log("use it with: source .venv/bin/activate  (a plain `uv run` would swap torch: set UV_NO_SYNC=1)")
