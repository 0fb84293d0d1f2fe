"""The answer inside a completion: a number, a tag, a box, a match; and mathematics in the writing of LaTeX."""

import math
import re
from collections.abc import Iterator
from decimal import Context, Decimal, InvalidOperation
from typing import Final

_NUMBER: Final = re.compile(
    r"(?<![\w.,)])[-+]?"  # a sign only where no operand stands before it: the last number of "5-3" is 3
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d+)?"
    r"|(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d+)?"
    r"|[-+]?\.\d+"
)
_ARITHMETIC: Final = Context(prec=60, traps=[])


def plain_minus(text: str) -> str:
    """Return the text with the minus sign of typeset mathematics (U+2212) as the one of the keyboard."""
    return text.replace("\u2212", "-")


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text: 12, -3.5, 1,234, 6e23, 3/4; None when there is none."""
    found = _NUMBER.findall(plain_minus(text))
    return to_number(found[-1]) if found else None


def to_number(text: str) -> Decimal | None:
    """Return the number that a text is; None when it is not one, or divides by zero."""
    top, _, bottom = text.replace(",", "").partition("/")
    try:
        number = _ARITHMETIC.divide(Decimal(top), Decimal(bottom)) if bottom else Decimal(top)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def numbers_match(number: Decimal, reference: Decimal, tolerance: float) -> bool:
    """Return whether two numbers are equal, or differ by at most `tolerance` times the larger."""
    if number == reference:
        return True
    first, second = float(number), float(reference)
    return math.isfinite(first) and math.isfinite(second) and math.isclose(first, second, rel_tol=tolerance)


def last_in_tag(text: str, tag: str) -> str | None:
    """Return the text between the last <tag> and the </tag> after it."""
    texts = [found for found, _, _ in between(text, f"<{tag}>", f"</{tag}>")]
    return texts[-1].strip() if texts else None


def between(text: str, opening: str, closing: str) -> Iterator[tuple[str, int, int]]:
    """Find texts between two marks, each with where it begins and ends, marks included.

    The regular expression `opening(.*?)closing` finds the same, in a time that grows with the square of the number of
    marks where none is closed, as in a completion that repeats itself.
    """
    end = 0
    while (start := text.find(opening, end)) >= 0 and (at := text.find(closing, start + len(opening))) >= 0:
        end = at + len(closing)
        yield text[start + len(opening) : at], start, end


def last_match(text: str, pattern: str) -> str | None:
    """Return the first group of the last match of a regular expression, or the match itself when it has no group."""
    matches = list(re.finditer(pattern, text, re.DOTALL))
    if not matches:
        return None
    found = matches[-1].group(1 if matches[-1].re.groups else 0)
    return None if found is None else found.strip()


def last_boxed(text: str) -> str | None:
    """Return the text in the last \\boxed{...}, inner braces matched."""
    start = text.rfind("\\boxed{")
    depth = 0
    for at in range(start + 6, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[start + 7 : at].strip()
    return None


_CIRCLE: Final = r"(?:\\circ|o)(?![A-Za-z])"
_ROOTED: Final = r"\d+(?:\.\d+)?"
_RULES: Final = [
    (re.compile(rule), latex)
    for rule, latex in (
        (r"(?<!\s)\s*[°º˚]", r"^\\circ "),  # from the first blank: not from each one
        (rf"\^\s*(?:{_CIRCLE}|\{{\s*{_CIRCLE}\s*\}})", r"^\\circ "),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (rf"√\s*({_ROOTED})", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
    )
]
"""Each stands for a right answer to a geometry problem that math-verify 0.9 takes for another number or for nothing."""
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
    """Remove squares and cubes of units of length: 9 of `9 \\mathrm{m}^2`, where `m^2` would be a variable's."""
    return _POWER_OF_UNIT.sub(r"\1", text)


def has_variables(text: str) -> bool:
    """Return whether letters stand in it that are no commands of LaTeX: those of a unit may then be meant."""
    return re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", as_latex(text))) is not None
