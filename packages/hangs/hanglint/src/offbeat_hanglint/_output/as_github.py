"""Annotations of GitHub Actions, which shows them at the lines of a pull request.

Source: GitHub's documentation, "Workflow commands for GitHub Actions"; its escapes are those of actions/toolkit.
"""

from typing import Final

from offbeat_hanglint._output.as_text import summary
from offbeat_hanglint._output.printable import printable
from offbeat_hanglint._report.report import Report, Said

_COMMANDS: Final = {"error": "error", "warning": "warning", "note": "notice"}


def as_github(report: Report) -> str:
    """Return a line for each finding, and one that counts."""
    return "".join([*(f"{_annotation(said)}\n" for said in report.said), f"{summary(report)}\n"])


def _annotation(said: Said) -> str:
    finding = said.finding
    properties = {
        "file": finding.path,
        "line": str(finding.line),
        "endLine": str(max(finding.line, finding.end_line)),
        "title": f"hanglint {finding.rule} ({finding.confidence})",
    }
    lines = [finding.message]
    lines += [f"Ranks: {finding.ranks}"] if finding.ranks else []
    lines += [f"  {step.path}:{step.line} {step.what}" for step in finding.steps]
    lines += [f"Mend: {finding.advice}"] if finding.advice else []
    given = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    return f"::{_COMMANDS[said.level]} {given}::{printable(_data(chr(10).join(lines)))}"


def _data(text: str) -> str:
    """Return a message: no line may end in it, and a percent sign begins an escape."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Return a value among several: nor may it hold what ends one."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
