"""The one entry point: files in, findings out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat_hanglint._program.program import Program
from offbeat_hanglint._program.reach import Reach
from offbeat_hanglint._program.view import FunctionView
from offbeat_hanglint._program.views import views
from offbeat_hanglint._reading.files import find_files, read_source
from offbeat_hanglint._reading.reading import Unreadable, read_facts
from offbeat_hanglint._rules.finding import Finding
from offbeat_hanglint._rules.registry import CHECKS
from offbeat_hanglint._rules.report import ORDER
from offbeat_hanglint._settings import Settings


@dataclass(frozen=True)
class Analysis:
    """Results of one run. Findings are ordered by path, line and rule."""

    findings: tuple[Finding, ...]
    unreadable: tuple[Unreadable, ...]
    num_files: int
    num_lines: int
    seconds: float


def analyse(paths: Sequence[Path], settings: Settings) -> Analysis:
    """Read every Python file under the paths as one program and report what may hang."""
    start_s = time.perf_counter()
    files, unread = find_files(paths, settings.root, settings.exclude)
    by_path = {each.path: each for each in files}
    read = list(read_facts(files, settings.cache_folder, settings.num_jobs))
    facts = [each for each in read if not isinstance(each, Unreadable)]
    unreadable = [Unreadable(path, why) for path, why in unread]
    unreadable += [each for each in read if isinstance(each, Unreadable)]
    program = Program(facts, settings.summaries)
    too_deep: list[FunctionView] = []
    found: list[Finding] = []
    for view in views(program, Reach(program), lambda path: read_source(by_path[path]), too_deep=too_deep):
        try:
            found += [f for check in CHECKS for f in check(view)]
        except RecursionError:
            too_deep.append(view)
    unreadable += [Unreadable(each.file.path, f"{each.fact.qualified} is nested too deeply") for each in too_deep]
    if settings.rules:
        found = [f for f in found if f.rule in settings.rules]
    num_lines = sum(f.num_lines for f in facts)
    seconds = time.perf_counter() - start_s
    return Analysis(_once(found), tuple(unreadable), len(facts), num_lines, seconds)


def _once(found: list[Finding]) -> tuple[Finding, ...]:
    """Return the surest finding of a rule on a line, ordered."""
    kept: dict[tuple[str, int, str], Finding] = {}
    for finding in sorted(found, key=lambda f: (f.path, f.line, f.rule, -ORDER.index(f.confidence), f.column)):
        kept.setdefault((finding.path, finding.line, finding.rule), finding)
    return tuple(kept.values())
