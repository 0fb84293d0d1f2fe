"""Copies of a trainer rank's state: what goes with them, and how a rank continues from them."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from offbeat_core import Metric, Metrics, RecoverableTrainEngine, TensorSpec, TrainEngine, WeightPart


class _Note(msgspec.Struct, frozen=True):
    """Facts beside the copy of a rank's state: metrics of its last update, and its weights as they travel."""

    metrics: Metrics
    specs: dict[WeightPart, list[TensorSpec]]


class Copies:
    """Copies of this rank's state, and of another's.

    Args:
        engine: that makes them.
        specs: tensors of each part as they travel.

    Attributes:
        engine, specs: as given.
        version: updates that the newest has had.
        metrics: of the last of them.
    """

    def __init__(self, engine: RecoverableTrainEngine, specs: Mapping[WeightPart, Sequence[TensorSpec]]) -> None:
        self.engine, self.specs = engine, {part: list(each) for part, each in specs.items()}
        self.version, self.metrics = 0, dict[str, Metric]()

    @classmethod
    def of(cls, engine: TrainEngine, specs: Mapping[WeightPart, Sequence[TensorSpec]]) -> "Copies | None":
        """Return those of an engine; None where it keeps none."""
        has_some = isinstance(engine, RecoverableTrainEngine) and engine.copies is not None
        return cls(cast(RecoverableTrainEngine, engine), specs) if has_some else None

    @classmethod
    def recovered(cls, engine: RecoverableTrainEngine, version: int, note: bytes) -> "Copies":
        """Return those from which an engine was made: what `RecoverableTrainEngine.recover` returns."""
        known = msgspec.msgpack.decode(note, type=_Note)
        copies = cls(engine, known.specs)
        copies.version, copies.metrics = version, known.metrics
        return copies

    @property
    def held(self) -> Any:
        """Return the copies, which outlive the engine."""
        return self.engine.copies

    def keep(self, version: int, metrics: Metrics) -> None:
        """Copy the state after an update; a call of all ranks."""
        self.engine.keep_copies(version, msgspec.msgpack.encode(_Note(metrics, self.specs)))
        self.version, self.metrics = version, metrics
