"""The one entry point: files in, findings out."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from offbeat_hanglint._finding import Finding
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
    num_files = num_lines = 0
    for _, source in _read_files(paths, settings):
        num_files += 1
        num_lines += source.count(b"\n")
    return Analysis((), (), num_files, num_lines, time.perf_counter() - start_s)


def _read_files(paths: Sequence[Path], settings: Settings) -> Iterator[tuple[str, bytes]]:
    for root in paths:
        files = [root] if root.is_file() else sorted(root.rglob("*.py"))
        base = root.parent if root.is_file() else root
        for file in files:
            relative = file.relative_to(base).as_posix()
            if SKIPPED_FOLDERS.isdisjoint(relative.split("/")) and not any(fnmatch(relative, p) for p in settings.exclude):
                yield relative, file.read_bytes()
