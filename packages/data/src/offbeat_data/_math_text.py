"""Mathematics as people and models write it, brought to the LaTeX that math-verify reads.

Each rule stands for a right answer to a geometry problem that math-verify 0.9 takes for another number or for nothing.
"""

import re
from typing import Final

from offbeat_data._answers import plain_minus

_CIRCLE: Final = r"(?:\\circ|o)(?![A-Za-z])"
_ROOTED: Final = r"\d+(?:\.\d+)?"
_RULES: Final = [
    (re.compile(rule), latex)
    for rule, latex in (
        (r"\s*[°º˚]", r"^\\circ "),
        (rf"\^\s*(?:{_CIRCLE}|\{{\s*{_CIRCLE}\s*\}})", r"^\\circ "),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (rf"√\s*({_ROOTED})", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
    )
]
_UNIT: Final = r"(?:mm|cm|dm|km|m|in|inch(?:es)?|ft|feet|foot|yd|yards?|mi|miles?|units?)"
_POWER: Final = r"\s*(?:\^\s*(?:[23]|\{\s*[23]\s*\})|[²³])"
_POWER_OF_UNIT: Final = re.compile(
    r"(\d|[})]|\\pi|π)"  # only after a number
    r"(?:\\[ ,;:!]|~|\s)*"
    rf"(?:{_UNIT}{_POWER}|\\(?:text|mathrm|textrm)\s*\{{\s*{_UNIT}(?:\s*\}}{_POWER}|{_POWER}\s*\}}))"
)


def as_latex(text: str) -> str:
    """Degrees, roots and π in the writing of LaTeX; the rest as it is."""
    text = plain_minus(text)
    for rule, latex in _RULES:
        text = rule.sub(latex, text)
    return text


def without_units(text: str) -> str:
    """Without squares and cubes of units of length: 9 of `9 \\mathrm{m}^2`, where `m^2` would be a variable's."""
    return _POWER_OF_UNIT.sub(r"\1", text)


def has_variables(text: str) -> bool:
    """Whether letters stand in it that are no commands of LaTeX: those of a unit may then be meant."""
    return re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", as_latex(text))) is not None
