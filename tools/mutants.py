"""Plant small faults in the code, one at a time, and see whether the package's own tests fail.

    python tools/mutants.py [PACKAGE ...] [--only WORD] [--jobs 2] [--json FILE]

Each file tests/mutants/<package>.toml lists faults of one package:

    [[mutant]]
    file = "_policy.py"                  # in the import package
    why = "admission bound off by one"   # the promise that breaks
    old = "… >= self.config.max_admitted"      # exact text, there once
    new = "… > self.config.max_admitted"
    tests = ["test_async_policy_state.py"]     # tests of the package that should fail; all of them if not given

The source tree is never touched: a copy of the import package with the fault in it precedes it on PYTHONPATH, for the
tests and for every process that they start. First the same tests run without a fault and must pass, or nothing they
say counts. A fault is killed when a test fails or the tests pass their time limit, and survives when they pass.
Exit code 1 when fewer than MIN_KILLED_SHARE are killed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parent))

from workspace import ROOT, Package, packages

MIN_KILLED_SHARE: Final = 0.95
TIMEOUT_S: Final = 300
"""For the tests of one fault; those that a fault makes wait for ever count as failed."""
TEST_TIMEOUT_S: Final = 60
FOLDER: Final = ROOT / "tests" / "mutants"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault of one package.

    Args:
        package: folder name of the package.
        file: in the import package.
        why: the promise that breaks.
        old: exact text, found once in the file.
        new: what replaces it.
        tests: files of the package's tests to run; all if empty.
    """

    package: str
    file: str
    why: str
    old: str
    new: str
    tests: tuple[str, ...] = ()

    def apply(self, text: str) -> str:
        """Return the file's text with the fault in it.

        Raises:
            ValueError: `old` is not there exactly once, or `new` changes nothing.
        """
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(
                f"{self.package}/{self.file} ({self.why}): found {text.count(self.old)} times, not once: {self.old!r}"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of one fault: "killed", "survived", or "broken" (its tests fail without it too, or do not run)."""

    package: str
    file: str
    why: str
    result: str
    failed: str
    time_s: float


def read_mutants(folder: Path = FOLDER) -> list[Mutant]:
    """Read every list of faults, by package.

    Raises:
        ValueError: a list has an unknown key or lacks one.
    """
    found = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            try:
                found.append(Mutant(package=path.stem, **{**entry, "tests": tuple(entry.get("tests", ()))}))
            except TypeError as error:
                raise ValueError(f"{path}: {error}") from error
    return found


def run_tests(package: Package, tests: Sequence[str], overlay: Path | None) -> tuple[int, str]:
    """Run tests of a package, over a copy of it if given; return the exit code (-1: out of time) and what failed."""
    folder = package.folder / "tests"
    files = [str(folder / name) for name in tests] or [str(folder), f"--ignore={package.engine_tests}"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "-m",
        "not nightly",
        f"--timeout={TEST_TIMEOUT_S}",
    ]
    # The tests without a fault write bytecode, so that no fault compiles torch anew: 6 s of imports instead of 27.
    before = {"PYTHONPATH": str(overlay), "PYTHONDONTWRITEBYTECODE": "1"} if overlay else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **before}
    with subprocess.Popen(
        [*command, *files],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return -1, f"not over after {TIMEOUT_S} s"
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return process.returncode, lines[0] if lines else "\n".join(output.splitlines()[-3:])


def try_mutant(package: Package, mutant: Mutant) -> Outcome:
    """Run the tests of one fault over a copy of its package."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as temporary:
        copy = Path(temporary) / package.import_name
        shutil.copytree(package.source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / mutant.file).write_text(mutant.apply((copy / mutant.file).read_text()))
        code, failed = run_tests(package, mutant.tests, Path(temporary))
    # 1: tests failed; 2: an error in collection, such as an assert in a helper that makes parameters.
    result = {0: "survived", 1: "killed", 2: "killed", -1: "killed"}.get(code, "broken")
    return _outcome(mutant, result, failed if result != "survived" else "", time.monotonic() - began_s)


def try_package(package: Package, mutants: Sequence[Mutant], jobs: int) -> list[Outcome]:
    """Run the tests of all faults of one package, those without a fault first."""
    all_tests = sorted({mutant.tests for mutant in mutants})
    with ThreadPoolExecutor(jobs) as pool:
        sound = dict(zip(all_tests, pool.map(lambda tests: run_tests(package, tests, None), all_tests), strict=True))
        broken = [mutant for mutant in mutants if sound[mutant.tests][0] != 0]
        outcomes = [_outcome(mutant, "broken", f"without a fault: {sound[mutant.tests][1]}", 0.0) for mutant in broken]
        tried = [mutant for mutant in mutants if mutant not in broken]
        for outcome in pool.map(lambda mutant: try_mutant(package, mutant), tried):
            outcomes.append(outcome)
            print(f"{outcome.result:9}{outcome.time_s:5.0f} s  {package.key}/{outcome.file}: {outcome.why}", flush=True)
            if outcome.result == "killed":
                print(f"{'':18}by {outcome.failed[:140]}", flush=True)
    return outcomes


def summarise(outcomes: Iterable[Outcome]) -> tuple[str, bool]:
    """Return the closing lines, and whether enough faults were killed and none was broken."""
    outcomes = list(outcomes)
    by_result = {name: [each for each in outcomes if each.result == name] for name in ("killed", "survived", "broken")}
    share = len(by_result["killed"]) / max(len(outcomes), 1)
    lines = [
        f"{len(by_result['killed'])} of {len(outcomes)} faults killed ({share:.1%}; {MIN_KILLED_SHARE:.0%} required)"
    ]
    lines += [f"survived: {each.package}/{each.file}: {each.why}" for each in by_result["survived"]]
    lines += [f"broken: {each.package}/{each.file}: {each.why}: {each.failed}" for each in by_result["broken"]]
    return "\n".join(lines), share >= MIN_KILLED_SHARE and not by_result["broken"]


def _outcome(mutant: Mutant, result: str, failed: str, time_s: float) -> Outcome:
    return Outcome(
        package=mutant.package, file=mutant.file, why=mutant.why, result=result, failed=failed, time_s=round(time_s, 1)
    )


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line names and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="folder names; all if none is given")
    parser.add_argument("--only", default="", help="only faults with this word in their reason or file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="faults tried at once")
    parser.add_argument("--json", type=Path, help="file for the outcomes")
    args = parser.parse_args(arguments)
    outcomes: list[Outcome] = []
    for package in packages():
        wanted = [each for each in read_mutants() if each.package == package.key and args.only in each.why + each.file]
        if wanted and (not args.packages or package.key in args.packages):
            outcomes += try_package(package, wanted, args.jobs)
    text, passed = summarise(outcomes)
    print(text)
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
