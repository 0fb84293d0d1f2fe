"""docs/releasing.md uploads every package, each after those that it needs, and names what is there."""

import re
from pathlib import Path

from doc_blocks import blocks, command_lines
from workspace import ROOT, dist_name, packages

PAGE = Path("docs/releasing.md")
LINES = [line for block in blocks(PAGE) for line in command_lines(block)]


def uploads() -> list[list[str]]:
    """Return the names of the packages that each line uploads, in the order of the page."""
    lines = [line for line in LINES if line.startswith("uv publish")]
    return [[dist_name(name) for name in re.findall(r'dist/(\w+)-\*"', line)] for line in lines]


def test_every_package_is_uploaded_once():
    assert sorted(name for line in uploads() for name in line) == sorted(package.name for package in packages())


def test_what_a_package_needs_is_uploaded_before_it():
    place = {name: number for number, line in enumerate(uploads()) for name in line}
    early = [
        f"{package.name} before {needed}"
        for package in packages()
        for needed in map(dist_name, package.requirements)
        if needed in place and place[needed] >= place[package.name]
    ]
    assert early == []


def test_a_line_uploads_no_other_package_whose_name_begins_alike():
    names = [package.import_name for package in packages()]
    for line in LINES:
        for pattern in re.findall(r"dist/(\w+-)\*", line):
            assert len([name for name in names if f"{name}-".startswith(pattern)]) == 1, pattern


def test_sessions_and_files_are_there():
    sessions = set(re.findall(r"(?m)^def (\w+)\(session: nox\.Session\)", (ROOT / "noxfile.py").read_text()))
    named = [word for line in LINES if " nox -s " in line for word in line.partition(" nox -s ")[2].split()]
    assert [name for name in named if name not in sessions] == []
    files = re.findall(r"(?:containers|tools)/\S+", " ".join(LINES))
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_what_is_attached_is_what_the_session_writes():
    from_sessions = (ROOT / "tools/release_sessions.py").read_text()
    attached = set(re.findall(r"build/release/([\w.-]+)(?= |$)", " ".join(LINES)))
    assert attached == {"README.md", "SHA256SUMS", "bill-of-materials.json", "licences.md"}
    assert [name for name in attached if name not in from_sessions] == []
