"""LoRA adapters: y = W x + scale B (A x), added to what the model computes; W stays as it is, so an update is small.

Shapes: N tokens of a pass, R rank (of fused matrices: of all their parts together), I and O sizes of a linear map.

Source: arXiv:2106.09685; names are those of Hugging Face PEFT, peft/tuners/lora/layer.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from offbeat_core import LoraAdapter, WeightSyncError
from offbeat_rollout_torch._decoder import DecoderWeights
from offbeat_rollout_torch._parameters import Parameter
from offbeat_weightsync import select_adapter

PEFT_PREFIX: Final = "base_model.model."
MATRICES: Final = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate": ("mlp.gate_proj",),
    "up": ("mlp.up_proj",),
    "down": ("mlp.down_proj",),
}
"""The matrices of a layer, and the trainer's names of the layers that each is made of."""
RULE_MATRICES: Final = {
    "qkv": tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")),
    "out": ("linear_attn.out_proj",),
}
"""Matrices of a layer with the gated delta rule, in the place of the same ones of attention."""


class LowRank(NamedTuple):
    """The update of one matrix.

    Args:
        down_RI: A of all parts, one below the other.
        up_OR: B of each part in its own rows and columns, zero elsewhere; rows are ordered as the matrix's are.
        scale: of the adapter.
    """

    down_RI: Tensor
    up_OR: Tensor
    scale: float

    def add(self, y_NO: Tensor, x_NI: Tensor, rows: Tensor | None) -> None:
        """Add the update to y, in place, for all tokens or those of some rows."""
        if rows is None:
            y_NO.addmm_(x_NI @ self.down_RI.t(), self.up_OR.t(), alpha=self.scale)
        else:
            low = x_NI.index_select(0, rows) @ self.down_RI.t()
            y_NO.index_add_(0, rows, low @ self.up_OR.t(), alpha=self.scale)


class Adapter:
    """One adapter, laid out as the decoder's matrices are.

    Args:
        weights: of the model that it adapts.
        tensors: by PEFT's names; copied.
        scale: alpha / rank.
        source: the sender, for errors.

    Raises:
        WeightSyncError: a tensor lacks its partner, or is none of this model's layers.
    """

    def __init__(self, weights: DecoderWeights, tensors: Mapping[str, Tensor], scale: float, source: str) -> None:
        select_adapter(tensors.items())
        self._views: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        a = weights.architecture
        self._layers = [
            {
                matrix: update
                for matrix, parts in (*MATRICES.items(), *RULE_MATRICES.items())
                if (update := self._update(weights, [f"{a.prefix}layers.{i}.{part}" for part in parts], tensors, scale))
            }
            for i in range(a.num_layers)
        ]
        if unknown := sorted(tensors.keys() - self._views.keys()):
            raise WeightSyncError(f"{source}: this model has no matrix for {unknown[0]!r} to adapt")

    def update(self, layer: int, matrix: str) -> LowRank | None:
        """Return what is added to a matrix of a layer."""
        return self._layers[layer].get(matrix)

    def read(self, name: str) -> Tensor:
        """Return a tensor as it was sent, from where it is used."""
        view, shape = self._views[name]
        return view.reshape(shape)

    def _update(
        self, weights: DecoderWeights, parts: Sequence[str], tensors: Mapping[str, Tensor], scale: float
    ) -> LowRank | None:
        """Lay the parts of one matrix out; None where none of them is adapted."""
        if f"{parts[0]}.weight" not in weights.parameters:  # in its place are experts, which take none, or others
            return None
        places = [weights.parameters[f"{part}.weight"] for part in parts]
        names = [tuple(f"{PEFT_PREFIX}{part}.lora_{side}.weight" for side in "AB") for part in parts]
        found = [(place, down, up) for place, (down, up) in zip(places, names, strict=True) if down in tensors]
        if not found:
            return None
        rank = sum(len(tensors[down]) for _, down, _ in found)
        down_RI = weights.final_norm.new_empty(rank, places[0].shape[1])
        # Gate and up may be parts of one matrix, which are adapted one by one.
        start = places[0].rows.start
        up_OR = weights.final_norm.new_zeros(max(place.rows.stop for place in places) - start, rank)
        first = 0
        for place, down, up in found:
            columns = slice(first, first + len(tensors[down]))
            self._put(down, tensors[down], (columns.stop - first, place.shape[1]), down_RI[columns])
            self._put(
                up, tensors[up], (place.shape[0], columns.stop - first), _rows_of(place, up_OR[:, columns], start)
            )
            first = columns.stop
        return LowRank(down_RI, up_OR, scale)

    def _put(self, name: str, tensor: Tensor, shape: tuple[int, ...], view: Tensor) -> None:
        if tuple(tensor.shape) != shape:
            raise WeightSyncError(f"{name}: must have shape {shape}, got {tuple(tensor.shape)}")
        view.copy_(tensor.reshape(view.shape))
        self._views[name] = view, shape


def _rows_of(place: Parameter, up_OR: Tensor, start: int) -> Tensor:
    """Return the rows of a part in the order of Hugging Face; the first of `up_OR` is row `start` of the storage."""
    rows = up_OR[place.rows.start - start : place.rows.stop - start]
    if not place.rotary:
        return rows
    return rows.view(-1, place.rotary // 2, 2, rows.shape[1]).transpose(1, 2)


class AdapterRows(NamedTuple):
    """An adapter, and the tokens of a pass that it changes: [n] int64, or None for all."""

    adapter: Adapter
    rows: Tensor | None

    def add(self, layer: int, matrix: str, y: Tensor, x: Tensor) -> None:
        """See `MatrixUpdate`."""
        if (update := self.adapter.update(layer, matrix)) is not None:
            update.add(y, x, self.rows)


class Adapters:
    """The adapters of one engine, by name, and the policy version of each and of the model, whose name is ""."""

    def __init__(self) -> None:
        self._held: dict[str, Adapter] = {}
        self._versions = {"": 0}
        self.last_version = 0

    def __contains__(self, name: str) -> bool:
        return not name or name in self._held

    def __str__(self) -> str:
        return ", ".join(map(repr, self._held)) or "none"

    def version_of(self, name: str) -> int:
        """Return the version of the last update of the model or of this adapter."""
        return self._versions[name]

    def model_updated(self, version: int) -> None:
        """Note that what every adapter samples has changed with the model."""
        self._versions = dict.fromkeys(self._versions, version)
        self.last_version = version

    def put(self, adapter: LoraAdapter, held: Adapter, version: int) -> None:
        self._held[adapter.name] = held
        self._versions[adapter.name] = self.last_version = version

    def drop(self, name: str) -> None:
        if name in self._held:
            del self._held[name], self._versions[name]

    def rows(self, names_and_counts: Iterable[tuple[str, int]], device: torch.device) -> list[AdapterRows]:
        """Return what changes which tokens of a pass.

        Args:
            names_and_counts: of each run of tokens its adapter, "" for the model, and how many tokens it is.
            device: of the engine.
        """
        of: dict[str, list[int]] = {}
        end = 0
        for name, count in names_and_counts:
            of.setdefault(name, []).extend(range(end, end + count))
            end += count
        if len(of) == 1:
            return [AdapterRows(self._held[name], None) for name in of if name]
        return [AdapterRows(self._held[name], torch.tensor(rows, device=device)) for name, rows in of.items() if name]
