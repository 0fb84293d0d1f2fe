"""Output for programs. `version` is raised when a key changes its meaning or goes; keys may come without that."""

import json
from collections.abc import Mapping
from typing import Any, Final

from offbeat_hanglint._report.report import Report, Said

VERSION: Final = 1


def as_json(report: Report) -> str:
    """Return one object; paths are relative to `root`, lines and columns count from 1."""
    data = {
        "version": VERSION,
        "root": str(report.root),
        "findings": [finding_data(said) for said in report.said],
        "unreadable": [{"path": each.path, "why": each.why} for each in report.unreadable],
        "warnings": list(report.warnings),
        "statistics": {
            "files": report.num_files,
            "lines": report.num_lines,
            "seconds": round(report.seconds, 3),
            "less_sure": report.num_less_sure,
            "suppressed": report.num_suppressed,
            "in_baseline": report.num_known,
            "gone_from_baseline": report.num_gone,
        },
    }
    return json.dumps(data, indent=1) + "\n"


def finding_data(said: Said) -> Mapping[str, Any]:
    """Return one finding as plain data."""
    finding = said.finding
    return {
        "rule": finding.rule,
        "confidence": finding.confidence,
        "level": said.level,
        "path": finding.path,
        "line": finding.line,
        "end_line": finding.end_line,
        "column": finding.column,
        "function": finding.function,
        "message": finding.message,
        "ranks": finding.ranks,
        "steps": [{"path": step.path, "line": step.line, "what": step.what} for step in finding.steps],
        "advice": finding.advice,
        "fingerprint": said.fingerprint,
    }
