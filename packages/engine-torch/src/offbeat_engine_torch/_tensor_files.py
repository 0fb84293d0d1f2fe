"""Safetensors read by slices and written as a stream: neither side ever holds a whole model for a file's sake."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from offbeat_engine_torch._pieces import Box, num_elements, slices
from offbeat_types import (
    MODEL_FILE,
    MODEL_INDEX_FILE,
    ModelError,
    TensorSpec,
    find_tensors,
    tensor_file_header,
    tensor_file_index,
)

MAX_FILE_BYTES = 4 * 10**9


def dtype_name(tensor: Tensor) -> str:
    """Its number format, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """What a file says of a tensor before it comes."""
    return TensorSpec(name, dtype_name(tensor), tuple(tensor.shape))


class TensorReader:
    """The *.safetensors of a folder, read by boxes. A context manager.

    Args:
        folder: with one file, or several with or without an index, which decides where it says something.

    Raises:
        ModelError: a file is missing or cut short, or two hold the same tensor.
    """

    def __init__(self, folder: Path, pattern: str = "*.safetensors") -> None:
        self._stack = ExitStack()
        files: dict[str, Any] = {}
        for path in sorted(folder.glob(pattern)):
            try:
                files[path.name] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise ModelError(f"{path} is missing or cut short ({error}); fetch the folder anew") from error
        try:
            found = find_tensors(folder, {name: list(file.keys()) for name, file in files.items()})
        except ModelError:
            self._stack.close()
            raise
        self._where = {name: files[file] for name, file in found.items()}

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self._where[name].get_slice(name).get_shape())

    def read(self, name: str, box: Box) -> Tensor:
        """Read one part of a tensor."""
        if not box:
            tensor: Tensor = self._where[name].get_tensor(name)
        elif not num_elements(box):
            tensor = torch.empty([stop - start for start, stop in box])
        else:
            tensor = self._where[name].get_slice(name)[slices(box)]
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def write_tensors(path: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write one file, holding one tensor at a time, and force it onto the disk.

    Args:
        path: made or replaced.
        specs: of all tensors, in the order in which they come.
        tensors: (name, values), each as its spec says.
    """
    with path.open("wb") as file:
        file.write(tensor_file_header(specs))
        for spec, (name, tensor) in zip(specs, tensors, strict=True):
            assert spec_of(name, tensor) == spec, name
            if tensor.numel():
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def write_model(folder: Path, specs: Sequence[TensorSpec], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write model.safetensors, or numbered files and their index when one file would grow too large."""
    files = _split(specs, MAX_FILE_BYTES)
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = [MODEL_FILE]
    for name, part in zip(names, files, strict=True):
        write_tensors(folder / name, part, (next(tensors) for _ in part))
    if len(files) > 1:
        (folder / MODEL_INDEX_FILE).write_text(tensor_file_index(dict(zip(names, files, strict=True))))


def _split(specs: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Cut the list where a file would pass `max_bytes`."""
    files: list[list[TensorSpec]] = [[]]
    for spec in specs:
        if files[-1] and sum(each.num_bytes for each in files[-1]) + spec.num_bytes > max_bytes:
            files.append([])
        files[-1].append(spec)
    return files
