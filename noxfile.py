"""Checks of the workspace, named by package and backend. `nox -l` lists them; `nox -t cpu` runs those of CI together.

Packages are found by folder, so a new one gets its sessions without a change here. All tests share one environment
(.nox/cpu): a heavy one costs seconds each time, and what isolation there is to prove, `wheels` proves.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import nox

ROOT: Final = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tools"))

import find_bubblewrap  # noqa: E402
import find_chromium  # noqa: E402
from find_links import find_links  # noqa: E402
from hardware import HardwareTests, hardware_tests, num_passed, why_absent  # noqa: E402
from side_by_side import run_side_by_side  # noqa: E402
from workspace import Package, packages  # noqa: E402

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["cpu"]

PACKAGES: Final = packages(ROOT)
HARDWARE: Final = hardware_tests(PACKAGES)
NOX: Final = ROOT / ".nox"
WHEELS: Final = NOX / "wheels"
# Suites whose wall-clock time two workers shorten where they run alone: they compute, or wait. The others start
# processes that compute, or are over before a second worker has imported torch (measured: docs/decisions.md).
TWO_WORKERS: Final = {
    **dict.fromkeys(
        ("grpo-async-app", "liveness", "mesh", "objectives", "rollout-trtllm", "testing", "tools", "weightsync"), "load"
    ),
    # Ranks wait for messages a third of the time; tests of a file go on from what others of it have saved.
    "engine-megatron-engine": "loadfile",
}
MAX_AT_ONCE: Final = 8
PER_TEST_TIMEOUT_S: Final = 120
BY_DAY_AND_NIGHT: Final = "nightly or not nightly"
OLDEST_TORCH: Final = "2.11.0"
# Whose suites run with it: machines with a GPU often hold it, and some can fetch no other.
ON_OLDEST_TORCH: Final = frozenset(
    ("types", "liveness", "mesh", "objectives", "training", "weightsync", "engine-torch", "rollout-torch")
)
BESIDE_OLDEST_TORCH: Final = {*ON_OLDEST_TORCH, "data", "placement", "recipes", "run", "testing"}
TEST_TOOLS: Final = (
    *("aiohttp", "httpx", "requests", "hypothesis", "openai>=3.50", "pillow"),
    *("pytest>=9", "pytest-asyncio>=1.4", "pytest-timeout>=2.4", "pytest-xdist>=3.8"),
)
# Training frameworks that liveness lets be; nothing of ours needs them, so the lock does not have them.
FRAMEWORKS: Final = ("accelerate>=1.10,<2", "lightning>=2.5,<3", "trl>=1,<2")
# Whose losses and advantages ours are compared with.
PEERS: Final = ("trl>=1,<2", "verl>=0.9,<0.10")
# Whose losses sft-app has: those of its release 1.16 are compared.
TRL: Final = "trl>=1.16,<2"
# Asks the endpoint of offbeat-serve.
LM_EVAL: Final = "lm-eval[api]>=0.4.9,<0.5"
# Whose servers are asked by offbeat-data's adapter.
OPENENV: Final = "openenv>=0.10,<0.11"
# Of this run of nox, which the session `cpu` hands to those that it runs side by side.
RUN: Final = os.environ.get("OFFBEAT_NOX_RUN") or uuid.uuid4().hex
IS_SIDE_BY_SIDE: Final = "OFFBEAT_NOX_RUN" in os.environ


def python_version() -> str:
    """The Python of every environment: OFFBEAT_PYTHON, or the one that runs nox where it fits, else one that does."""
    fits = (3, 11) <= sys.version_info < (3, 14)
    own = f"{sys.version_info.major}.{sys.version_info.minor}" if fits else "3.13"
    return os.environ.get("OFFBEAT_PYTHON") or own


def environment() -> dict[str, str | None]:
    """What every command gets: nothing from a hub, one thread per process, and bytecode kept between processes.

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


def engine_environment(session: nox.Session, package: Package) -> Path:
    """An environment with the package, the engine it adapts and what its tests need; its bin folder."""
    venv = NOX / f"{package.key}-engine"
    own = f"--editable={package.folder}[{','.join(package.engine_extras)}]"
    beside = ["testing", *package.engine_tests_beside]
    others = [f"--editable={other.folder}" for other in PACKAGES if other.key in beside]
    make_once(venv, lambda: install(session, venv, own, *others, "--group=test"))
    return venv / "bin"


def shared_environment(session: nox.Session) -> Path:
    """The environment of all tests, made once per run of nox; its bin folder."""
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
    told = [f"--junitxml={junit}", "--durations=5", "--durations-min=2"]
    workers = ["-n2", f"--dist={TWO_WORKERS[name]}"] if name in TWO_WORKERS and not IS_SIDE_BY_SIDE else []
    run(session, bin_folder / "pytest", "--no-header", *workers, *limits, *told, *arguments, *session.posargs, **extra)
    return junit


def by_package(found: list[Package]) -> list[Any]:
    """One session per package, named by its folder."""
    return [nox.param(package, id=package.key) for package in found]


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


TESTED: Final = [
    *[nox.param(package, False, id=package.key) for package in PACKAGES if (package.folder / "tests").is_dir()],
    *[nox.param(package, True, id=f"{package.key}+engine") for package in PACKAGES if package.engine_tests.is_dir()],
]


@nox.session
@nox.parametrize("package, engine", TESTED)
def test(session: nox.Session, package: Package, engine: bool) -> None:
    """Tests of one package or application; "+engine": those on the real engine that it adapts."""
    test_package(session, package, engine=engine, marks="not nightly")


def test_package(session: nox.Session, package: Package, *, engine: bool, marks: str) -> None:
    """Run what `test` runs, or the tests of it that are marked nightly."""
    if engine:
        bin_folder = engine_environment(session, package)
        pytest(session, f"{package.key}-engine", package.engine_tests, bin_folder=bin_folder, marks=marks)
        return
    folder = package.folder / "tests"
    others = [f"--ignore={tests.folder}" for tests in HARDWARE if tests.package == package]
    others += [f"--ignore={package.engine_tests}"] * package.engine_tests.is_dir()
    browser = on_machine(session, find_chromium.find_if_required) if package.key == "run" else None
    if package.key in ("data", "grpo-async-app"):
        on_machine(session, find_bubblewrap.find_if_required)
    pytest(session, package.key, folder, *others, marks=marks, OFFBEAT_CHROMIUM=browser)


def has_long_tests(package: Package, engine: bool) -> bool:
    """Whether any of its tests is marked nightly: it takes long, and shorter ones keep most of its promise."""
    found = [path for path in (package.folder / "tests").rglob("test_*.py") if "mark.nightly" in path.read_text()]
    return any(path.is_relative_to(package.engine_tests) == engine for path in found)


@nox.session(tags=["nightly"], default=False)
@nox.parametrize("package, engine", [param for param in TESTED if has_long_tests(*param.args)])
def long(session: nox.Session, package: Package, engine: bool) -> None:
    """The tests of one package that are too long for CI."""
    test_package(session, package, engine=engine, marks="nightly")


ENGINE_PAIRS: Final = [nox.param(folder, id=folder.name) for folder in sorted(ROOT.glob("tests/engines/*+*"))]


@nox.session
@nox.parametrize("folder", ENGINE_PAIRS)
def engines(session: nox.Session, folder: Path) -> None:
    """Two engines whose environments exclude each other: tests run in that of the first, and get the other's Python."""
    test_engine_pair(session, folder, marks="not nightly")


@nox.session(tags=["nightly"], default=False)
@nox.parametrize("folder", ENGINE_PAIRS)
def long_engines(session: nox.Session, folder: Path) -> None:
    """Those of `engines` that are too long for CI."""
    test_engine_pair(session, folder, marks="nightly")


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


@nox.session
@nox.parametrize("package", by_package(PACKAGES))
def wheels(session: nox.Session, package: Package) -> None:
    """One wheel, built and installed alone in an empty environment, imports."""
    build = ("uv", "build", "--quiet", "--all-packages", "--wheel", "--clear", f"--out-dir={WHEELS}")
    make_once(WHEELS, lambda: run(session, *build))
    # The same folder each time: bytecode is then found again, and an import of torch costs a third.
    venv = NOX / "wheel"
    # uv's cache knows a wheel of a folder by its path and version, and would install the one that lay here before.
    anew = [f"--reinstall-package={own.name}" for own in PACKAGES]
    install(session, venv, "--no-sources", f"--find-links={WHEELS}", *anew, package.name, fresh=True)
    run(session, "uv", "pip", "check", "--quiet", f"--python={venv}")
    with session.chdir(WHEELS):
        code = f"import {package.import_name} as it; assert 'site-packages' in it.__file__, it.__file__"
        run(session, venv / "bin" / "python", "-P", "-c", code)


if HARDWARE:

    @nox.session
    @nox.parametrize("tests", [nox.param(tests, id=tests.key) for tests in HARDWARE])
    def hardware(session: nox.Session, tests: HardwareTests) -> None:
        """Tests that need a device; skipped with the reason where it is not, failed where none of them passes."""
        if reason := why_absent(tests):
            session.skip(reason)
        junit = pytest(session, f"hardware-{tests.key}", tests.folder)
        if num_passed(junit) == 0:
            session.error(f"{tests.device} is here, but no test of {tests.folder} passed: all were skipped")


@nox.session(tags=["nightly"], default=False)
@nox.parametrize("launcher", [nox.param(name, id=name) for name in ("local", "ray")])
def chaos(session: nox.Session, launcher: str) -> None:
    """Five minutes of a run whose processes are killed at random."""
    name, file = f"chaos-{launcher}", "tests/e2e/test_chaos.py"
    pytest(session, name, file, marks=BY_DAY_AND_NIGHT, OFFBEAT_CHAOS_S="300", OFFBEAT_CHAOS_LAUNCHER=launcher)


@nox.session(tags=["nightly"], default=False)
def sight(session: nox.Session) -> None:
    """A tiny vision-language model learns from drawn figures what only the picture tells."""
    pytest(session, "sight", "tests/nightly/test_learns_to_see.py", "-rP")


@nox.session(tags=["nightly"], default=False)
def models(session: nox.Session) -> None:
    """Every causal family of transformers, tiny: trained faithfully, or refused in one line, as docs/models.md says."""
    renew = os.environ.get("OFFBEAT_RENEW")
    pytest(session, "models", "tests/nightly/test_models.py", OFFBEAT_RENEW=renew)


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
        own = [f"--editable={package.folder}" for package in PACKAGES if package.key in ("types", "objectives")]
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


def oldest_torch_environment(session: nox.Session) -> Path:
    """An environment with the oldest torch, without the pins of the lock, which hold another; its bin folder."""
    venv = NOX / "oldest-torch"

    def make() -> None:
        run(session, "uv", "venv", "--quiet", "--allow-existing", "--python", python_version(), venv)
        own = [f"--editable={package.folder}" for package in PACKAGES if package.key in BESIDE_OLDEST_TORCH]
        command = ("uv", "pip", "install", "--quiet", "--no-config", f"--python={venv}")
        run(session, *command, f"torch=={OLDEST_TORCH}", *own, *TEST_TOOLS)

    make_once(venv, make)
    return venv / "bin"


@nox.session(tags=["nightly"], default=False)
@nox.parametrize("package", by_package([package for package in PACKAGES if package.key in ON_OLDEST_TORCH]))
def oldest_torch(session: nox.Session, package: Package) -> None:
    """Tests of one package with the oldest torch that it supports."""
    bin_folder = oldest_torch_environment(session)
    marks = BY_DAY_AND_NIGHT if package.key == "liveness" else "not nightly"
    pytest(session, f"oldest-torch-{package.key}", package.folder / "tests", bin_folder=bin_folder, marks=marks)


@nox.session
def e2e(session: nox.Session) -> None:
    """Tests that cross packages."""
    pytest(session, "e2e", "tests/e2e")


# Begun first: the others fill the time until they end.
LONGEST: Final = (
    *("test(engine-megatron+engine)", "e2e", "test(rollout-vllm+engine)", "test(grpo-async-app)"),
    *("test(actors)", "test(engine-torch)", "lint", "test(liveness)", "wheels"),
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


@nox.session(tags=["cpu"])
def cpu(session: nox.Session) -> None:
    """All that CI runs, several sessions at a time: one alone leaves two cores idle for a third of its time."""
    tests = [f"test({param.id})" for param in TESTED] + [f"engines({param.id})" for param in ENGINE_PAIRS]
    names = ["lint", "contracts", "tools", "lock_check", *tests, "wheels", "e2e"]
    run_at_once(session, names, (os.cpu_count() or 1) + 1)


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
