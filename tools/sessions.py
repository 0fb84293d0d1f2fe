"""Sessions of each package as `nox -l` lists them: their order, tags and texts.

A package says what its tests show, and the backend that it belongs to, in its pyproject.toml:

    [tool.offbeat.sessions]
    tags = ["vllm"]
    test = "what tests/ shows"
    engine = "what tests/engine/, on the real engine, shows"
    long = "what the tests marked nightly show"
    long-engine = "the same on the real engine"
    cuda = "what tests/cuda/ shows on that device"
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import nox
from ranges import own_requirements
from released import Range
from workspace import Package, dist_name


def tags_of(package: Package) -> list[str]:
    """Return the backends that a package is of."""
    return list(_table(package).get("tags", []))


def text_of(package: Package, kind: str) -> str:
    """Return what a package says of its sessions of a kind, such as "test" or "cuda".

    Raises:
        ValueError: it says nothing.
    """
    text = _table(package).get(kind)
    if not text:
        place = f"{package.folder.name}/pyproject.toml"
        raise ValueError(f'{place} needs {kind} = "…" under [tool.offbeat.sessions]: what its tests show, for `nox -l`')
    return str(text)


def _table(package: Package) -> dict[str, Any]:
    return dict(package.metadata.get("tool", {}).get("offbeat", {}).get("sessions", {}))


def in_order(found: Iterable[Package]) -> list[Package]:
    """Return packages that are of no backend first, then applications, then those of one backend after another."""
    return sorted(found, key=lambda package: (tags_of(package), package.is_app, package.key))


def backends(found: Iterable[Package]) -> str:
    """Return the tags of all packages as a text: "megatron, ray, torch"."""
    return ", ".join(sorted({tag for package in found for tag in tags_of(package)}))


def text_of_wheel(package: Package) -> str:
    """Return what its session `wheels` proves."""
    names = [dist_name(requirement) for requirement in package.dependencies] or ["nothing else"]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"The wheel of {package.name} installs alone, its names load; brings {', '.join(names[:4])}{more}."


def text_of_versions(package: Package, ours: set[str]) -> str:
    """Return what its session `versions` proves."""
    oldest = {dist_name(each): Range.of(each).lower for each in own_requirements(package, ours)}
    named = [f"{name.removeprefix('offbeat-')} {version}" for name, version in oldest.items()]
    more = f" and {len(named) - 4} more" if len(named) > 4 else ""
    return f"Types of {package.name} hold beside the oldest versions it admits: {', '.join(named[:4])}{more}."


def add_session(
    name: str, text: str, run: Callable[[nox.Session], None], tags: Sequence[str] = (), *, default: bool = True
) -> None:
    """Give nox a session with a text of its own; those that `nox.parametrize` makes share one."""

    def session(session: nox.Session) -> None:
        run(session)

    session.__doc__ = text
    nox.session(name=name, tags=list(tags), default=default)(session)


def add_all_of(kind: str, names: Sequence[str], tags: Sequence[str] = ()) -> None:
    """Add a session that runs all of a kind, such as `wheels` for `wheels(core)` and the others."""

    def run(session: nox.Session) -> None:
        for name in names:
            session.notify(name)

    add_session(kind, f"Every {kind}(…) above, one after another: {len(names)} in all.", run, tags, default=False)
