"""Metadata of a package for an installer, from pyproject.toml and from a wheel in one form, to be compared.

Standard library only, as everything that nox and the contracts read before an installation.
"""

import re
from configparser import RawConfigParser
from dataclasses import dataclass
from email.message import Message
from typing import Final

from workspace import Package, dist_name

REQUIREMENT: Final = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)\s*(\[(?P<extras>[^\]]*)\])?\s*(?P<range>[^;]*)(;(?P<marker>.*))?"
)
ONLY_IN: Final = re.compile(r"(?:^|\s+and\s+)extra\s*==\s*'(?P<extra>[^']+)'$")
PLAIN_KEYS: Final = {"scripts": "console_scripts", "gui-scripts": "gui_scripts"}


@dataclass(frozen=True)
class Metadata:
    """Metadata of one version of a package for an installer.

    Args:
        requirements: in the form of `normal_requirement`, with the Python versions as one on "python".
        extras: their normalised names.
        entry_points: the object of each, by "group: name".
    """

    requirements: frozenset[str]
    extras: frozenset[str]
    entry_points: dict[str, str]

    @classmethod
    def of_package(cls, package: Package) -> "Metadata":
        """Return that of a package in the workspace."""
        project = package.metadata["project"]
        asked = {normal_requirement(each) for each in package.dependencies}
        for extra, requirements in package.extras.items():
            asked |= {normal_requirement(each, extra) for each in requirements}
        groups = {group: project.get(key, {}) for key, group in PLAIN_KEYS.items()} | project.get("entry-points", {})
        return cls(
            requirements=frozenset(asked | {normal_requirement(f"python{project.get('requires-python', '')}")}),
            extras=frozenset(dist_name(extra) for extra in package.extras),
            entry_points={
                f"{group}: {name}": target for group, named in groups.items() for name, target in named.items()
            },
        )

    @classmethod
    def of_wheel(cls, message: Message, entry_points: str) -> "Metadata":
        """Return that of a wheel.

        Args:
            message: its METADATA.
            entry_points: text of its entry_points.txt, empty where it has none.
        """
        asked = {normal_requirement(each) for each in message.get_all("Requires-Dist") or []}
        parser = RawConfigParser(delimiters=("=",))
        parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case
        parser.read_string(entry_points)
        return cls(
            requirements=frozenset(asked | {normal_requirement(f"python{message['Requires-Python'] or ''}")}),
            extras=frozenset(dist_name(extra) for extra in message.get_all("Provides-Extra") or []),
            entry_points={
                f"{group}: {name}": target for group in parser.sections() for name, target in parser[group].items()
            },
        )

    def lost_since(self, older: "Metadata") -> list[str]:
        """Return extras and entry points that an older version has and this one has not."""
        gone = sorted(older.entry_points.keys() - self.entry_points.keys())
        return [f"extra [{each}]" for each in sorted(older.extras - self.extras)] + [
            f"entry point {each}" for each in gone
        ]

    def added_since(self, older: "Metadata") -> list[str]:
        """Return extras and entry points that an older version does not have, or has for another object."""
        new = sorted(self.entry_points.items() - older.entry_points.items())
        extras = [f"extra [{each}]" for each in sorted(self.extras - older.extras)]
        return extras + [f"entry point {name} = {target}" for name, target in new]


def normal_requirement(requirement: str, extra: str = "") -> str:
    """Return a requirement in the one form that pyproject.toml and a wheel can be compared in.

    Args:
        requirement: such as "Foo_Bar[x] >=1.0,<2; sys_platform == 'linux'"; in a wheel with its extra in the marker.
        extra: which has it in pyproject.toml; empty for a requirement that is always there.

    Raises:
        ValueError: it has no such form.
    """
    found = REQUIREMENT.fullmatch(requirement.strip())
    if found is None:
        raise ValueError(f'a requirement has the form "name[extra]>=1,<2; marker": got {requirement!r}')
    marker = " ".join((found["marker"] or "").replace('"', "'").split())
    if in_wheel := ONLY_IN.search(marker):
        extra, marker = in_wheel["extra"], marker[: in_wheel.start()]
    extras = ",".join(sorted(dist_name(each.strip()) for each in (found["extras"] or "").split(",") if each.strip()))
    text = dist_name(found["name"]) + (f"[{extras}]" if extras else "") + _normal_range(found["range"])
    return (
        text + (f"; {_normal_marker(marker)}" if marker else "") + (f" in extra [{dist_name(extra)}]" if extra else "")
    )


def _normal_range(text: str) -> str:
    """Return the clauses of a range in one order, without the zeros at the end of a bound: ">=2.0" is ">=2"."""
    if text.startswith("@"):
        return f" {text.strip()}"
    clauses = sorted("".join(clause.split()) for clause in text.strip().strip("()").split(",") if clause.strip())
    return ",".join(re.sub(r"^([<>]=?\d+(?:\.\d+)*?)(?:\.0)+$", r"\1", clause) for clause in clauses)


def _normal_marker(text: str) -> str:
    """Return the conditions of a marker in one order, as a build sorts them; those of nested brackets as they are."""
    text = re.sub(r"^\(([^()]*)\)$", r"\1", text)  # a wheel has "(a or b) and extra == 'x'" for "a or b"
    if "(" in text:
        return text
    return " or ".join(sorted(" and ".join(sorted(either.split(" and "))) for either in text.split(" or ")))
