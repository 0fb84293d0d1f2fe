"""Notes of what a forward pass computes on the way, by the points of `offbeat_core.Inspection`."""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from offbeat_core import EMBEDDING, FINAL_NORM, POSITIONS, TOKEN_IDS, Floats, Inspection, layer_point
from offbeat_rollout_torch._families import Architecture


class PointNotes:
    """Takes what a pass computes, and keeps none of it."""

    def take_inputs(self, ids_N: Tensor, positions_N: Tensor, x_NE: Tensor) -> None:
        """Take tokens, their positions and their embeddings."""

    def enter(self, layer: int) -> None:
        """Take what follows as of this layer."""

    def take(self, point: str, values: Tensor) -> None:
        """Take the values of a point within the layer."""

    def take_heads(self, qkv_NhD: Tensor, *, turned: bool) -> None:
        """Take queries, keys and values, before or after they are turned by position."""

    def leave(self, x_NE: Tensor) -> None:
        """Take what the layer gives to the next one."""

    def end(self, normed_NE: Tensor) -> None:
        """Take what the last norm gives."""


NO_NOTES: Final = PointNotes()


class Notes(PointNotes):
    """Keeps what is asked for, one pass behind the other: chunks of one sequence.

    Args:
        architecture: of the model.
        layer: whose inner points are kept; None: what lies between layers.
    """

    def __init__(self, architecture: Architecture, layer: int | None) -> None:
        self._architecture, self._layer, self._here = architecture, layer, -1
        self._parts: dict[str, list[Floats]] = {}

    def take_inputs(self, ids_N: Tensor, positions_N: Tensor, x_NE: Tensor) -> None:
        if self._layer is None:
            self._keep(TOKEN_IDS, ids_N[:, None])
            self._keep(POSITIONS, positions_N[:, None])
            self._keep(EMBEDDING, x_NE)

    def enter(self, layer: int) -> None:
        self._here = layer

    def take(self, point: str, values: Tensor) -> None:
        if self._here == self._layer:
            self._keep(point, values)

    def take_heads(self, qkv_NhD: Tensor, *, turned: bool) -> None:
        if self._here != self._layer:
            return
        a = self._architecture
        query, key, value = torch.split(qkv_NhD, [a.num_heads, a.num_kv_heads, a.num_kv_heads], 1)
        if a.rule is not None:  # its heads are in the folder's order, and its projections have gates between heads
            if turned:
                self._keep("query", query.flatten(1))
                self._keep("key", key.flatten(1))
            return
        names = ("query", "key") if turned else ("query projection", "key projection")
        for name, heads in zip(names, (query, key), strict=True):
            self._keep(name, torch.unflatten(heads, -1, (-1, 2)).transpose(-1, -2).flatten(1))
        if not turned:
            self._keep("value projection", value.flatten(1))

    def leave(self, x_NE: Tensor) -> None:
        if self._layer is None:
            self._keep(layer_point(self._here), x_NE)

    def end(self, normed_NE: Tensor) -> None:
        if self._layer is None:
            self._keep(FINAL_NORM, normed_NE)

    def _keep(self, point: str, values: Tensor) -> None:
        copied = values.detach().to("cpu", torch.float32, copy=True)  # the pass goes on to write to it
        self._parts.setdefault(point, []).append(copied.numpy())

    def read(self) -> Inspection:
        """Return all that was kept."""
        return {point: np.concatenate(parts) for point, parts in self._parts.items()}
