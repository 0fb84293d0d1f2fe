"""The one entry point: files in, findings out."""

import ast
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from offbeat_hanglint._finding import Finding
from offbeat_hanglint._program.facts import FileFact, extract
from offbeat_hanglint._program.program import Program
from offbeat_hanglint._program.reach import Reach
from offbeat_hanglint._program.view import FunctionView
from offbeat_hanglint._program.views import views
from offbeat_hanglint._rules.registry import CHECKS
from offbeat_hanglint._rules.report import ORDER
from offbeat_hanglint._settings import Settings

SKIPPED_FOLDERS = frozenset((".git", ".venv", "venv", "node_modules", "__pycache__", ".nox", ".tox", ".mypy_cache"))


@dataclass(frozen=True)
class Unreadable:
    """A file that could not be read, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class Analysis:
    """What one run found. Findings are ordered by path, line and rule."""

    findings: tuple[Finding, ...]
    unreadable: tuple[Unreadable, ...]
    num_files: int
    num_lines: int
    seconds: float


def analyse(paths: Sequence[Path], settings: Settings) -> Analysis:
    """Read every Python file under the paths as one program and report what may hang."""
    start_s = time.perf_counter()
    sources = _Sources(paths, settings)
    facts: list[FileFact] = []
    unreadable: list[Unreadable] = []
    for path in sources.places:
        read = _read_facts(path, sources.read(path))
        if isinstance(read, Unreadable):
            unreadable.append(read)
        else:
            facts.append(read)
    program = Program(facts)
    found = [f for view in views(program, Reach(program), sources.read) for f in _check(view)]
    if settings.rules:
        found = [f for f in found if f.rule in settings.rules]
    num_lines = sum(f.num_lines for f in facts)
    return Analysis(_once(found), tuple(unreadable), len(facts), num_lines, time.perf_counter() - start_s)


def _check(view: FunctionView) -> list[Finding]:
    """What all rules find in a function; nothing in one whose expressions are nested too deeply to follow."""
    try:
        return [finding for check in CHECKS for finding in check(view)]
    except RecursionError:
        return []


def _once(found: list[Finding]) -> tuple[Finding, ...]:
    """The surest finding of a rule on a line, ordered."""
    kept: dict[tuple[str, int, str], Finding] = {}
    for finding in sorted(found, key=lambda f: (f.path, f.line, f.rule, -ORDER.index(f.confidence), f.column)):
        kept.setdefault((finding.path, finding.line, finding.rule), finding)
    return tuple(kept.values())


def _read_facts(path: str, source: bytes) -> FileFact | Unreadable:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return extract(path, ast.parse(source), source.count(b"\n"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Unreadable(path, f"{type(error).__name__}: {error}")


class _Sources:
    """Where the files are, by their path relative to the root that was given."""

    def __init__(self, paths: Sequence[Path], settings: Settings) -> None:
        self.places: dict[str, Path] = {}
        for root in paths:
            files = [root] if root.is_file() else sorted(root.rglob("*.py"))
            base = root.parent if root.is_file() else root
            for file in files:
                relative = file.relative_to(base).as_posix()
                if SKIPPED_FOLDERS.isdisjoint(relative.split("/")) and not any(
                    fnmatch(relative, p) for p in settings.exclude
                ):
                    self.places[relative] = file

    def read(self, path: str) -> bytes:
        return self.places[path].read_bytes()
