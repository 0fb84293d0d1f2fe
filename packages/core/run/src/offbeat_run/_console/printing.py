"""The one place that prints lines of text: no secret of the environment, and nothing that a terminal would obey."""

import sys

from offbeat_core import hide_secrets, printable


def shown(text: str) -> str:
    """Return what may be shown of a text, which may hold words of files, models and clients."""
    return printable(hide_secrets(text))


def print_text(text: str, *, end: str = "\n", to_stderr: bool = False) -> None:
    """Print it to standard output, or to standard error."""
    print(shown(text), end=end, file=sys.stderr if to_stderr else sys.stdout, flush=True)
