"""Code blocks of the Markdown pages, for the tests that run them.

A fenced block has the language of its first line. An indented block is of commands where a line of it begins with
one of our programs, and otherwise output or a drawing. A comment just above a block says what a test must know:

    <!-- run by packages/engines/serve/tests/test_serve_command.py -->    that test runs it
    <!-- not run: needs a GPU -->                                  and why
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from workspace import ROOT

# Rules of hanglint show bad code and good code: packages/hangs/hanglint/tests analyse both.
ELSEWHERE: Final = ("packages/hangs/hanglint/src/", "releases/")
_FENCE: Final = re.compile(r"^(?P<ticks>```|~~~)(?P<language>\w*)(?P<info>.*)$")
_NOTE: Final = re.compile(r"^<!-- (?P<text>(?:run by|not run:) .+) -->$")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A code block of a page.

    Args:
        page: relative to the repository.
        line: of its first line of code, from 1.
        language: after the fence, such as "python"; empty for none, "indented" for an indented block.
        info: what follows the language, such as "ranks=4".
        text: the code, with its last line break.
        note: the comment above it, such as "not run: needs a GPU"; empty for none.
    """

    page: Path
    line: int
    language: str
    info: str
    text: str
    note: str

    @property
    def name(self) -> str:
        """Return where it is, as an editor takes it."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Return the pages that users read, relative to the repository: what git tracks, without change logs."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = map(Path, listed.stdout.split())
    return [page for page in found if page.name != "CHANGELOG.md" and not str(page).startswith(ELSEWHERE)]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the code blocks of a page in their order."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    note, number = "", 0
    while number < len(lines):
        line = lines[number]
        if fence := _FENCE.match(line):
            end = next(at for at in range(number + 1, len(lines)) if lines[at].startswith(fence["ticks"]))
            body = "".join(f"{code}\n" for code in lines[number + 1 : end])
            info = fence["info"].strip()
            yield Block(page=page, line=number + 2, language=fence["language"], info=info, text=body, note=note)
            note, number = "", end + 1
        elif line.startswith("    ") and not (number and lines[number - 1].strip()):
            end = number
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            body = "".join(f"{code[4:]}\n" for code in lines[number:end]).rstrip("\n") + "\n"
            yield Block(page=page, line=number + 1, language="indented", info="", text=body, note=note)
            note, number = "", end
        else:
            if line.strip():
                found = _NOTE.match(line)
                note = found["text"] if found else ""
            number += 1


def command_lines(block: Block) -> Iterator[str]:
    """Yield the lines of a block of shell commands, continued lines joined, without prompts and comments."""
    for line in re.sub(r"\\\n *", "", block.text).splitlines():
        yield re.sub(r"\s+#\s.*$", "", line.removeprefix("$ ")).strip()
