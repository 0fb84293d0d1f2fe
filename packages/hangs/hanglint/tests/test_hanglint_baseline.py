"""A baseline knows findings by what they are about, so it survives lines that move and not a finding that is new."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_hanglint import Finding
from offbeat_hanglint._config import ConfigError
from offbeat_hanglint._report.baseline import fingerprint, read_baseline, unknown, write_baseline

FINDING = Finding("HL001", "high", "a.py", 3, 3, 1, "f", "message", "ranks", (), "advice")
LINE = "        dist.all_reduce(loss)"


def test_a_finding_is_known_wherever_its_line_is_and_however_it_is_indented() -> None:
    moved = replace(FINDING, line=90, end_line=91, column=5, message="other words", confidence="low")
    assert fingerprint(moved, "dist.all_reduce( loss )") == fingerprint(FINDING, LINE)
    reasoned = f"{LINE}  # hanglint: ignore[HL001] why not"
    assert fingerprint(FINDING, reasoned) == fingerprint(FINDING, LINE)


@pytest.mark.parametrize("change", [{"rule": "HL002"}, {"path": "b.py"}, {"function": "g"}])
def test_another_rule_file_or_function_is_another_finding(change: dict[str, str]) -> None:
    assert fingerprint(replace(FINDING, **change), LINE) != fingerprint(FINDING, LINE)
    assert fingerprint(FINDING, LINE.replace("loss", "norm")) != fingerprint(FINDING, LINE)


@given(known=st.lists(st.sampled_from("abcd")), found=st.lists(st.sampled_from("abcd")))
def test_of_findings_alike_as_many_are_known_as_were_written(known: list[str], found: list[str]) -> None:
    findings = [replace(FINDING, function=each) for each in found]
    new, num_known, num_gone = unknown(findings, Counter(known), lambda each: each.function)
    expected = Counter(found) - Counter(known)
    assert Counter(each.function for each in new) == expected
    assert num_known == len(found) - len(new)
    assert num_gone == sum((Counter(known) - Counter(found)).values())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    write_baseline(path, [(FINDING, "b0"), (replace(FINDING, path="\udcff.py"), "a0"), (FINDING, "b0:2")])
    assert read_baseline(path) == Counter({"a0": 1, "b0": 2})
    assert "line" not in path.read_text(), "a diff shows findings, not lines that moved"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"version": 2, "findings": []}',
        '{"version": 1}',
        '{"version": 1, "findings": [1]}',
        "\x00",
        "[" * 10**5,
    ],
)
def test_what_is_no_baseline_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"^[^\n]*baseline must[^\n]*$"):
        read_baseline(path)
    with pytest.raises(ConfigError, match="--write-baseline"):
        read_baseline(tmp_path / "none.json")


def test_the_file_is_the_same_whatever_order_findings_came_in(tmp_path: Path) -> None:
    one, other = tmp_path / "1.json", tmp_path / "2.json"
    findings = [(replace(FINDING, path=name), name) for name in "cab"]
    write_baseline(one, findings)
    write_baseline(other, findings[::-1])
    assert one.read_bytes() == other.read_bytes()
    assert [each["path"] for each in json.loads(one.read_text())["findings"]] == ["a", "b", "c"]
