"""The one entry point: files in, findings out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat_hanglint._files import find_files, read_source
from offbeat_hanglint._finding import Finding
from offbeat_hanglint._settings import Settings


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
    files, unread = find_files(paths, settings.root, settings.exclude)
    unreadable = [Unreadable(path, why) for path, why in unread]
    num_files = num_lines = 0
    for source in files:
        try:
            content = read_source(source)
        except OSError as error:
            unreadable.append(Unreadable(source.path, error.strerror or str(error)))
            continue
        num_files += 1
        num_lines += content.count(b"\n")
    return Analysis((), tuple(unreadable), num_files, num_lines, time.perf_counter() - start_s)
