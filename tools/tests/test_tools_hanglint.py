"""What counts as found, over made-up trees and the real analysis."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench.hanglint_score import DATA, Bug, Score, fitting_rules, read_bugs, recall

from offbeat_hanglint import RULES

BENCH = DATA.parent / "hanglint.py"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
RECORD = {
    "id": "made-up", "repo": "someone/trainer", "parent_commit": COMMIT, "class": "B",
    "mechanism": "rank 0 reduces alone", "pattern": "collective-under-local-condition", "statically_detectable": "yes",
    "functions": ["trainer/loop.py::Loop.step"], "lines": ["trainer/loop.py:6-7"],
}  # fmt: skip
FAULTY = """\
import torch.distributed as dist


class Loop:
    def step(self, loss):
        if dist.get_rank() == 0:
            dist.all_reduce(loss)
        return loss
"""
MENDED = FAULTY.replace("        if dist.get_rank() == 0:\n    ", "")


@dataclass(frozen=True)
class Said:
    rule: str = "HL001"
    confidence: str = "medium"
    path: str = "trainer/loop.py"
    line: int = 100
    function: str = "other"


@pytest.mark.parametrize(
    ("said", "is_found"),
    [
        (Said(function="Loop.step"), True),
        (Said(function="Loop.step.inner"), True),
        (Said(function="Loop.step_once"), False),
        (Said(line=17), True),
        (Said(line=18), False),
        (Said(line=6, path="trainer/other.py"), False),
        (Said(function="Loop.step", rule="HL060"), False),
    ],
)
def test_found_is_a_fitting_rule_in_the_function_or_within_ten_lines(said, is_found):
    assert bool(Bug.of(RECORD).matches([said], fitting_rules())) is is_found


def test_a_bug_outside_of_functions_is_found_by_its_lines_alone():
    bug = Bug.of({**RECORD, "functions": ["trainer/loop.py::<module>"]})
    assert not bug.matches([Said(function="<module>")], fitting_rules())
    assert bug.matches([Said(function="<module>", line=7)], fitting_rules())


def test_recall_counts_each_kind_and_all():
    bugs = [Bug.of(RECORD), *(Bug.of({**RECORD, "class": "C"}) for _ in range(3))]
    found = ((("HL001", "high", 6),), (("HL001", "low", 6), ("HL002", "medium", 6)), (("HL001", "low", 6),), ())
    scores = [Score(bug, by) for bug, by in zip(bugs, found, strict=True)]
    rows = {
        row["class"]: (row["bugs"], row["found"], row["by default"], row["at high"]) for row in recall(scores, "class")
    }
    assert rows == {"B": (1, 1, 1, 1), "C": (3, 2, 1, 0), "all": (4, 3, 2, 1)}


def test_every_pattern_of_the_corpus_names_rules_that_exist():
    fitting = fitting_rules()
    assert {rule for rules in fitting.values() for rule in rules} <= {rule.id for rule in RULES}
    assert {str(bug.record["pattern"]) for bug in read_bugs(DATA / "unseen.jsonl")} <= set(fitting)


def bench(*words: str | Path) -> dict:
    """Return the report of the benchmark, run in its own process."""
    ended = subprocess.run(
        [sys.executable, BENCH, *words, "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture
def corpus(tmp_path):
    """Write a corpus of one bug, its tree as a folder, and projects, one of them with the fixed form."""
    (tmp_path / "bugs.jsonl").write_text(json.dumps(RECORD) + "\n")
    for tree, source in (
        (f"trees/someone+trainer@{COMMIT[:10]}", FAULTY),
        ("newest/faulty", FAULTY),
        ("newest/mended", MENDED),
    ):
        (tmp_path / tree / "trainer").mkdir(parents=True)
        (tmp_path / tree / "trainer/loop.py").write_text(source)
    return tmp_path


def test_the_bug_of_a_tree_is_found_and_the_mended_project_is_clean(corpus):
    words = ("--newest", corpus / "newest", "--projects", "faulty", "mended", "--draw", "5")
    report = bench("--bugs", corpus / "bugs.jsonl", "--trees", corpus / "trees", *words)
    assert [(row["id"], row["found"]) for row in report["bugs"]] == [("made-up", True)]
    assert report["missed"] == []
    density = {row["project"]: row for row in report["density"]}
    assert density["faulty"]["any per 1,000"] > density["mended"]["any per 1,000"] == 0
    assert density["all"]["lines"] == len(FAULTY.splitlines()) + len(MENDED.splitlines())
    assert {row["project"] for row in report["drawn"]} == {"faulty"}


def test_a_tree_is_taken_from_a_history(corpus):
    history = corpus / "histories/someone+trainer/repo"
    (history / "trainer").mkdir(parents=True)
    (history / "trainer/loop.py").write_text(FAULTY)
    git = ["git", "-C", history, "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "faulty"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (corpus / "bugs.jsonl").write_text(json.dumps({**RECORD, "parent_commit": commit}) + "\n")
    assert bench("--bugs", corpus / "bugs.jsonl", "--histories", corpus / "histories")["bugs"][0]["found"]


def test_a_bug_without_a_tree_is_said_in_one_line(corpus):
    command = [sys.executable, BENCH, "--bugs", corpus / "bugs.jsonl", "--trees", corpus / "newest"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"no tree for made-up; needed someone+trainer@{COMMIT[:10]}" in ended.stderr.splitlines()[-1]
