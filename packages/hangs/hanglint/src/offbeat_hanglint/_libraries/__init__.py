"""Summaries of libraries, as readable data, and their reader."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from offbeat_hanglint._axes import WORLD, Axes

FOLDER: Final = Path(__file__).parent
SOURCES: Final = ("torch.toml", "frameworks.toml")


@dataclass(frozen=True)
class Operation:
    """A call in which every member of a group must take part.

    Attributes:
        kind: its name, for messages and for matching the two sides of a condition.
        group, src, dst: positions of those arguments, -1 where it has none.
        axes: which the group spans where none is given.
        is_explicit: False for what a wrapper does inside: the forward pass of a sharded module.
        is_every_rank: True for new_group: members or not, all call.
    """

    kind: str
    group: int = -1
    src: int = -1
    dst: int = -1
    axes: Axes = WORLD
    is_explicit: bool = True
    is_every_rank: bool = False
    is_teardown: bool = False
    is_sure: bool = True


@dataclass(frozen=True)
class DefaultGroup:
    """A call that takes the default group unless one is given."""

    keyword: str
    position: int
    unless: tuple[str, ...]


@dataclass(frozen=True)
class Libraries:
    """All tables, merged."""

    functions: dict[str, Operation]
    anywhere: frozenset[str]
    point_to_point: frozenset[str]
    methods: dict[str, tuple[tuple[frozenset[str], Operation], ...]]
    implicit_calls: frozenset[str]
    implicit_methods: frozenset[str]
    backward: frozenset[str]
    default_groups: dict[str, DefaultGroup]
    local_time: frozenset[str]
    local_file: frozenset[str]


@cache
def libraries(summaries: tuple[Path, ...] = ()) -> Libraries:
    """Return the tables, read once.

    Args:
        summaries: more of them, in the form of ours.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: one of them cannot be read, or has another form.
    """
    tables = [tomllib.loads((FOLDER / name).read_text("utf-8")) for name in SOURCES]
    tables += [tomllib.loads(path.read_text("utf-8")) for path in summaries]
    merged = {key: [entry for t in tables for entry in _as_list(t.get(key))] for key in {k for t in tables for k in t}}
    methods: dict[str, list[tuple[frozenset[str], Operation]]] = {}
    for entry in merged["methods"]:
        for name in entry["names"]:
            if entry.get("kind") != "getter":
                operation = Operation(name, axes=frozenset(entry["axes"]), is_explicit=not entry.get("implicit", False))
                methods.setdefault(name, []).append((frozenset(entry.get("receivers", ())), operation))
    implicit = merged["implicit"]
    return Libraries(
        functions=_functions(merged["collectives"]),
        anywhere=_names(merged["anywhere"], "names"),
        point_to_point=_names(merged["point_to_point"], "names"),
        methods={name: tuple(entries) for name, entries in methods.items()},
        implicit_calls=_names(implicit, "calls"),
        implicit_methods=_names(implicit, "methods"),
        backward=_names(merged["backward"], "methods"),
        default_groups={
            name: DefaultGroup(entry["keyword"], entry["position"], tuple(entry["unless"]))
            for entry in merged["default_groups"]
            for name in entry["names"]
        },
        local_time=_names(merged["waits"], "time"),
        local_file=_names(merged["waits"], "file"),
    )


def _functions(entries: list[dict[str, Any]]) -> dict[str, Operation]:
    found: dict[str, Operation] = {}
    for entry in entries:
        for name, places in entry["functions"].items():
            operation = Operation(
                name,
                places.get("group", -1),
                places.get("src", -1),
                places.get("dst", -1),
                frozenset(places.get("axes", WORLD)),
                is_every_rank=entry.get("every_rank", False),
                is_teardown=entry.get("teardown", False),
            )
            found.update({f"{module}.{name}": operation for module in entry["modules"]})
    return found


def _names(entries: list[dict[str, Any]], key: str) -> frozenset[str]:
    return frozenset(name for entry in entries for name in entry.get(key, ()))


def _as_list(value: Any) -> list[dict[str, Any]]:
    return value if isinstance(value, list) else [value] if value else []
