"""The answer inside a completion, and whether it equals the reference."""

import math
import re
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
    """The text with the minus sign of typeset mathematics (U+2212) as the one of the keyboard."""
    return text.replace("\u2212", "-")


def last_number(text: str) -> Decimal | None:
    """The last number in a text: 12, -3.5, 1,234, 6e23, 3/4; None when there is none."""
    found = _NUMBER.findall(plain_minus(text))
    return to_number(found[-1]) if found else None


def to_number(text: str) -> Decimal | None:
    """The number a text is; None when it is not one, or divides by zero."""
    top, _, bottom = text.replace(",", "").partition("/")
    try:
        number = _ARITHMETIC.divide(Decimal(top), Decimal(bottom)) if bottom else Decimal(top)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def numbers_match(number: Decimal, reference: Decimal, tolerance: float) -> bool:
    """Whether two numbers are equal, or differ by at most `tolerance` times the larger."""
    if number == reference:
        return True
    first, second = float(number), float(reference)
    return math.isfinite(first) and math.isfinite(second) and math.isclose(first, second, rel_tol=tolerance)


def last_in_tag(text: str, tag: str) -> str | None:
    """What stands between the last <tag> and the </tag> after it."""
    return last_match(text, rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>")


def last_match(text: str, pattern: str) -> str | None:
    """The first group of the last match of a regular expression, or the match itself when it has no group."""
    matches = list(re.finditer(pattern, text, re.DOTALL))
    if not matches:
        return None
    found = matches[-1].group(1 if matches[-1].re.groups else 0)
    return None if found is None else found.strip()


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...}, inner braces matched."""
    start = text.rfind("\\boxed{")
    depth = 0
    for at in range(start + 6, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[start + 7 : at].strip()
    return None
