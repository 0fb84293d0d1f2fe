"""The page of each rule: what it finds and why that hangs, a wrong example and the right one."""

from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / "pages"


def page(rule: str) -> str:
    """Return the text of a rule's page, in Markdown."""
    return (FOLDER / f"{rule}.md").read_text(encoding="utf-8")
