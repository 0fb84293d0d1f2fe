from pathlib import Path

import pytest

from offbeat_hanglint import RULES, Settings, analyse

EXAMPLES = Path(__file__).parent / "examples"


def rules_in(*files: Path) -> dict[str, str]:
    return {f.rule: f.confidence for f in analyse(files, Settings()).findings}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_the_wrong_example_of_a_rule_is_found(rule):
    assert rule.id in rules_in(EXAMPLES / f"{rule.id}_wrong.py")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_the_right_example_of_a_rule_has_no_finding_of_medium_or_high_confidence_and_none_of_the_rule(rule):
    found = rules_in(EXAMPLES / f"{rule.id}_right.py")
    assert rule.id not in found
    assert set(found.values()) <= {"low"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_no_rule_is_surer_than_it_declares(rule):
    order = ("low", "medium", "high")
    for file in EXAMPLES.glob("*_wrong.py"):
        found = rules_in(file)
        assert order.index(found.get(rule.id, "low")) <= order.index(rule.highest)
