"""Output of a run: findings with their level and fingerprint, and what was left out and why."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from offbeat_hanglint._analyse import Analysis
from offbeat_hanglint._config import CONFIDENCES, LEVEL_OF_CONFIDENCE, UNEXPLAINED, Config, Level
from offbeat_hanglint._reading.files import MAX_FILE_BYTES, SourceFile
from offbeat_hanglint._reading.reading import Unreadable
from offbeat_hanglint._report.baseline import fingerprint, read_baseline, unknown
from offbeat_hanglint._report.suppress import MARK, Suppression, read_suppressions, split, unexplained
from offbeat_hanglint._rules.finding import Finding


@dataclass(frozen=True)
class Said:
    """A finding that is said.

    Args:
        finding: what a rule found; its path is relative to the project's root.
        level: error, warning or note.
        fingerprint: 16 hexadecimal digits, and a number where the same text is found twice: for programs that track it.
    """

    finding: Finding
    level: Level
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that an output format may show.

    Args:
        root: what paths are relative to.
        said: findings, ordered by path and line.
        unreadable: files that could not be read.
        warnings: one line each, such as a suppression that suppresses nothing.
        num_less_sure: findings below the confidence asked for.
        num_suppressed: findings that a comment suppresses.
        num_known: findings that the baseline holds.
        num_gone: findings of the baseline that are no longer there.
    """

    root: Path
    said: tuple[Said, ...]
    unreadable: tuple[Unreadable, ...]
    warnings: tuple[str, ...]
    num_files: int
    num_lines: int
    seconds: float
    num_less_sure: int
    num_suppressed: int
    num_known: int
    num_gone: int

    @property
    def has_failed(self) -> bool:
        """Return whether a finding is more than a note."""
        return any(each.level != "note" for each in self.said)


class SourceLines:
    """Lines of the files that findings are in, read when asked for.

    Args:
        root: what paths are relative to.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._read: dict[str, list[str]] = {}

    def line(self, path: str, number: int) -> str:
        """Return one line, from 1, without its end; empty where there is none."""
        if path not in self._read:
            self._read[path] = _lines(self._root / path)
        lines = self._read[path]
        return lines[number - 1] if 1 <= number <= len(lines) else ""


def _lines(file: Path) -> list[str]:
    import io
    import tokenize

    try:
        content = file.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        # Only what Python itself counts as the end of a line: str.splitlines() also splits at form feeds.
        text = content.decode(encoding, "replace").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, SyntaxError, LookupError):
        return []
    return text.split("\n")


class FindingFilter:
    """Decides which findings of an analysis are reported.

    Args:
        config: what is asked for.
        files: every file of the analysis.
    """

    def __init__(self, config: Config, files: Sequence[SourceFile]) -> None:
        self._config = config
        self._files = files
        self._lines = SourceLines(config.root)

    @cached_property
    def suppressions(self) -> list[Suppression]:
        """Suppressions of every file."""
        return [each for source in self._files for each in read_suppressions(source.path, _content(source.file))]

    def fingerprint(self, finding: Finding) -> str:
        """Return the identity by which a baseline knows a finding."""
        return fingerprint(finding, self._lines.line(finding.path, finding.line))

    def unsuppressed(self, analysis: Analysis) -> tuple[list[Finding], int, list[Suppression]]:
        """Findings that no comment suppresses, how many one does, and comments that suppress nothing."""
        kept, suppressed, unused = split(analysis.findings, self.suppressions)
        if UNEXPLAINED.id in self._config.rules:
            kept += [unexplained(each) for each in self.suppressions if each.problem]
        return kept, len(suppressed), unused

    def surely(self, findings: Sequence[Finding]) -> list[Finding]:
        """Return those of the confidence asked for or above, of rules that run."""
        enough = CONFIDENCES[: CONFIDENCES.index(self._config.confidence) + 1]
        return [each for each in findings if each.confidence in enough and each.rule in self._config.rules]

    def report(self, analysis: Analysis) -> Report:
        """Return what is said.

        Raises:
            ConfigError: the baseline cannot be read.
        """
        kept, num_suppressed, unused = self.unsuppressed(analysis)
        sure = self.surely(kept)
        known = read_baseline(self._config.baseline) if self._config.baseline else None
        new, num_known, num_gone = unknown(sure, known, self.fingerprint) if known is not None else (sure, 0, 0)
        return Report(
            root=self._config.root,
            said=self._said(sorted(new, key=lambda each: (each.path, each.line, each.rule, each.column))),
            unreadable=analysis.unreadable,
            warnings=tuple(self._warnings(unused)),
            num_files=analysis.num_files,
            num_lines=analysis.num_lines,
            seconds=analysis.seconds,
            num_less_sure=len(kept) - len(sure),
            num_suppressed=num_suppressed,
            num_known=num_known,
            num_gone=num_gone,
        )

    def _said(self, findings: Sequence[Finding]) -> tuple[Said, ...]:
        seen: dict[str, int] = {}
        said = []
        for finding in findings:
            mark = self.fingerprint(finding)
            seen[mark] = seen.get(mark, 0) + 1
            level = self._config.levels.get(finding.rule) or LEVEL_OF_CONFIDENCE[finding.confidence]
            said.append(Said(finding, level, mark if seen[mark] == 1 else f"{mark}:{seen[mark]}"))
        return tuple(said)

    def _warnings(self, unused: Sequence[Suppression]) -> list[str]:
        """Suppressions that are in vain, of rules that ran."""
        ran = [each for each in unused if each.rules <= self._config.rules]
        return [f"{each.path}:{each.line}: ignore[{', '.join(sorted(each.rules))}] suppresses nothing" for each in ran]


def _content(file: Path) -> bytes:
    """Return the file's bytes, if it may hold suppressions."""
    try:
        content = file.read_bytes() if os.path.getsize(file) <= MAX_FILE_BYTES else b""
    except OSError:
        return b""
    return content if MARK in content else b""
