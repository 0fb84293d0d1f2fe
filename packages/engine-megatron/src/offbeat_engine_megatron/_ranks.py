"""What all ranks of the trainer do together; see `offbeat_training.TrainerRanks`."""

from collections.abc import Sequence

import numpy as np
import torch

from offbeat_mesh import Mesh
from offbeat_training import TrainerRanks
from offbeat_types import Floats


class Ranks(TrainerRanks):
    """The ranks of a trainer. The first of tp and cp on the last stage reports what its share has found."""

    def __init__(self, mesh: Mesh) -> None:
        self._pp = mesh.group("pp")
        speaks = bool(mesh.where(pp="last", tp=0, cp=0))
        super().__init__(mesh.group("dp", "cp", "tp", "pp"), mesh.group("dp"), speaks=speaks)

    def gather_shares(self, values: Floats, counts: Sequence[int], device: torch.device) -> list[Floats]:
        """Values of every share, found on its last stage; `counts` says how many each has."""
        padded = torch.zeros(max(counts), dtype=torch.float32)
        if self._pp.rank == self._pp.size - 1:
            padded[: len(values)] = torch.from_numpy(values)
        padded = padded.to(device)
        if self._pp.size > 1:
            self._pp.broadcast(padded, source=self._pp.size - 1)
        found = self._dp.all_gather(padded).cpu().numpy()
        return [np.asarray(row[:count]) for row, count in zip(found, counts, strict=True)]
