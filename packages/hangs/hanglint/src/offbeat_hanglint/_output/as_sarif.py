"""SARIF 2.1.0, which GitHub code scanning, GitLab, Azure and editors read.

Source: OASIS, "Static Analysis Results Interchange Format (SARIF) Version 2.1.0".
"""

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final
from urllib.parse import quote

from offbeat_hanglint._config import EVERY_RULE, LEVEL_OF_CONFIDENCE, Config
from offbeat_hanglint._report.report import Report, Said
from offbeat_hanglint._rules.pages import page
from offbeat_hanglint._rules.registry import Rule

SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"
ROOT: Final = "%SRCROOT%"
FINGERPRINT: Final = "hanglint/v1"
_INDEX: Final = {rule.id: number for number, rule in enumerate(EVERY_RULE)}
_PRECISION: Final = {"high": "high", "medium": "medium", "low": "low"}


def as_sarif(report: Report, config: Config) -> str:
    """Return one run. The guard-to-collective path of a finding is its code flow."""
    run = {
        "tool": {
            "driver": {
                "name": "hanglint",
                "version": own_version(),
                "rules": [_rule(each, config) for each in EVERY_RULE],
            }
        },
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {ROOT: {"uri": report.root.as_uri().rstrip("/") + "/"}},
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": _notifications(report)}],
        "results": [_result(said) for said in report.said],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def own_version() -> str:
    """Return the version that is installed; 0.0.0 when it runs from its source."""
    try:
        return version("offbeat-hanglint")
    except PackageNotFoundError:
        return "0.0.0"


def _rule(rule: Rule, config: Config) -> Mapping[str, Any]:
    text = page(rule.id)
    level = config.levels.get(rule.id) or LEVEL_OF_CONFIDENCE[rule.highest]
    return {
        "id": rule.id,
        "name": "".join(word.capitalize() for word in rule.name.split("-")),
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": rule.summary},
        "help": {"text": text, "markdown": text},
        "defaultConfiguration": {"level": "none" if level == "off" else level},
        "properties": {"precision": _PRECISION[rule.highest], "tags": ["distributed", "hang"]},
    }


def _result(said: Said) -> Mapping[str, Any]:
    finding = said.finding
    lines = [
        finding.message,
        f"Ranks: {finding.ranks}" if finding.ranks else "",
        f"Mend: {finding.advice}" if finding.advice else "",
    ]
    region: dict[str, int] = {"startLine": finding.line, "startColumn": max(1, finding.column)}
    if finding.end_line > finding.line:
        region["endLine"] = finding.end_line
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": _INDEX[finding.rule],
        "level": said.level,
        "message": {"text": "\n".join(line for line in lines if line)},
        "locations": [_location(finding.path, region, function=finding.function)],
        "partialFingerprints": {FINGERPRINT: said.fingerprint},
        "properties": {"confidence": finding.confidence, "ranks": finding.ranks, "advice": finding.advice},
    }
    if finding.steps:
        steps = [_location(step.path, {"startLine": step.line}, message=step.what) for step in finding.steps]
        result["codeFlows"] = [{"threadFlows": [{"locations": [{"location": step} for step in steps]}]}]
    return result


def _location(path: str, region: Mapping[str, int], *, message: str = "", function: str = "") -> Mapping[str, Any]:
    """Return a place. An absolute path, of a file outside the root, has no base."""
    uri = quote(path.encode("utf-8", "surrogateescape"))
    artifact = {"uri": f"file://{uri}"} if path.startswith("/") else {"uri": uri, "uriBaseId": ROOT}
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": artifact, "region": dict(region)}}
    if message:
        location["message"] = {"text": message}
    if function:
        location["logicalLocations"] = [{"fullyQualifiedName": function, "kind": "function"}]
    return location


def _notifications(report: Report) -> list[Mapping[str, Any]]:
    unread = [
        {"level": "warning", "message": {"text": each.why}, "locations": [_location(each.path, {"startLine": 1})]}
        for each in report.unreadable
    ]
    return [*unread, *({"level": "warning", "message": {"text": text}} for text in report.warnings)]
