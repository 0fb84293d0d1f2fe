"""Requests of a test by its marks, and stand-ins for the values that differ between its ranks."""

from dataclasses import dataclass, field
from math import prod
from typing import Any

import pytest

DEADLINE_INI = "ranks_deadline_s"
PRELOAD_INI = "ranks_preload"
OPTIONS = ("deadline_s", "join", "compare", "liveness")


@dataclass(frozen=True, kw_only=True)
class RanksRequest:
    """Request for running one test body: on how many processes, on which mesh if any, and until when.

    Args:
        join: whether the processes join a torch.distributed world before the body.
        compare: whether to compare the ranks' collectives at the end.
        liveness: whether the liveness monitor watches the ranks.
    """

    size: int
    axes: dict[str, Any] = field(default_factory=dict)
    deadline_s: float
    join: bool = True
    compare: bool = True
    liveness: bool = True


def read_request(item: pytest.Item) -> RanksRequest | None:
    """Return what the marks of a test ask for, or None where it has none of ours."""
    axes = _axes(item)
    mark = _closest(item, "mesh") if axes is not None else _closest(item, "ranks")
    if mark is None and axes is None:
        return None
    options = dict(mark.kwargs) if mark else {}
    given = {name: options.pop(name) for name in OPTIONS if name in options}
    deadline_s = float(given.pop("deadline_s", 0) or item.config.getini(DEADLINE_INI))
    if axes is not None:
        # Expert parallelism divides the ranks that the other axes give: it adds none.
        num_ranks = prod(length for axis, length in axes.items() if axis != "ep")
        return RanksRequest(size=num_ranks, axes=axes, deadline_s=deadline_s, **given)
    assert mark is not None
    size = _parameter(item, "ranks") or (mark.args[0] if len(mark.args) == 1 else None)
    if not isinstance(size, int) or size < 1 or options:
        pytest.fail(f"@pytest.mark.ranks takes a number of processes and {', '.join(OPTIONS)}: got {mark}", False)
    return RanksRequest(size=size, deadline_s=deadline_s, **given)


def parametrise(metafunc: pytest.Metafunc) -> None:
    """Run a test once for each size of `ranks(2, 4)`, and once for each of several `mesh` marks."""
    sizes = next((mark.args for mark in metafunc.definition.iter_markers("ranks")), ())
    if len(sizes) > 1:
        _request_fixture(metafunc, "ranks", list(sizes), [f"{size}-ranks" for size in sizes])
    meshes = [mark for mark in reversed(metafunc.definition.own_markers) if mark.name == "mesh"]
    if len(meshes) > 1:
        _request_fixture(metafunc, "mesh", [mark.kwargs for mark in meshes], [_mesh_id(mark) for mark in meshes])


def _request_fixture(metafunc: pytest.Metafunc, name: str, values: list[Any], ids: list[str]) -> None:
    if name not in metafunc.fixturenames:
        metafunc.fixturenames.append(name)
    metafunc.parametrize(name, values, ids=ids, indirect=True)


def _mesh_id(mark: pytest.Mark) -> str:
    return "-".join(f"{axis}{size}" for axis, size in mark.kwargs.items() if axis not in OPTIONS)


def _axes(item: pytest.Item) -> dict[str, int] | None:
    given = _parameter(item, "mesh")
    if given is None:
        mark = _closest(item, "mesh")
        given = mark.kwargs if mark else None
    if given is None:
        return None
    return {axis: size for axis, size in given.items() if axis not in OPTIONS}


def _closest(item: pytest.Item, name: str) -> pytest.Mark | None:
    """Return the mark nearest to the test: one of its parameter set comes before one of its function."""
    callspec = getattr(item, "callspec", None)
    for mark in getattr(callspec, "marks", ()):
        if mark.name == name:
            return mark.mark if isinstance(mark, pytest.MarkDecorator) else mark
    return item.get_closest_marker(name)


def _parameter(item: pytest.Item, name: str) -> Any:
    callspec = getattr(item, "callspec", None)
    return getattr(callspec, "params", {}).get(name)


class PerRank:
    """Stands in for a fixture whose value differs between ranks, until the body runs on one of them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(self._refusal())

    def __eq__(self, other: object) -> bool:
        raise TypeError(self._refusal())

    def __bool__(self) -> bool:
        raise TypeError(self._refusal())

    __hash__ = object.__hash__

    def _refusal(self) -> str:
        return (
            f"the fixture {self._name!r} has its value in the test's body only: other fixtures are evaluated once, "
            "before there are ranks"
        )
