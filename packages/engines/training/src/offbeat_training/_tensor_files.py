"""Safetensors: planned by all ranks alike, written as a stream by the rank of each file, read by boxes."""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from offbeat_core import (
    MODEL_INDEX_FILE,
    ModelError,
    TensorSpec,
    find_tensors,
    tensor_file_header,
    tensor_file_index,
    write_digest,
)

MAX_FILE_BYTES: Final = 4 * 10**9
"""A file of a model is not larger, unless one unit of it is."""

MIN_FILE_BYTES: Final = 64 * 2**20
"""Smaller files gain nothing from another writer."""

_OLD_TOWER: Final = "visual."
_OF_AN_EXPERT: Final = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")

Box = tuple[tuple[int, int], ...]
"""(start, stop) along each dimension of a tensor; empty for all of it."""


def whole_box(shape: Sequence[int]) -> Box:
    """Return all of a tensor."""
    return tuple((0, size) for size in shape)


def num_elements(box: Box) -> int:
    """Elements in a box."""
    return math.prod(stop - start for start, stop in box)


def overlap(one: Box, other: Box) -> Box:
    """Return what two boxes of one tensor share; empty along some dimension when that is nothing."""
    cut = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)]
    return tuple((start, max(start, stop)) for start, stop in cut)


def slices(box: Box, within: Box | None = None) -> tuple[slice, ...]:
    """Index `box` in the whole tensor, or in a tensor that holds `within`."""
    offsets = [start for start, _ in within] if within else [0] * len(box)
    return tuple(slice(start - offset, stop - offset) for (start, stop), offset in zip(box, offsets, strict=True))


@dataclass(frozen=True, kw_only=True)
class CutTensor:
    """One tensor of a Hugging Face checkpoint, and where the ranks of a mesh cut it.

    Args:
        name: Hugging Face name, adapters included.
        shape: of the whole tensor.
        tp_dim: dimension cut along the mesh axis tp; None where every tp rank holds the same.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None

    @property
    def num_elements(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    def box_at(self, *, tp: tuple[int, int], dp: tuple[int, int] = (0, 1)) -> Box:
        """Return the part at one place of the mesh: cut over tp first, then the rows that are left over dp.

        Args:
            tp: place along tp, and the size of the axis.
            dp: the same along dp, where rows are cut over it.
        """
        box = list(whole_box(self.shape))
        if self.tp_dim is not None:
            box[self.tp_dim] = _row_chunk(self.shape[self.tp_dim], tp)
        if dp[1] > 1:
            first, stop = box[0]
            start, end = _row_chunk(stop - first, dp)
            box[0] = (first + start, first + end)
        return tuple(box)


def _row_chunk(num_rows: int, place: tuple[int, int]) -> tuple[int, int]:
    """Rows of one part, as `torch.chunk` cuts: all parts are as long as the first, until the rows run out."""
    part, num_parts = place
    length = -(-num_rows // num_parts)
    return min(part * length, num_rows), min((part + 1) * length, num_rows)


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """One file, and the rank that writes it.

    Args:
        name: beside the others.
        writer: rank among those that plan.
        specs: its tensors, in the order in which they come.
    """

    name: str
    writer: int
    specs: tuple[TensorSpec, ...]


def plan_files(stem: str, units: Sequence[Sequence[TensorSpec]], num_ranks: int) -> list[PlannedFile]:
    """Cut a stream of tensors into files of about one size, so that all ranks write when there is much to write.

    Args:
        stem: of the files' names: "model.safetensors", or "model-00001-of-00002.safetensors" and so on.
        units: what stays in one file, in the order of the stream.
        num_ranks: that write.
    """
    sizes = [sum(spec.num_bytes for spec in unit) for unit in units]
    total = sum(sizes)
    count = max(-(-total // MAX_FILE_BYTES), min(num_ranks, total // MIN_FILE_BYTES), 1)
    runs: list[list[TensorSpec]] = [[]]
    done = 0
    for unit, size in zip(units, sizes, strict=True):
        if runs[-1] and (done + size / 2) * count > total * len(runs):
            runs.append([])
        runs[-1] += unit
        done += size
    names = [f"{stem}-{number:05}-of-{len(runs):05}.safetensors" for number in range(1, len(runs) + 1)]
    names = names if len(runs) > 1 else [f"{stem}.safetensors"]
    return [
        PlannedFile(name=name, writer=number % num_ranks, specs=tuple(run))
        for number, (name, run) in enumerate(zip(names, runs, strict=True))
    ]


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """Return what a file says of a tensor before it comes."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


class FileWriter:
    """Writes one file as its tensors come, and forces it onto the disk; its digest comes beside it. A context manager.

    Args:
        path: made or replaced.
        specs: of all tensors, in the order in which they come.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self._path, self._coming, self._digest = path, iter(specs), xxhash.xxh3_64()
        self._file: IO[bytes] = path.open("wb")
        self._write(tensor_file_header(specs))

    def add(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, which must be the one that was planned."""
        spec = next(self._coming)
        assert spec_of(name, tensor) == spec, (name, spec)
        if tensor.numel():
            self._write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def _write(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self._file.write(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                write_digest(self._path, self._digest.hexdigest())


def write_files(folder: Path, files: Sequence[PlannedFile], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write files whose tensors come one after the other, holding one tensor at a time."""
    coming = iter(tensors)
    for file in files:
        with FileWriter(folder / file.name, file.specs) as writer:
            for _ in file.specs:
                writer.add(*next(coming))


def write_model_index(folder: Path, files: Sequence[PlannedFile]) -> None:
    """Write the index of a model in several files, which says where each tensor lies; one file needs none."""
    if len(files) > 1:
        (folder / MODEL_INDEX_FILE).write_text(tensor_file_index({file.name: file.specs for file in files}))


class TensorFolder:
    """The safetensors of a folder, read by boxes. A context manager.

    Args:
        folder: with one file, or several with or without an index, which decides where it says something.
        parts: for tensors that lie in pieces, under each name the pieces: (box, file's name, name in the file). Then
            the files that hold none are not looked at.
        files: which have to be whole, whatever `parts` say.

    Raises:
        ModelError: a file is missing or cut short, or two hold the same tensor.
    """

    def __init__(
        self,
        folder: Path,
        parts: Mapping[str, Sequence[tuple[Box, str, str]]] | None = None,
        files: Iterable[str] = (),
    ) -> None:
        self._folder, self._stack = folder, ExitStack()
        self._files: dict[str, Any] = {}
        named = None if parts is None else {file for held in parts.values() for _, file, _ in held}.union(files)
        for path in sorted(folder.glob("*.safetensors")):
            if named is not None and path.name not in named:
                continue
            try:
                self._files[path.name] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise ModelError(f"{path} is missing or cut short ({error}); download the folder again") from error
        try:
            self._parts = self._find_whole() if parts is None else parts
        except ModelError:
            self._stack.close()
            raise
        missing = sorted((named or set()) - self._files.keys())
        if missing:
            self._stack.close()
            raise ModelError(f"{folder} is not whole: {missing[0]} is missing; take another")

    def _find_whole(self) -> Mapping[str, Sequence[tuple[Box, str, str]]]:
        held = {file: list(opened.keys()) for file, opened in self._files.items()}
        found = find_tensors(self._folder, held)
        had_tower = any(name.startswith(_OLD_TOWER) for name in found)
        return {_new_name(name) if had_tower else name: [((), file, name)] for name, file in found.items()}

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._parts)

    def stack_experts(self) -> None:
        """Make weights of single experts readable in stacks too, as most families have them in transformers.

        Those are `gate_up_proj`, in which the rows of `gate_proj` come before those of `up_proj`, and `down_proj`, with
        one row for each expert. Experts that are not all there, or have scales, are left as they are.
        Source: transformers 5.19, conversion_mapping.py: MergeModulelist(dim=0), Concatenate(dim=1).
        """
        stacks: dict[str, list[tuple[Box, str, str]]] = {}
        for name, pieces in self._parts.items():
            if match := _OF_AN_EXPERT.fullmatch(name):
                layer, number, kind = match.groups()
                [(_, file, stored)] = pieces
                rows, columns = self._shape_of(file, stored)
                first = rows if kind == "up_proj" else 0
                box = ((int(number), int(number) + 1), (first, first + rows), (0, columns))
                target = kind if kind == "down_proj" else "gate_up_proj"
                stacks.setdefault(f"{layer}.{target}", []).append((box, file, stored))
        has_scales = any(name.endswith("_scale_inv") for name in self._parts)
        whole = {
            name: pieces
            for name, pieces in stacks.items()
            if sum(num_elements(box) for box, *_ in pieces) == math.prod(_extent(pieces)) and not has_scales
        }
        self._parts = {**whole, **self._parts}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that lies in one piece, or of a stack."""
        pieces = self._parts[name]
        return _extent(pieces) if pieces[0][0] else self._shape_of(*pieces[0][1:])

    def _shape_of(self, file: str, stored: str) -> tuple[int, ...]:
        return tuple(self._files[file].get_slice(stored).get_shape())

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ModelError unless a tensor is there, of this shape, in all its pieces."""
        pieces = self._parts.get(name)
        if not pieces:
            raise ModelError(f"{self._folder} has no tensor {name}: its weights are not those of its config.json")
        found = 0
        for box, file, stored in pieces:
            got = tuple(self._files[file].get_slice(stored).get_shape())
            wanted = tuple(stop - start for start, stop in box) if box else shape
            inside = all(0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=False))
            if got != wanted or not inside or (box and len(box) != len(shape)):
                raise ModelError(f"{name} in {self._folder} must have shape {shape}: got {got}")
            found += math.prod(got)
        if found != math.prod(shape):
            raise ModelError(f"{name} in {self._folder} must have shape {shape}: its pieces cover another")

    def read(self, name: str, box: Box) -> Tensor:
        """Read one box of a tensor; pieces that do not meet it are not touched."""
        pieces = self._parts[name]
        if not pieces[0][0] and (num_elements(box) or not box):
            _, file, stored = pieces[0]
            whole: Tensor = self._files[file].get_slice(stored)[slices(box)] if box else self._get(file, stored)
            return whole
        found = torch.zeros([stop - start for start, stop in box])
        for held, file, stored in pieces if num_elements(box) else ():
            shared = overlap(box, held)
            if num_elements(shared):
                found[slices(shared, box)] = self._read_piece(file, stored, slices(shared, held))
        return found

    def _read_piece(self, file: str, stored: str, part: tuple[slice, ...]) -> Tensor:
        """Read a part of a piece; one of fewer dimensions is a row of a stack."""
        if not part:
            return self._get(file, stored)
        tensor: Tensor = self._files[file].get_slice(stored)[part[-len(self._shape_of(file, stored)) :]]
        return tensor

    def _get(self, file: str, stored: str) -> Tensor:
        tensor: Tensor = self._files[file].get_tensor(stored)
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _extent(pieces: Sequence[tuple[Box, str, str]]) -> tuple[int, ...]:
    """Return the shape of a tensor whose pieces fill it."""
    return tuple(max(stop for _, stop in ends) for ends in zip(*(box for box, *_ in pieces), strict=True))


def _new_name(name: str) -> str:
    """Name in the model of a tensor of Qwen2.5-VL, whose files keep older ones.

    Source: transformers 5.19, conversion_mapping.py, "Qwen2VLForConditionalGeneration".
    """
    if name.startswith(_OLD_TOWER):
        return f"model.{name}"
    old = name.startswith("model.") and not name.startswith(("model.language_model.", "model.visual."))
    return f"model.language_model.{name.removeprefix('model.')}" if old else name
