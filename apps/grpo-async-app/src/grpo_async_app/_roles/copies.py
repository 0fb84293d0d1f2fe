"""Copies of the trainer's state as a rank keeps them, with what is said of the update that led to it."""

from typing import Any

import msgspec

from offbeat_core import Metrics, RecoverableTrainEngine, TrainEngine


class Copies:
    """Copies of this rank's state, and of another's.

    Args:
        engine: that makes them.

    Attributes:
        version: updates that the newest has had.
        metrics: of the last of them.
    """

    def __init__(self, engine: RecoverableTrainEngine) -> None:
        self._engine, self.version = engine, 0
        self.metrics: Metrics = {}

    @classmethod
    def of(cls, engine: TrainEngine) -> "Copies | None":
        """Return those of an engine; None where it keeps none."""
        return cls(engine) if isinstance(engine, RecoverableTrainEngine) and engine.copies is not None else None

    @property
    def held(self) -> Any:
        """Return the copies, which outlive the engine."""
        return self._engine.copies

    def keep(self, version: int, metrics: Metrics) -> None:
        """Copy the state after an update; a call of all ranks."""
        self._engine.keep_copies(version, msgspec.msgpack.encode(metrics))
        self.version, self.metrics = version, metrics

    def recover(self, held: Any) -> None:
        """Give the engine, made anew, the newest state that all ranks have had; a call of all ranks."""
        self.version, note = self._engine.recover(held)
        self.metrics = msgspec.msgpack.decode(note, type=Metrics)
