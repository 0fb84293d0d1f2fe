"""Licences of third-party packages, read from the metadata of installed environments and held against licences.toml.

A package's licence is its `License-Expression`, else its classifiers, else the first line of `License`. One that says
nothing of these, or that has a licence which is not allowed everywhere, needs an entry of its own, with a reason.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, Final

from workspace import dist_name

RULES: Final = Path(__file__).with_suffix(".toml")
# Classifiers that name no licence.
VAGUE: Final = ("OSI Approved", "DFSG approved")
# A longer first line is the text of a licence, not its name.
MAX_NAME: Final = 60


@dataclass(frozen=True, kw_only=True)
class Licence:
    """The licence of one installed package.

    Args:
        name: normalised name of the distribution.
        version: the installed one.
        text: an SPDX expression, or what the metadata says instead; empty for nothing.
        reason: why it is allowed though its text alone is not; empty where the text is enough.
        allowed: whether it may be depended on.
    """

    name: str
    version: str
    text: str
    reason: str
    allowed: bool

    @property
    def is_gpl(self) -> bool:
        """Return whether the text names a licence of the GPL's family."""
        return "GPL" in self.text or "GNU" in self.text


def licences(folders: Iterable[Path], ours: set[str], rules: Path = RULES) -> list[Licence]:
    """Return the licence of each package installed in some environments, by name.

    Args:
        folders: `site-packages` of each environment.
        ours: names that are left out.
        rules: TOML with the tables `names`, `allowed` and `packages`.
    """
    known = tomllib.loads(rules.read_text())
    found: dict[tuple[str, str], Licence] = {}
    for installed in distributions(path=[str(folder) for folder in folders]):
        name = dist_name(installed.name)
        if name not in ours:
            found[name, installed.version] = _licence_of(name, installed, known)
    return [found[key] for key in sorted(found)]


def _licence_of(name: str, installed: Distribution, known: Mapping[str, Any]) -> Licence:
    stated = spdx(_stated(installed), known["names"])
    own = known["packages"].get(name)
    # Another version may have another licence: the entry is for what was read.
    if own and own.get("stated", "") == stated:
        return Licence(name=name, version=installed.version, text=own["licence"], reason=own["reason"], allowed=True)
    allowed = is_allowed(stated, known["allowed"])
    return Licence(name=name, version=installed.version, text=stated, reason="", allowed=allowed)


def _stated(installed: Distribution) -> Sequence[str]:
    metadata = installed.metadata
    if expression := metadata.get_all("License-Expression"):
        return expression
    classifiers = [each for each in metadata.get_all("Classifier") or [] if each.startswith("License ::")]
    if named := [last for each in classifiers if (last := each.rpartition(" :: ")[2]) not in VAGUE]:
        return named
    first = "".join((metadata.get_all("License") or [""])[:1]).strip().partition("\n")[0].strip()
    return [first] if 0 < len(first) <= MAX_NAME else []


def spdx(stated: Sequence[str], names: Mapping[str, str]) -> str:
    """Return one expression of what metadata states; all of several licences have to be allowed."""
    return " AND ".join(names.get(each, each) for each in stated)


def is_allowed(expression: str, allowed: Iterable[str]) -> bool:
    """Return whether an SPDX expression can be fulfilled by allowed licences.

    Args:
        expression: such as "MIT AND (Apache-2.0 OR GPL-2.0-only)"; empty for none.
        allowed: identifiers, each with its "WITH" exception where it has one.
    """
    fine = {*allowed, "ALLOWED"}
    while inner := re.search(r"\(([^()]*)\)", expression):
        known = "ALLOWED" if _fulfilled(inner[1], fine) else "REFUSED"
        expression = expression[: inner.start()] + known + expression[inner.end() :]
    return _fulfilled(expression, fine)


def _fulfilled(expression: str, fine: set[str]) -> bool:
    sides = [re.split(r"\s+AND\s+", side) for side in re.split(r"\s+OR\s+", expression)]
    return any(all(each.strip() in fine for each in side) for side in sides)


def table(found: Iterable[Licence], unseen: Sequence[str], environments: Sequence[str]) -> str:
    """Return the page of all licences as Markdown.

    Args:
        found: licences of what is installed.
        unseen: pins of the lock that no environment has.
        environments: names of those that were read.
    """
    rows = [f"| {each.name} | {each.version} | {each.text or 'none'} | {each.reason} |" for each in found]
    head = f"# Licences of third-party packages\n\nRead from the metadata of: {', '.join(environments)}.\n"
    last = f"\nIn the lock, but in none of these environments, so not read ({len(unseen)}): {', '.join(unseen)}.\n"
    return "\n".join([head, "| package | version | licence | reason for it |", "|---|---|---|---|", *rows, last])
