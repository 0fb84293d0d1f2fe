"""One of several ranks that train together: its place in the world, its engine, its monitor.

Every rank is asked for the same things in the same order (`TrainEngine`). Rank 0 is the process of the command line;
the others run `Rank` as a role, `trainer-1`, `trainer-2`, …
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch._C._distributed_c10d import TCPStore

import offbeat_liveness as liveness
from offbeat_mesh import Mesh, StepTracer, World, join_world, open_device, open_store, rank_device
from offbeat_objectives import sft_loss
from offbeat_types import TracePlan, TrainEngine, TrainEngineConfig, TrainSequence, load_backend

_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank belongs.

    Args:
        rank: in [0, size).
        size: how many train together.
        backend: name of the training engine.
        deadline_s: for the ranks to come, and for each wait of one for another.
        stall_after_s: see `LivenessConfig`.
        dumps: folder for what the monitor finds; None writes none.
        trace: which steps it traces; None for none.
    """

    rank: int
    size: int
    backend: str
    deadline_s: float
    stall_after_s: float
    dumps: str | None
    trace: TracePlan | None = None

    @property
    def name(self) -> str:
        """As errors, logs and the monitor call it."""
        return f"trainer-{self.rank}"


class Rank:
    """A rank of the trainer. All of its methods belong to one thread.

    Args:
        config: of the engine, the same on all ranks.
        place: of this one.
    """

    engine: TrainEngine

    def __init__(self, config: TrainEngineConfig, place: Place) -> None:
        self._config, self._place = config, place
        self._create = load_backend("offbeat.engine", place.backend).create  # the slow import, before anybody waits
        self._store: TCPStore | None = None
        self._world: World | None = None
        self._monitor: liveness.Monitor | None = None

    def open_store(self) -> int:
        """Open the place where the ranks find each other, and return its port."""
        self._store = open_store(_LOOPBACK)
        return int(self._store.port)

    def join(self, port: int) -> None:
        """Join the other ranks and load this one's part of the model."""
        place = self._place
        self._monitor = liveness.watch(place.stall_after_s, "abort", place.dumps, name=place.name)
        store = self._store or TCPStore(_LOOPBACK, port)
        device = rank_device(self._config.device, place.rank, place.size)
        self._world = join_world(
            rank=place.rank, size=place.size, store=store, device=device, deadline_s=place.deadline_s
        )
        self.engine = self._create(self._config, Mesh(dp=place.size))
        self._tracer = StepTracer(open_device(device), place.trace) if place.trace else None

    def forward_backward(self, sequences: list[TrainSequence]) -> None:
        """Do this rank's share. The answer is rank 0's too, so it stays here; and so below."""
        self.engine.forward_backward(sequences, sft_loss)

    def step(self) -> None:
        """Take the step."""
        self.engine.step()

    def begin_trace(self, number: int) -> None:
        """Trace the step that begins, if it is one to trace."""
        if self._tracer is not None:
            self._tracer.begin(number)

    def end_trace(self) -> None:
        """Write what was traced of it."""
        if self._tracer is not None:
            self._tracer.stop()
            self._tracer.write()

    def logprobs(self, sequences: list[TrainSequence], reference: bool) -> None:
        """Do this rank's share."""
        self.engine.logprobs(sequences, reference=reference)

    def pass_weights(self) -> None:
        """Give the others this rank's part of every tensor."""
        for _ in self.engine.weights():
            pass

    def save_weights(self, folder: Path) -> None:
        """Write the weights together."""
        self.engine.save_weights(folder)

    def save(self, folder: Path) -> None:
        """Write a checkpoint together."""
        self.engine.save(folder)

    def load(self, folder: Path) -> None:
        """Read a checkpoint together."""
        self.engine.load(folder)

    def stop_watching(self) -> None:
        """End the monitor: from here on a rank that is gone is nobody's concern."""
        if self._monitor is not None:
            self._monitor.close()

    def close(self, error: BaseException | None = None) -> None:
        """Free everything and leave the other ranks; without an error, when they leave as well."""
        self.stop_watching()
        if hasattr(self, "engine"):
            self.engine.close()
        if self._world is not None:
            self._world.leave(error)
