"""`# hanglint: ignore[HL012] reason`: where it counts, and that it may not be silent."""

import textwrap

import pytest

from offbeat_hanglint import Finding
from offbeat_hanglint._report.suppress import Suppression, read_suppressions, split, unexplained


def finding(line: int, rule: str = "HL001", path: str = "a.py", end_line: int = 0) -> Finding:
    return Finding(rule, "high", path, line, end_line or line, 1, "f", "message", "", (), "")


def read(source: str) -> list[Suppression]:
    return read_suppressions("a.py", textwrap.dedent(source).encode())


def lines_left(source: str, rule: str = "HL001") -> list[int]:
    """Lines of a file on each of which there is a finding, that stay."""
    text = textwrap.dedent(source)
    kept, _, _ = split([finding(line, rule) for line in range(1, len(text.splitlines()) + 1)], read(source))
    return [each.line for each in kept]


def test_it_counts_for_its_own_line() -> None:
    assert lines_left("""\
        a = 1
        b = 2  # hanglint: ignore[HL001] a world of one
        c = 3
    """) == [1, 3]


def test_alone_on_a_line_it_counts_for_the_next_line_of_code() -> None:
    kept = lines_left("""\
        a = 1
        # hanglint: ignore[HL001] a world of one,
        # which no other rank joins

        b = 2
        c = 3
    """)
    assert 5 not in kept
    assert {1, 6} <= set(kept)


@pytest.mark.parametrize(
    "head",
    [
        "def f():  # hanglint: ignore[HL001] why not",
        "# hanglint: ignore[HL001] why not\ndef f():",
        "# hanglint: ignore[HL001] why not\n@decorated\ndef f():",
        "@decorated  # hanglint: ignore[HL001] why not\ndef f():",
        "async def f(\n    a,\n    b,\n):  # hanglint: ignore[HL001] why not",
    ],
)
def test_on_a_def_it_counts_for_the_function(head: str) -> None:
    source = f"{head}\n    a = 1\n    b = 2\nc = 3\n"
    num_lines = len(source.splitlines())
    assert num_lines in lines_left(source), "but not for what follows it"
    assert not {num_lines - 1, num_lines - 2} & set(lines_left(source))


def test_it_counts_at_either_end_of_a_statement_of_several_lines() -> None:
    at_end = read("a = f(\n    1,\n)  # hanglint: ignore[HL001] why not\n")
    kept, suppressed, unused = split([finding(1, end_line=3)], at_end)
    assert (kept, len(suppressed), unused) == ([], 1, [])


def test_it_counts_for_the_rules_it_names_and_its_own_file() -> None:
    source = "a = 1  # hanglint: ignore[HL001, HL010] why not\n"
    assert lines_left(source, "HL001") == []
    assert lines_left(source, "HL010") == []
    assert lines_left(source, "HL002") == [1]
    kept, _, _ = split([finding(1, path="b.py")], read(source))
    assert len(kept) == 1


@pytest.mark.parametrize(
    ("comment", "said"),
    [
        ("# hanglint: ignore[HL001]", "gives no reason"),
        ("# hanglint: ignore[HL001]  --", "gives no reason"),
        ("# hanglint: ignore", "must read"),
        ("# hanglint: ignore HL001 because", "must read"),
        ("# hanglint: ignore[] because", "must name rules"),
        ("# hanglint: ignore[all] because", "must name rules"),
        ("#hanglint:ignore[HL1] because", "must name rules"),
    ],
)
def test_one_without_a_reason_or_a_form_suppresses_nothing_and_is_a_finding(comment: str, said: str) -> None:
    (suppression,) = read(f"a = 1  {comment}\n")
    kept, suppressed, unused = split([finding(1)], [suppression])
    assert (len(kept), suppressed, unused) == (1, [], [])
    assert unexplained(suppression).rule == "HL000"
    assert said in unexplained(suppression).message


def test_one_that_suppresses_nothing_is_reported() -> None:
    used, unused = read("a = 1  # hanglint: ignore[HL001] why not\nb = 2  # hanglint: ignore[HL001] why not\n")
    assert split([finding(1)], [used, unused])[2] == [unused]


def test_only_comments_are_read() -> None:
    assert read('a = "# hanglint: ignore[HL001] in a string"\n"""\n# hanglint: ignore[HL001] too\n"""\n') == []


@pytest.mark.parametrize(
    "source",
    [b"# hanglint: \xff", b"(  # hanglint: ignore", b"\0# hanglint:", b"# -*- coding: klingon -*-\n# hanglint: x"],
)
def test_a_file_that_is_no_python_has_none(source: bytes) -> None:
    assert read_suppressions("a.py", source) == []


def test_comments_are_found_behind_any_encoding_and_end_of_line() -> None:
    for source in (
        "\ufeffa = 1  # hanglint: ignore[HL001] why not\n".encode(),
        "# coding: latin-1\na = 'ä'  # hanglint: ignore[HL001] why not\n".encode("latin-1"),
        b"a = 1  # hanglint: ignore[HL001] why not\r\n",
        b"a = 1  # hanglint: ignore[HL001] why not",
    ):
        (found,) = read_suppressions("a.py", source)
        assert found.rules == {"HL001"}
