"""Which of its steps a role traces, as it is told by whoever starts it; and engines that trace themselves."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from offbeat_types._rollout import RolloutEngine


@dataclass(frozen=True, kw_only=True)
class TracePlan:
    """What one role traces of itself.

    Args:
        role: such as "trainer-0".
        folder: takes a file `ROLE-STEP.json` for each step, in Chrome's format.
        first, last: the steps, from `first` up to, not including, `last`.
        max_bytes: of all its files.
    """

    role: str
    folder: str
    first: int
    last: int
    max_bytes: int


@runtime_checkable
class TracingEngine(RolloutEngine, Protocol):
    """A rollout engine that traces itself, in whichever processes it computes.

    Its capabilities declare it (`RolloutCapabilities.traces`), where it was given `RolloutEngineConfig.trace_folder`.
    """

    async def begin_trace(self) -> None:
        """Trace from here on."""
        ...

    async def end_trace(self) -> list[Path]:
        """Trace no further.

        Returns:
            One file in Chrome's format for each rank, in `trace_folder`: the caller's, to move or to remove.
        """
        ...
