"""The diagnosis of a run in its report: causes, and the error of each point beside what rounding explains."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from offbeat_run._folder.folder import RunFolder

_MAX_BYTES: Final = 2**20
_SMALLEST: Final = 1e-8
"""Errors are drawn on a logarithmic scale from here to 10."""


class _Point(msgspec.Struct):
    point: str
    error: float
    rounding: float
    beyond: bool


class _Finding(msgspec.Struct):
    kind: str
    where: str
    text: str
    nats: float


class _Stored(msgspec.Struct):
    conclusion: str
    findings: list[_Finding]
    layers: dict[str, list[_Point]]
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class PointBars:
    """One point of a model.

    Args:
        name: of the point.
        error: share of the size of the values.
        rounding: likewise, of the reference in that side's format.
        error_percent: length of its bar.
        rounding_percent: likewise.
        is_beyond: the error is more than rounding explains.
    """

    name: str
    error: float
    rounding: float
    error_percent: float
    rounding_percent: float
    is_beyond: bool


@dataclass(frozen=True, kw_only=True)
class DiagnosisView:
    """Text and bars of the page."""

    conclusion: str
    causes: list[str]
    sides: Mapping[str, list[PointBars]]
    notes: list[str]


def read_diagnosis(run: RunFolder, damaged: list[str]) -> DiagnosisView | None:
    """Read what `diagnose` has written into a run folder; None where it has not been asked.

    Args:
        run: its folder.
        damaged: takes the name of a file that cannot be read.
    """
    path = run.path / "diagnosis" / "diagnosis.json"
    if not path.is_file():
        return None
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES)
    try:
        stored = msgspec.json.decode(data, type=_Stored)
    except msgspec.MsgspecError as error:
        damaged.append(f"{path.relative_to(run.path)}: {error}")
        return None
    return DiagnosisView(
        conclusion=stored.conclusion,
        causes=[f"{each.kind}: {each.where}" for each in stored.findings],
        sides={side: [_bars(each) for each in points] for side, points in stored.layers.items()},
        notes=stored.notes,
    )


def _bars(point: _Point) -> PointBars:
    return PointBars(
        name=point.point,
        error=point.error,
        rounding=point.rounding,
        error_percent=_percent(point.error),
        rounding_percent=_percent(point.rounding),
        is_beyond=point.beyond,
    )


def _percent(share: Any) -> float:
    decades = math.log10(max(share, _SMALLEST) / _SMALLEST)
    return min(100.0, 100 * decades / math.log10(10 / _SMALLEST))
