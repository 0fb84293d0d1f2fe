"""Text of files, models and clients, made fit for a terminal and a log."""

import re
from typing import Final

_UNPRINTABLE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # what turns the direction of a text around
    "\u2028\u2029\ud800-\udfff]"  # ends of lines, halves of pairs
)


def printable(text: str) -> str:
    """Write control characters as escapes, such as \\x1b: a terminal would obey them.

    Tabs and newlines stay, and a carriage return before a newline is left out.
    """
    return _UNPRINTABLE.sub(lambda each: each[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))
