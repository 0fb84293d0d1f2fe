"""Weights in and out: slices of Hugging Face checkpoints into this rank's parameters, and whole tensors out of all."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from offbeat_dist import Mesh
from offbeat_engine_megatron._parallel import Parallel
from offbeat_engine_megatron._shape import ModelShape
from offbeat_engine_megatron._slots import Place, Slot, list_slots, view_of
from offbeat_types import ModelError

BUCKET_BYTES: Final = 32 * 2**20
"""What one round of the export gathers at most, unless one tensor alone is larger."""

MAX_FILE_BYTES: Final = 2 * 10**9
INDEX_FILE: Final = "model.safetensors.index.json"
TOKENIZER_FILES: Final = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
)

Values = Callable[[Any], Tensor]


class HeldWeights:
    """The parameters of this rank under Hugging Face names.

    Args:
        parts: the model's parts on this rank, unwrapped.
        shape: of the model.
        parallel: sizes of the axes.
        mesh: over megatron's groups.
    """

    def __init__(self, parts: Sequence[torch.nn.Module], shape: ModelShape, parallel: Parallel, mesh: Mesh) -> None:
        self.slots = list_slots(shape, parallel)
        self._shape, self._parallel = shape, parallel
        self._stage = mesh.coordinates["pp"]
        self._expert_rank = mesh.coordinates["ep"]
        self._tp, self._pp, self._ep = mesh.group("tp"), mesh.group("pp"), mesh.group("ep")
        self._parameters = {
            (part, name): parameter
            for part, module in enumerate(parts)
            for name, parameter in module.named_parameters()
        }

    def read(self, folder: Path) -> None:
        """Fill every parameter from the safetensors of a folder, reading only this rank's slices.

        Raises:
            ModelError: a file cannot be read, or a tensor is missing or of another shape.
        """
        self.read_values(folder, "", lambda parameter, values: parameter.copy_(values))

    @torch.no_grad()
    def read_values(self, folder: Path, prefix: str, take: Callable[[Any, Tensor], object]) -> None:
        """Read what a folder's safetensors say of each parameter of this rank, one parameter at a time.

        Args:
            folder: with safetensors of whole tensors.
            prefix: before the Hugging Face names in them.
            take: given each parameter and the values for it, of its shape.

        Raises:
            ModelError: a file cannot be read, or a tensor is missing or of another shape.
        """
        slots: dict[tuple[int, str], list[Slot]] = {key: [] for key in self._parameters}
        for slot in self.slots:
            for place in (slot.place, *slot.copies):
                if self._holds(slot, place):
                    slots[place.part, place.path].append(slot)
        with ExitStack() as stack:
            files = _open_files(folder, stack)
            for key, parameter in self._parameters.items():
                assert slots[key], f"no checkpoint tensor fills {key}"
                values = torch.empty_like(parameter)
                for slot in slots[key]:
                    view = view_of(slot, values, self._shape, self._tp.size)
                    view.copy_(self._slice(files, slot, prefix, folder).view_as(view))
                take(parameter, values)

    @torch.no_grad()
    def gather(self, values: Values = Tensor.detach) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) on every rank, which all iterate to the end: each bucket is gathered.

        Args:
            values: what to take of each parameter, of its shape; itself by default.
        """
        for bucket in self._buckets():
            yield from zip((slot.name for slot in bucket), self._whole(bucket, values), strict=True)

    def first_not_finite(self) -> str:
        """Name of the first tensor of this rank whose gradient holds an infinity or NaN; empty when there is none."""
        for slot in self.slots:
            if self._holds(slot, slot.place):
                grad = getattr(self._parameters[slot.place.part, slot.place.path], "main_grad", None)
                if grad is not None and not torch.isfinite(view_of(slot, grad, self._shape, self._tp.size)).all():
                    return slot.name
        return ""

    def _buckets(self) -> Iterator[list[Slot]]:
        """Slots that travel together: of one stage, in order, as many as fit."""
        bucket: list[Slot] = []
        for slot in self.slots:
            size = 4 * sum(each.num_elements for each in [*bucket, slot])
            if bucket and (size > BUCKET_BYTES or slot.place.stage != bucket[0].place.stage):
                yield bucket
                bucket = []
            bucket.append(slot)
        yield bucket

    def _whole(self, bucket: Sequence[Slot], values: Values) -> list[Tensor]:
        stage = bucket[0].place.stage
        found = self._gather_in_stage(bucket, values) if self._stage == stage else []
        if self._pp.size == 1:
            return found
        sizes = [slot.num_elements for slot in bucket]
        flat = torch.cat([each.reshape(-1) for each in found]) if found else self._empty(sum(sizes))
        self._pp.broadcast(flat, source=stage)
        return [part.view(slot.shape) for part, slot in zip(torch.split(flat, sizes), bucket, strict=True)]

    def _gather_in_stage(self, bucket: Sequence[Slot], values: Values) -> list[Tensor]:
        """Whole tensors, on the ranks of the stage that holds them."""
        tp, whole = self._tp.size, {}
        cut = [slot for slot in bucket if slot.tp_dim is not None and tp > 1]
        if cut:
            mine = torch.cat([self._view(slot, slot.place, values).reshape(-1) for slot in cut])
            rows = torch.split(self._tp.all_gather(mine), [slot.num_elements // tp for slot in cut], 1)
            for slot, parts in zip(cut, rows, strict=True):
                assert slot.tp_dim is not None
                whole[slot.name] = torch.cat([part.view(slot.part_shape(tp)) for part in parts], slot.tp_dim)
        for slot in bucket:
            if slot.name not in whole:
                whole[slot.name] = (
                    self._of_experts(slot, values) if slot.owner is not None else self._copy(slot, values)
                )
        return [whole[slot.name] for slot in bucket]

    def _of_experts(self, slot: Slot, values: Values) -> Tensor:
        assert slot.owner is not None
        tensor = self._copy(slot, values) if slot.owner == self._expert_rank else self._empty(*slot.shape)
        return self._ep.broadcast(tensor, source=slot.owner)

    def _copy(self, slot: Slot, values: Values) -> Tensor:
        return self._view(slot, slot.place, values).clone(memory_format=torch.contiguous_format).view(slot.shape)

    def _view(self, slot: Slot, place: Place, values: Values = Tensor.detach) -> Tensor:
        parameter = self._parameters[place.part, place.path]
        return view_of(slot, values(parameter), self._shape, self._tp.size)

    def _empty(self, *shape: int) -> Tensor:
        like = next(iter(self._parameters.values()))
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def _holds(self, slot: Slot, place: Place) -> bool:
        return place.stage == self._stage and slot.owner in (None, self._expert_rank)

    def _slice(self, files: dict[str, Any], slot: Slot, prefix: str, folder: Path) -> Tensor:
        """Read the part of a tensor that belongs on this rank."""
        name = prefix + slot.name
        if name not in files:
            raise ModelError(f"{folder} has no tensor {name}: its weights are not those of its config.json")
        whole = files[name].get_slice(name)
        if tuple(whole.get_shape()) != slot.shape:
            raise ModelError(f"{name} in {folder} must have shape {slot.shape}: got {tuple(whole.get_shape())}")
        box = [slice(None)] * len(slot.shape)
        if slot.tp_dim is not None:
            length = slot.shape[slot.tp_dim] // self._tp.size
            box[slot.tp_dim] = slice(self._tp.rank * length, (self._tp.rank + 1) * length)
        part: Tensor = whole[tuple(box)]
        return part


def _open_files(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The file of each tensor."""
    where: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is missing or cut short ({error}); fetch the folder anew") from error
        where |= dict.fromkeys(file.keys(), file)
    return where


def write_model(folder: Path, weights: Iterator[tuple[str, Tensor]], hf_config: Any, source: Path) -> None:
    """Write a folder that plain transformers loads, holding one file's tensors at a time.

    Args:
        folder: made when missing.
        weights: all tensors, under Hugging Face names.
        hf_config: transformers' config.
        source: the folder whose tokenizer files are copied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hf_config.save_pretrained(folder)
    files = write_tensors(folder, "model", weights)
    if len(files) > 1:
        places = {name: file for file, names in files.items() for name in names}
        total = sum((folder / file).stat().st_size for file in files)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    sync_folder(folder)


def write_tensors(folder: Path, stem: str, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, list[str]]:
    """Write safetensors, holding one file's tensors at a time.

    Args:
        folder: exists.
        stem: of the files' names: "model.safetensors", or "model-00001-of-00002.safetensors" and so on.
        tensors: (name, values).

    Returns:
        Names of the tensors in each file.
    """
    parts: list[list[str]] = []
    held: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if held and sum(each.nbytes for each in held.values()) + tensor.nbytes > MAX_FILE_BYTES:
            parts.append(_write_part(folder, len(parts), held))
            held = {}
        held[name] = tensor.cpu().contiguous()
    parts.append(_write_part(folder, len(parts), held))
    names = [f"{stem}-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    names = names if len(parts) > 1 else [f"{stem}.safetensors"]
    for number, name in enumerate(names):  # now that their number is known
        _part(folder, number).replace(folder / name)
    return dict(zip(names, parts, strict=True))


def sync_folder(folder: Path) -> None:
    """Force a folder and its files onto the disk."""
    for path in (*(each for each in folder.iterdir() if each.is_file()), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number}.safetensors"


def _write_part(folder: Path, number: int, tensors: dict[str, Tensor]) -> list[str]:
    save_file(tensors, _part(folder, number), metadata={"format": "pt"})
    return list(tensors)
