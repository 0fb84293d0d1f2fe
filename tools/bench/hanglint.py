"""hanglint against real bugs and real projects: how many hangs it finds, and how many other findings it reports.

    python tools/bench/hanglint.py --bugs FILE (--trees FOLDER | --histories FOLDER) [--newest FOLDER] [--json]

Nothing is fetched. A bug's tree is the whole repository at the commit before its mend: a folder
`<owner>+<repo>@<10 hex of the commit>` of --trees, or taken from the git directory `<owner>+<repo>/repo` of
--histories, its .py files alone. A bug is found by a finding of a rule that fits its pattern (`hanglint/patterns.toml`)
in the named function or within 10 lines of the named lines. Half of `hanglint/unseen.jsonl` is for learning (--half
open); of the other half (--half hidden) only scores are shown, so that no rule is tuned on it. --newest holds a folder
`<owner>+<repo>` of each project: findings per 1,000 lines, seconds, peak memory; --draw picks findings of high
confidence there to judge by hand, and --judged says how those that were judged did.
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.hanglint_score import BY, DATA, Bug, Score, fitting_rules, read_bugs, recall
from bench.harness import table

from offbeat_hanglint import Finding, Settings, analyse

PROJECTS: Final = (
    "verl-project+verl",
    "huggingface+trl",
    "huggingface+accelerate",
    "OpenRLHF+OpenRLHF",
    "pytorch+torchtitan",
)
CONFIDENCES: Final = ("high", "medium", "low")
KIB: Final = 1024


@dataclass(frozen=True)
class Reading:
    """A tree that was read: what was found, what it cost."""

    findings: tuple[Finding, ...]
    num_files: int
    num_lines: int
    num_unreadable: int
    seconds: float
    peak_bytes: int


def read_tree(tree: Path, cache: Path | None = None) -> Reading:
    """Analyse a tree; in a process of its own, so that the peak of memory is this tree's."""
    start_s = time.perf_counter()
    analysis = analyse([tree], Settings(cache_folder=cache))
    seconds = time.perf_counter() - start_s
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
    return Reading(
        analysis.findings, analysis.num_files, analysis.num_lines, len(analysis.unreadable), seconds, peak_bytes
    )


@contextlib.contextmanager
def tree_of(bug: Bug, trees: Path | None, histories: Path | None) -> Iterator[Path]:
    """The folder with a bug's tree: one that is there, or the .py files of a commit in a temporary folder.

    Raises:
        SystemExit: it is in neither.
    """
    if trees and (trees / bug.tree).is_dir():
        yield trees / bug.tree
        return
    history = histories and histories / bug.tree.partition("@")[0] / "repo"
    if not history or not history.is_dir():
        raise SystemExit(
            f"hanglint bench: no tree for {bug.id}; needed {bug.tree} in --trees or its history in --histories"
        )
    command = ["git", "-C", str(history), "archive", bug.record["parent_commit"], "--", ":(glob)**/*.py"]
    packed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
        yield Path(folder)


def read_bug_tree(bug: Bug, trees: Path | None, histories: Path | None, cache: Path) -> Reading:
    """Return a bug's tree, read; facts of files that several trees have alike are kept."""
    with tree_of(bug, trees, histories) as tree:
        reading = read_tree(tree, cache)
    print(f"{bug.tree}: {reading.num_files} files, {reading.seconds:.0f} s", file=sys.stderr)
    return reading


def score_bugs(bugs: Sequence[Bug], trees: Path | None, histories: Path | None, jobs: int) -> list[Score]:
    """Read each tree once and look for its bugs."""
    first = {bug.tree: bug for bug in bugs}
    with _processes(jobs) as pool, tempfile.TemporaryDirectory() as cache:
        futures = {tree: pool.submit(read_bug_tree, bug, trees, histories, Path(cache)) for tree, bug in first.items()}
        readings = {tree: future.result() for tree, future in futures.items()}
    fitting = fitting_rules()
    return [
        Score(
            bug,
            tuple(
                (each.rule, each.confidence, each.line) for each in bug.matches(readings[bug.tree].findings, fitting)
            ),
        )
        for bug in bugs
    ]


def read_projects(newest: Path, projects: Sequence[str], jobs: int) -> dict[str, Reading]:
    """Return the newest tree of each project, read."""
    with _processes(jobs) as pool:
        futures = {project: pool.submit(read_tree, newest / project) for project in projects}
        return {project: future.result() for project, future in futures.items()}


def _processes(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1)


def density(readings: Mapping[str, Reading]) -> list[dict[str, Any]]:
    """Findings per 1,000 lines of each project and of all, and what reading cost."""
    rows = [_density_row(project, [reading]) for project, reading in readings.items()]
    return [*rows, _density_row("all", list(readings.values()))]


def _density_row(name: str, readings: Sequence[Reading]) -> dict[str, Any]:
    num_lines = sum(reading.num_lines for reading in readings)
    counts = Counter(finding.confidence for reading in readings for finding in reading.findings)
    per_1000 = {each: 1000 * counts[each] / max(num_lines, 1) for each in CONFIDENCES}
    return {"project": name, "lines": num_lines, "high": counts["high"],
            **{f"{each} per 1,000": per_1000[each] for each in CONFIDENCES}, "any per 1,000": sum(per_1000.values()),
            "unreadable": sum(reading.num_unreadable for reading in readings),
            "seconds": sum(reading.seconds for reading in readings),
            "peak, MB": max(reading.peak_bytes for reading in readings) / 1e6}  # fmt: skip


def by_rule(readings: Mapping[str, Reading]) -> list[dict[str, Any]]:
    """Return how often each rule speaks over all projects."""
    counts = Counter((each.rule, each.confidence) for reading in readings.values() for each in reading.findings)
    rules = sorted({rule for rule, _ in counts})
    return [{"rule": rule, **{each: counts[rule, each] for each in CONFIDENCES}} for rule in rules]


def draw(readings: Mapping[str, Reading], number: int, seed: int) -> list[dict[str, Any]]:
    """Findings of high confidence at random, one a function; the same for the same seed and findings."""
    one_each = {
        (project, finding.path, finding.function): {"project": project, **asdict(finding)}
        for project, reading in readings.items()
        for finding in reversed(reading.findings)
        if finding.confidence == "high"
    }
    order = sorted(one_each, key=lambda key: hashlib.sha1(repr((seed, *key)).encode()).digest())
    return [one_each[key] for key in order[:number]]


def judgements(judged: Path, readings: Mapping[str, Reading]) -> list[dict[str, Any]]:
    """Return the findings that were judged by hand, and how many are still found at high confidence."""
    rows = [json.loads(line) for line in judged.read_text(encoding="utf-8").splitlines() if line.strip()]
    now = {
        (project, finding.path, finding.line, finding.rule)
        for project, reading in readings.items()
        for finding in reading.findings
        if finding.confidence == "high"
    }
    verdicts = Counter(row["verdict"] for row in rows)
    still = Counter(
        row["verdict"]
        for row in rows
        if (row["project"].replace("/", "+"), row["path"], row["line"], row["rule"]) in now
    )
    return [
        {"verdict": each, "judged": verdicts[each], "%": 100 * verdicts[each] / len(rows), "still found": still[each]}
        for each in ("defect", "risk", "false")
    ]


def options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bugs", type=Path, action="append", default=[], help="a corpus; may be given again")
    parser.add_argument("--trees", type=Path)
    parser.add_argument("--histories", type=Path)
    parser.add_argument("--newest", type=Path)
    parser.add_argument("--projects", nargs="*", default=list(PROJECTS), help="folders of --newest")
    parser.add_argument("--only", nargs="*", help="identifiers of bugs")
    parser.add_argument("--half", choices=("open", "hidden"), help="of a corpus, by the hash of each identifier")
    parser.add_argument("--jobs", type=int, default=1, help="trees read at a time")
    parser.add_argument("--draw", type=int, default=0, metavar="NUMBER", help="findings of high confidence to judge")
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--judged", type=Path, default=DATA / "judged.jsonl")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Score, and print Markdown or JSON."""
    chosen = options()
    report: dict[str, Any] = {}
    bugs = [bug for path in chosen.bugs for bug in read_bugs(path) if not chosen.only or bug.id in chosen.only]
    bugs = [bug for bug in bugs if not chosen.half or bug.half == chosen.half]
    if bugs:
        scores = score_bugs(bugs, chosen.trees, chosen.histories, chosen.jobs)
        report |= {f"recall by {by}": recall(scores, by) for by in BY}
        if chosen.half != "hidden":
            report["bugs"] = [score.row() for score in scores]
            report["missed"] = [score.missed_row() for score in scores if not score.is_found]
    if chosen.newest:
        readings = read_projects(chosen.newest, chosen.projects, chosen.jobs)
        report |= {"density": density(readings), "by rule": by_rule(readings)}
        if chosen.draw:
            report["drawn"] = draw(readings, chosen.draw, chosen.seed)
        if chosen.judged.exists():
            report["judged by hand"] = judgements(chosen.judged, readings)
    if chosen.json:
        print(json.dumps(report, indent=1))
        return
    for title, rows in report.items():
        print(f"\n## {title}\n\n" + "\n".join(table(rows)))


if __name__ == "__main__":
    main()
