"""Finds hangs of distributed PyTorch programs by reading their source."""

from offbeat_hanglint._analyse import Analysis, analyse
from offbeat_hanglint._reading.reading import Unreadable
from offbeat_hanglint._rules.finding import Confidence, Finding, Step
from offbeat_hanglint._rules.registry import RULES, Rule
from offbeat_hanglint._settings import Settings

__all__ = [
    "RULES",
    "Analysis",
    "Confidence",
    "Finding",
    "Rule",
    "Settings",
    "Step",
    "Unreadable",
    "analyse",
]
