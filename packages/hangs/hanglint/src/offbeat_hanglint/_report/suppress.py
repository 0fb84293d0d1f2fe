"""Comments that say of a finding that it is known: `# hanglint: ignore[HL012] the reason`.

One counts for the line it stands on, or, alone on its line, for the next line of code. On a `def` it counts for the
whole function. Without a reason it is a finding itself, HL000: a reader in a year must know why.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from offbeat_hanglint._config import UNEXPLAINED
from offbeat_hanglint._rules.finding import Finding

MARK: Final = b"hanglint:"
_COMMENT: Final = re.compile(r"#\s*hanglint:\s*(?P<rest>.*)", re.DOTALL)
_IGNORE: Final = re.compile(r"ignore\s*\[(?P<rules>[^\]]*)\]\s*(?P<reason>.*)", re.DOTALL)
_RULE: Final = re.compile(r"HL\d{3}")
# "- " or ": " before a reason is punctuation; a reason has letters.
_LETTERS: Final = re.compile(r"[^\W\d_]{2}")


@dataclass(frozen=True)
class Suppression:
    """One comment.

    Args:
        path: of the file.
        line: where the comment stands, from 1.
        first, last: lines of the findings that it is for.
        rules: identifiers; empty when it does not name any as it should.
        reason: empty when it gives none.
        problem: what is wrong with its form; empty when nothing is.
    """

    path: str
    line: int
    first: int
    last: int
    rules: frozenset[str]
    reason: str
    problem: str = ""

    def covers(self, finding: Finding) -> bool:
        """Return whether this finding is one that it is for."""
        is_here = any(self.first <= line <= self.last for line in (finding.line, finding.end_line))
        return finding.path == self.path and finding.rule in self.rules and is_here


def read_suppressions(path: str, content: bytes) -> list[Suppression]:
    """Return the suppressions of a file; none of a file that is not Python, which has no findings either."""
    if MARK not in content:
        return []
    try:
        tokens = list(tokenize.tokenize(io.BytesIO(content).readline))
        comments = [token for token in tokens if token.type == tokenize.COMMENT and _COMMENT.match(token.string)]
        tree = ast.parse(content) if comments else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # tokenize.TokenError is a SyntaxError from 3.12 on
        return []
    except tokenize.TokenError:
        return []
    if tree is None:
        return []
    functions = dict(_functions(tree))
    code_lines = _code_lines(tokens)
    return [_read(path, comment, functions, code_lines) for comment in comments]


def _read(path: str, comment: tokenize.TokenInfo, functions: dict[int, int], code_lines: list[int]) -> Suppression:
    line = comment.start[0]
    stands_alone = not comment.line[: comment.start[1]].strip()
    first = next((code for code in code_lines if code > line), line) if stands_alone else line
    last = functions.get(first, first)
    said = _COMMENT.match(comment.string)
    rest = said["rest"].strip() if said else ""
    form = _IGNORE.fullmatch(rest)
    if form is None:
        problem = f"a comment for hanglint must read `# hanglint: ignore[HL012] reason`: got `{comment.string.strip()}`"
        return Suppression(path, line, first, last, frozenset(), "", problem)
    rules = [rule.strip() for rule in form["rules"].split(",") if rule.strip()]
    reason = form["reason"].strip()
    if not rules or not all(_RULE.fullmatch(rule) for rule in rules):
        problem = f"`ignore[...]` must name rules, such as `ignore[HL012]`: got `ignore[{form['rules']}]`"
    elif not _LETTERS.search(reason):
        problem = f"`ignore[{', '.join(rules)}]` gives no reason"
    else:
        problem = ""
    return Suppression(path, line, first, last, frozenset(rules), reason, problem)


def _functions(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Lines of a function's head, decorators included, each with the function's last line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            head_end = max(node.lineno, node.body[0].lineno - 1)
            for line in range(first, head_end + 1):
                yield line, node.end_lineno or node.lineno


def _code_lines(tokens: Iterable[tokenize.TokenInfo]) -> list[int]:
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    no_code |= {tokenize.ENCODING, tokenize.ENDMARKER}
    return sorted({token.start[0] for token in tokens if token.type not in no_code})


def unexplained(suppression: Suppression) -> Finding:
    """Return the finding that a suppression without a reason, or of another form, is itself."""
    return Finding(
        rule=UNEXPLAINED.id,
        confidence="high",
        path=suppression.path,
        line=suppression.line,
        end_line=suppression.line,
        column=0,
        function="",
        message=suppression.problem,
        ranks="",
        steps=(),
        advice="write why this cannot hang, or why it may: `# hanglint: ignore[HL012] all ranks read the same file`",
    )


def split(
    findings: Iterable[Finding], suppressions: Iterable[Suppression]
) -> tuple[list[Finding], list[Finding], list[Suppression]]:
    """Findings that stay, those that are suppressed, and suppressions that suppress nothing.

    A suppression whose form is wrong suppresses nothing, and is not counted as unused: it is a finding itself.
    """
    by_path: dict[str, list[Suppression]] = {}
    for suppression in suppressions:
        if not suppression.problem:
            by_path.setdefault(suppression.path, []).append(suppression)
    kept: list[Finding] = []
    suppressed: list[Finding] = []
    used: set[Suppression] = set()
    for finding in findings:
        covering = [each for each in by_path.get(finding.path, ()) if each.covers(finding)]
        used.update(covering)
        (suppressed if covering else kept).append(finding)
    unused = [each for of_path in by_path.values() for each in of_path if each not in used]
    return kept, suppressed, unused
