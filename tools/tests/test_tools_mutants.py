"""The list of planted faults fits the code, and the tool that plants them distinguishes killed from survived."""

from collections import Counter
from pathlib import Path

import mutants
import pytest
from mutants import Mutant, Outcome, read_mutants, summarise, try_package
from workspace import Package, packages

SOURCES = {package.key: package for package in packages()}


def test_every_package_has_faults_and_each_fits_the_code_once():
    found = read_mutants()
    assert len(found) >= 120
    assert {mutant.package for mutant in found} == set(SOURCES)
    planted: Counter[tuple[str, str, str]] = Counter()  # two faults are one where they leave the same text
    for mutant in found:
        package = SOURCES[mutant.package]
        text = mutant.apply((package.source / mutant.file).read_text())
        planted[mutant.package, mutant.file, text] += 1
        assert all((package.folder / "tests" / name).is_file() for name in mutant.tests), mutant
    assert [key[:2] for key, number in planted.items() if number > 1] == []


def test_a_fault_that_does_not_fit_is_refused():
    mutant = Mutant(package="x", file="_a.py", why="w", old="a < b", new="a <= b")
    assert mutant.apply("if a < b:") == "if a <= b:"
    for text in ("if a > b:", "a < b and a < b"):
        with pytest.raises(ValueError, match="not once"):
            mutant.apply(text)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Write a package of one function, with tests that find one of two faults."""
    source, tests = tmp_path / "src" / "offbeat_tiny", tmp_path / "tests"
    source.mkdir(parents=True)
    tests.mkdir()
    (source / "__init__.py").write_text("def least(a, b):\n    return a if a < b else b\n")
    (tests / "test_tiny.py").write_text(
        "import subprocess, sys\nfrom offbeat_tiny import least\n\n"
        "def test_least():\n    assert least(1, 2) == 1\n\n"
        "def test_least_elsewhere():\n"
        "    code = 'from offbeat_tiny import least; print(least(2, 1))'\n"
        "    assert subprocess.check_output([sys.executable, '-c', code], text=True).strip() == '1'\n"
    )
    (tests / "test_broken.py").write_text("def test_no():\n    assert False\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))
    return Package(folder=tmp_path, metadata={"project": {"name": "offbeat-tiny"}})


def fault(old: str, new: str, *tests: str) -> Mutant:
    return Mutant(package="tiny", file="__init__.py", why=new, old=old, new=new, tests=tests)


def test_faults_are_killed_survive_or_prove_nothing(package: Package):
    before = (package.source / "__init__.py").read_text()
    faults = [
        fault("a < b", "a > b", "test_tiny.py"),
        fault("a < b", "a <= b", "test_tiny.py"),
        fault("return a", "return b", "test_broken.py"),
    ]
    found = {each.why: each for each in try_package(package, faults, jobs=2)}
    assert {why: each.result for why, each in found.items()} == {
        "a > b": "killed",
        "a <= b": "survived",
        "return b": "broken",
    }
    assert "test_least" in found["a > b"].failed
    assert (package.source / "__init__.py").read_text() == before


def test_a_fault_that_waits_for_ever_is_killed(package: Package, monkeypatch: pytest.MonkeyPatch):
    waits = fault("    return a", "    import time; time.sleep(1000)\n    return a", "test_tiny.py")
    monkeypatch.setattr(mutants, "TEST_TIMEOUT_S", 2)
    assert mutants.try_mutant(package, waits).result == "killed"
    monkeypatch.setattr(mutants, "TIMEOUT_S", 0.5)
    assert mutants.run_tests(package, ["test_tiny.py"], None) == (-1, "not over after 0.5 s")


def test_too_many_survivors_and_any_broken_one_fail():
    def outcomes(killed: int, survived: int, broken: int = 0) -> list[Outcome]:
        results = ["killed"] * killed + ["survived"] * survived + ["broken"] * broken
        return [Outcome(package="p", file="f", why="w", result=each, failed="", time_s=0.0) for each in results]

    assert summarise(outcomes(95, 5))[1]
    assert not summarise(outcomes(94, 6))[1]
    assert not summarise(outcomes(99, 0, 1))[1]
    assert not summarise([])[1]
    assert "survived: p/f: w" in summarise(outcomes(1, 1))[0]
