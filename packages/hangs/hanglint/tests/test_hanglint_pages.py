"""Every rule has a page whose wrong example it finds and whose right example is clean."""

import re
from pathlib import Path

import pytest
from test_hanglint_command import rules_found, run

from offbeat_hanglint import RULES
from offbeat_hanglint._config import EVERY_RULE, UNEXPLAINED
from offbeat_hanglint._rules.pages import FOLDER, page
from offbeat_hanglint._rules.registry import Rule

every_rule = pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.id)


def example(rule: Rule, heading: str) -> str:
    """The first Python code below a heading of a rule's page."""
    section = page(rule.id).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code, f"{rule.id} has no Python code under {heading}"
    return code[1]


@every_rule
def test_the_wrong_example_is_found_by_its_rule(rule: Rule, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(example(rule, "Wrong"))
    assert rule.id in rules_found(tmp_path)


@every_rule
def test_the_right_example_is_clean_at_any_confidence(rule: Rule, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(example(rule, "Right"))
    assert rules_found(tmp_path) == []


@every_rule
def test_a_page_is_headed_and_says_how_sure_it_is(rule: Rule) -> None:
    text = page(rule.id)
    assert text.startswith(f"# {rule.id}: {rule.name}\n")
    assert "\n## How sure\n" in text or rule == UNEXPLAINED
    assert max(map(len, text.splitlines())) <= 140
    assert run("--explain", rule.id.lower()).stdout == text


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_page_begins_with_the_highest_confidence_that_its_rule_gives(rule: Rule) -> None:
    """The registry is what SARIF says about a rule; a page that says less, or more, contradicts it."""
    said = page(rule.id).partition("\n## How sure\n")[2]
    first, *others = re.findall(r"\b(high|medium|low)\b", said.lower())
    assert said.lstrip().lower().startswith(first)
    assert first == rule.highest
    order = ("low", "medium", "high")
    assert all(order.index(each) < order.index(first) for each in others)


def test_every_page_is_of_a_rule() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {rule.id for rule in EVERY_RULE}
