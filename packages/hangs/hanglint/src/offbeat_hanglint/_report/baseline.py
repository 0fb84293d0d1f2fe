"""A baseline: the findings that were there when hanglint came, so that only new ones are said.

A finding is known by its content (rule, file, function, the text of its line), not by its line's number, so that it
stays known when lines move. A baseline is a JSON file that reads well in a diff.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from offbeat_hanglint._config import ConfigError
from offbeat_hanglint._rules.finding import Finding

VERSION: Final = 1
_SPACE: Final = re.compile(r"\s+")


def fingerprint(finding: Finding, source_line: str) -> str:
    """Return 16 hexadecimal digits for the subject of a finding; alike for two lines of one text in one function.

    Args:
        finding: its path is relative to the project's root.
        source_line: the text of its line.
    """
    about = (finding.rule, finding.path, finding.function, _SPACE.sub("", source_line.partition(" # hanglint:")[0]))
    return hashlib.sha256("\0".join(about).encode("utf-8", "backslashreplace"), usedforsecurity=False).hexdigest()[:16]


def read_baseline(path: Path) -> Counter[str]:
    """Return how often each fingerprint is known.

    Raises:
        ConfigError: the file is not there, or is no baseline.
    """
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the baseline must be a readable file: got {path} ({error.strerror}); --write-baseline writes one"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"a baseline must be JSON: {path} is not ({error}); write it anew") from error
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION:
        raise ConfigError(f"a baseline must have version {VERSION}: {path} has {version!r}; write it anew")
    entries = data.get("findings")
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("fingerprint"), str) for entry in entries
    ):
        raise ConfigError(f"a baseline must have `findings`, each with a `fingerprint`: {path} has not; write it anew")
    return Counter(str(entry["fingerprint"]) for entry in entries)


def write_baseline(path: Path, findings: Sequence[tuple[Finding, str]]) -> None:
    """Write findings, each with its fingerprint, without line numbers: the file changes only when findings do.

    A number behind a fingerprint, which distinguishes findings of one text, is left out: they are counted.

    Raises:
        ConfigError: the file cannot be written.
    """
    entries = [
        {
            "rule": each.rule,
            "path": each.path,
            "function": each.function,
            "fingerprint": known.partition(":")[0],
            "message": each.message,
        }
        for each, known in findings
    ]
    entries.sort(key=lambda entry: (entry["path"], entry["rule"], entry["function"], entry["fingerprint"]))
    text = json.dumps({"version": VERSION, "findings": entries}, indent=1, ensure_ascii=False)
    try:
        path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"the baseline must be writable: got {path} ({error.strerror})") from error


def unknown(
    findings: Iterable[Finding], known: Counter[str], fingerprint_of: Callable[[Finding], str]
) -> tuple[list[Finding], int, int]:
    """Findings that a baseline does not hold, how many it does, and how many of its entries are gone."""
    left = known.copy()
    new, num_known = [], 0
    for finding in findings:
        mark = fingerprint_of(finding)
        if left[mark] > 0:
            left[mark] -= 1
            num_known += 1
        else:
            new.append(finding)
    return new, num_known, sum(left.values())
