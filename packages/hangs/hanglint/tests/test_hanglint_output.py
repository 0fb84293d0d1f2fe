"""The forms of a report, from findings made here: nothing in them may break a terminal, a parser or a runner."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat_hanglint import Finding, Step, Unreadable
from offbeat_hanglint._config import EVERY_RULE, Config
from offbeat_hanglint._output.as_github import as_github
from offbeat_hanglint._output.as_json import as_json
from offbeat_hanglint._output.as_sarif import as_sarif
from offbeat_hanglint._output.as_text import as_text, statistics
from offbeat_hanglint._report.report import Report, Said

SOURCE = """import torch.distributed as dist


def reduce_tracker(losses):
    dist.all_reduce(losses)


def log(self, losses):
    if self.rank == 0:
        x = 1
        y = 2
        reduce_tracker(losses)
"""
FINDING = Finding(
    rule="HL002",
    confidence="high",
    path="src/loss.py",
    line=12,
    end_line=12,
    column=9,
    function="log",
    message="reduce_tracker reaches all_reduce over the world, but only rank 0 calls it",
    ranks="rank 0 enters; all others pass by",
    steps=(
        Step("src/loss.py", 9, "guard on rank 0"),
        Step("src/loss.py", 12, "calls reduce_tracker"),
        Step("src/loss.py", 5, "all_reduce over the world"),
    ),
    advice="call reduce_tracker before the guard",
)


def report(root: Path, *said: Said, **counts: Any) -> Report:
    (root / "src").mkdir(exist_ok=True)
    (root / "src" / "loss.py").write_text(SOURCE)
    names = ("num_files", "num_lines", "seconds", "num_less_sure", "num_suppressed", "num_known", "num_gone")
    given = dict.fromkeys(names, 0) | counts
    return Report(root=root, said=said, unreadable=(), warnings=(), **given)


def test_text_shows_the_guard_the_call_which_ranks_go_where_the_path_and_the_change(tmp_path: Path) -> None:
    text = as_text(report(tmp_path, Said(FINDING, "error", "0"), num_files=1, num_lines=12))
    path = tmp_path / "src" / "loss.py"
    assert text.splitlines() == [
        f"{path}:12:9: HL002 call-under-rank-guard [high]",
        "  reduce_tracker reaches all_reduce over the world, but only rank 0 calls it",
        "   9 |     if self.rank == 0:",
        "      ...",
        "  11 |         y = 2",
        "> 12 |         reduce_tracker(losses)",
        "  ranks: rank 0 enters; all others pass by",
        f"  path:  {path}:9  guard on rank 0",
        f"         {path}:12  calls reduce_tracker",
        f"         {path}:5  all_reduce over the world",
        "  mend:  call reduce_tracker before the guard",
        "",
        "1 finding (1 high) in 1 file, 12 lines, 0.0 s",
    ]


def test_text_names_files_as_the_current_folder_sees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    assert as_text(report(tmp_path, Said(FINDING, "error", "0"))).startswith("src/loss.py:12:9:")
    monkeypatch.chdir("src")
    assert as_text(report(tmp_path, Said(FINDING, "error", "0"))).startswith("loss.py:12:9:")


def test_what_is_read_cannot_command_the_terminal(tmp_path: Path) -> None:
    shown = report(tmp_path, Said(replace(FINDING, message="bell \a and \x1b]0;title\x07"), "error", "0"))
    (tmp_path / "src" / "loss.py").write_text(
        SOURCE.replace("reduce_tracker(losses)", "reduce_tracker('\x1b[2J\u202e')")
    )
    text = as_text(shown)
    assert not re.search(r"[^\n -~]", text), "only printable characters and ends of lines"
    assert r"\x1b[2J\u202e" in text


def test_colour_changes_nothing_but_colour(tmp_path: Path) -> None:
    shown = report(tmp_path, Said(FINDING, "error", "0"))
    coloured = as_text(shown, is_coloured=True)
    assert "\x1b[1;31m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == as_text(shown)


@pytest.mark.parametrize(
    "change",
    [
        {"path": "gone.py"},
        {"line": 99, "end_line": 99},
        {"line": 1, "end_line": 0, "steps": ()},
        {"line": 1, "end_line": 10**6},
        {"path": "\udcff.py", "message": "\udc80"},
    ],
    ids=["no file", "past its end", "end before start", "long", "no text"],
)
def test_odd_places_are_shown_in_every_form(tmp_path: Path, change: dict[str, Any]) -> None:
    shown = report(tmp_path, Said(replace(FINDING, **change), "error", "0"))
    assert len(as_text(shown).splitlines()) < 30
    assert as_github(shown).count("\n") == 2
    json.loads(as_json(shown))
    json.loads(as_sarif(shown, Config(root=tmp_path)))


def test_the_keys_of_json_stay(tmp_path: Path) -> None:
    shown = replace(report(tmp_path, Said(FINDING, "error", "f00d")), unreadable=(Unreadable("b.py", "no text"),))
    data = json.loads(as_json(shown))
    assert data["version"] == 1, "a key that goes or changes its meaning raises the version"
    assert set(data) == {"version", "root", "findings", "unreadable", "warnings", "statistics"}
    assert data["findings"] == [
        {
            "rule": "HL002",
            "confidence": "high",
            "level": "error",
            "path": "src/loss.py",
            "line": 12,
            "end_line": 12,
            "column": 9,
            "function": "log",
            "message": FINDING.message,
            "ranks": FINDING.ranks,
            "steps": [{"path": step.path, "line": step.line, "what": step.what} for step in FINDING.steps],
            "advice": FINDING.advice,
            "fingerprint": "f00d",
        }
    ]
    assert data["unreadable"] == [{"path": "b.py", "why": "no text"}]
    counts = ("files", "lines", "seconds", "less_sure", "suppressed", "in_baseline", "gone_from_baseline")
    assert set(data["statistics"]) == set(counts)


def test_sarif_has_what_the_standard_requires(tmp_path: Path) -> None:
    """Required properties and references of SARIF 2.1.0, sections 3.13 to 3.52."""
    shown = report(
        tmp_path, Said(FINDING, "error", "f00d"), Said(replace(FINDING, path="/else where/x.py"), "note", "1")
    )
    log = json.loads(as_sarif(shown, Config(root=tmp_path, levels={"HL051": "off"})))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "hanglint"
    assert [rule["id"] for rule in driver["rules"]] == [rule.id for rule in EVERY_RULE]
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"]
        assert "## Wrong" in rule["help"]["markdown"]
        assert rule["help"]["text"]
    assert {rule["defaultConfiguration"]["level"] for rule in driver["rules"]} == {"none", "warning", "error"}
    assert all(each["executionSuccessful"] is True for each in run["invocations"])
    first, second = run["results"]
    for result in run["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "HL002"
        assert result["level"] in {"none", "note", "warning", "error"}
        assert result["message"]["text"].startswith(FINDING.message)
        assert all(isinstance(value, str) for value in result["partialFingerprints"].values())
    (place,) = first["locations"]
    assert place["physicalLocation"] == {
        "artifactLocation": {"uri": "src/loss.py", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 12, "startColumn": 9},
    }
    assert run["originalUriBaseIds"]["%SRCROOT%"]["uri"] == f"{tmp_path.as_uri()}/"
    (flow,) = first["codeFlows"]
    (thread,) = flow["threadFlows"]
    lines = [each["location"]["physicalLocation"]["region"]["startLine"] for each in thread["locations"]]
    assert lines == [9, 12, 5]
    assert thread["locations"][0]["location"]["message"]["text"] == "guard on rank 0"
    assert second["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": "file:///else%20where/x.py"}


def test_an_annotation_survives_what_it_says(tmp_path: Path) -> None:
    finding = replace(FINDING, path="a,b:c%.py", message="100 %\r\n::error::not a second one", steps=())
    annotation, counted, end = as_github(report(tmp_path, Said(finding, "note", "0"))).split("\n")
    command, properties, message = re.fullmatch(r"::(\w+) (\S.*?)::(.*)", annotation).groups()  # type: ignore[union-attr]
    assert command == "notice"
    assert properties.split(",")[0] == "file=a%2Cb%3Ac%25.py"
    assert "line=12,endLine=12,title=hanglint HL002 (high)" in properties
    assert message.startswith("100 %25%0D%0A::error::not a second one%0ARanks: rank 0 enters")
    assert counted.startswith("1 finding")
    assert end == ""


def test_an_annotation_says_nothing_to_the_terminal_of_the_log(tmp_path: Path) -> None:
    finding = replace(FINDING, message="\x1b[2Jgone\x07\x9b1m", steps=())
    text = as_github(report(tmp_path, Said(finding, "note", "0")))
    assert r"\x1b[2Jgone\x07\x9b1m" in text
    assert not {"\x1b", "\x07", "\x9b"} & set(text)


def test_statistics_count_by_rule_and_say_what_was_not_read(tmp_path: Path) -> None:
    low = replace(FINDING, rule="HL060", confidence="low")
    shown = report(
        tmp_path, Said(FINDING, "error", "0"), Said(FINDING, "error", "1"), Said(low, "error", "2"), num_gone=3
    )
    text = statistics(replace(shown, unreadable=(Unreadable("b.py", "permission denied"),)))
    assert re.search(r"HL002\s+call-under-rank-guard\s+2\s+2\s+0\s+0\n", text)
    assert re.search(r"HL060\s+unbounded-ray-wait\s+1\s+0\s+0\s+1\n", text)
    assert "3 of the baseline are no longer found" in text
    assert "b.py: permission denied" in text
