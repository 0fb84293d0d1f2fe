"""Output for people: each finding with its source, which ranks go where, the path of calls, and how to mend it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from offbeat_hanglint._config import CONFIDENCES, EVERY_RULE
from offbeat_hanglint._output.printable import printable
from offbeat_hanglint._report.report import Report, Said, SourceLines
from offbeat_hanglint._rules.finding import Finding

# A guard further above than this is named in the path of calls, and its line not shown.
MAX_LINES_ABOVE: Final = 60
MAX_LINES_SHOWN: Final = 10
MAX_COLUMNS: Final = 160
Style = Callable[[str], str]
_STYLES: Final = {"error": "1;31", "warning": "1;33", "note": "1;36", "bold": "1", "dim": "2", "green": "32"}
_NAMES: Final = {rule.id: rule.name for rule in EVERY_RULE}


def as_text(report: Report, *, is_coloured: bool = False) -> str:
    """Return the whole report; its last line counts."""
    lines = SourceLines(report.root)
    blocks = ["\n".join(_finding(each, report.root, lines, is_coloured)) + "\n\n" for each in report.said]
    return "".join([*blocks, f"{summary(report)}\n"])


def summary(report: Report) -> str:
    """Return one line: how many findings there are, in what, and what is not said."""
    read = (
        f"{report.num_files:,} file{'s' * (report.num_files != 1)}, {report.num_lines:,} lines, {report.seconds:.1f} s"
    )
    counts = [(level, sum(said.finding.confidence == level for said in report.said)) for level in CONFIDENCES]
    by_confidence = ", ".join(f"{count} {level}" for level, count in counts if count)
    found = (
        f"{len(report.said)} finding{'s' * (len(report.said) != 1)} ({by_confidence})" if report.said else "no findings"
    )
    unsaid = {
        "less sure (--confidence low)": report.num_less_sure,
        "suppressed": report.num_suppressed,
        "in the baseline": report.num_known,
    }
    left_out = ", ".join(f"{count} {why}" for why, count in unsaid.items() if count)
    return f"{found} in {read}" + (f"; not said: {left_out}" if left_out else "")


def statistics(report: Report) -> str:
    """Findings by rule, and what was left out."""
    by_rule: dict[str, list[Finding]] = {}
    for said in report.said:
        by_rule.setdefault(said.finding.rule, []).append(said.finding)
    rows = []
    for rule, found in sorted(by_rule.items(), key=lambda each: (-len(each[1]), each[0])):
        counts = [f"{sum(one.confidence == level for one in found):5}" for level in CONFIDENCES]
        rows.append(f"  {rule}  {_NAMES.get(rule, ''):38}{len(found):6}{''.join(counts)}")
    heads = "".join(f"{level:>5}" for level in ("high", "med.", "low"))
    table = [f"  {'rule':45}{'found':>6}{heads}", *rows] if rows else []
    if report.num_gone:
        table.append(f"  {report.num_gone} of the baseline are no longer found: --write-baseline forgets them")
    return "\n".join([*table, *(f"  not read: {each.path}: {each.why}" for each in report.unreadable)])


def _finding(said: Said, root: Path, lines: SourceLines, is_coloured: bool) -> Iterator[str]:
    finding = said.finding

    def style(name: str, text: str) -> str:
        return f"\x1b[{_STYLES[name]}m{text}\x1b[0m" if is_coloured and text else text

    where = f"{_shown(root, finding.path)}:{finding.line}:{finding.column}"
    rule = f"{finding.rule} {_NAMES.get(finding.rule, '')}".rstrip()
    yield f"{style('bold', printable(where))}: {style(said.level, f'{rule} [{finding.confidence}]')}"
    yield f"  {printable(finding.message)}"
    yield from _excerpt(finding, lines, lambda text: style("dim", text), lambda text: style(said.level, text))
    if finding.ranks:
        yield f"  ranks: {printable(finding.ranks)}"
    for number, step in enumerate(finding.steps):
        place = f"{_shown(root, step.path)}:{step.line}"
        yield f"  {'path:  ' if number == 0 else '       '}{printable(place)}  {printable(step.what)}"
    if finding.advice:
        yield f"  {style('green', 'mend:')}  {printable(finding.advice)}"


def _excerpt(finding: Finding, lines: SourceLines, dim: Style, mark: Style) -> Iterator[str]:
    """The finding's lines, the one before, and guards above them; `...` where lines are left out."""
    own = range(finding.line, max(finding.line, finding.end_line) + 1)[:MAX_LINES_SHOWN]
    here = [step.line for step in finding.steps if step.path == finding.path]
    guards = here[: here.index(finding.line)] if finding.line in here else here
    above = {line for line in guards if line < finding.line}
    near = {line for line in above if finding.line - line <= MAX_LINES_ABOVE}
    shown = sorted({*near, finding.line - 1, *own} - {0})
    if not lines.line(finding.path, finding.line):
        return
    width = len(str(shown[-1]))
    last = shown[0] - 1
    for number in shown:
        if number > last + 1:
            yield dim(f"  {'':{width}}  ...")
        last = number
        text = printable(lines.line(finding.path, number).expandtabs(4))
        text = text if len(text) <= MAX_COLUMNS else text[: MAX_COLUMNS - 3] + "..."
        pointer = mark(">") if number in own else " "
        yield f"{pointer} {dim(f'{number:{width}} |')} {text}".rstrip()


def _shown(root: Path, path: str) -> str:
    """Return how to open it from the current folder."""
    whole = os.path.join(root, path)
    relative = os.path.relpath(whole)
    return whole if relative.startswith(os.pardir) else relative


def rule_list() -> str:
    """Every rule in a line."""
    width = max(len(rule.name) for rule in EVERY_RULE)
    return "\n".join(f"{rule.id}  {rule.name:{width}}  {rule.summary}" for rule in EVERY_RULE)
