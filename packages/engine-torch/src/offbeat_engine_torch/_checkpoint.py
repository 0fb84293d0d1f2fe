"""Writes and reads checkpoints: a Hugging Face folder, and beside it what training needs to go on.

config.json, model*.safetensors           the weights, adapters merged; plain transformers loads the folder
tokenizer files                           copied from the model the run began with
adapter/                                  with LoRA: the adapters in PEFT's format
trainer/optimizer-00001-of-0000N.safetensors   rank 0's moments and random state, and so on for N ranks
trainer/engine.json                       format, updates done and refused, and which box of each parameter lies where

A rank that loads reads the boxes that meet its own, so the number of ranks may change. Format 1, of one process, held
whole moments in trainer/optimizer.safetensors; it is still read.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat_engine_torch._load import read_weights
from offbeat_engine_torch._lora import ADAPTER_FOLDER, lora_layers, peft_name, save_adapter
from offbeat_engine_torch._optimizer import MOMENTS, ClippedAdamW
from offbeat_engine_torch._pieces import Box, Piece, num_elements, overlap, slices, whole_box
from offbeat_engine_torch._policy import Policy
from offbeat_engine_torch._ranks import Ranks
from offbeat_engine_torch._tensor_files import TensorReader, spec_of, write_model, write_tensors
from offbeat_engine_torch._weights import ADAPTERS, iterate_weights, weight_specs
from offbeat_mesh import Device
from offbeat_types import ModelError, TrainEngineConfig, copy_tokenizer, drop_model_files, sync_tree

FORMAT = 2
STATE_FILE = "trainer/engine.json"
FORMAT_1_FILE = "optimizer.safetensors"
HOST_RNG, DEVICE_RNG = "rng.host", "rng.device"


def export_weights(policy: Policy, ranks: Ranks, folder: Path, tokenizer: Path) -> None:
    """Write a Hugging Face folder that plain transformers loads. All ranks gather, the leader writes.

    Args:
        policy: whose weights they are.
        ranks: who gathers.
        folder: made when missing.
        tokenizer: the folder whose tokenizer files are copied.
    """
    weights = iterate_weights(policy.model, policy.pieces, ranks)
    if not ranks.leader:
        for _ in weights:
            pass
        return
    folder.mkdir(parents=True, exist_ok=True)
    drop_model_files(folder)
    whole = policy.model.whole
    if getattr(whole, "_weight_conversions", None) and ranks.size == 1:
        whole.save_pretrained(folder, state_dict={name: tensor.contiguous() for name, tensor in weights})
    else:
        _write_config(whole, folder)
        write_model(folder, weight_specs(policy.pieces), weights)
    copy_tokenizer(tokenizer, folder)
    sync_tree(folder)


def save_state(
    folder: Path,
    policy: Policy,
    optimizer: ClippedAdamW,
    device: Device,
    ranks: Ranks,
    counts: dict[str, int],
) -> None:
    """Write what training needs beside the weights; `counts` are the engine's own counters."""
    model, pieces = policy.model, policy.pieces
    if lora_layers(model.whole):
        adapters = {piece.name: ranks.gather(piece) for piece in pieces if piece.name.endswith(ADAPTERS)}
        if ranks.leader:
            base = str(model.whole.config.name_or_path)
            save_adapter(model.whole, adapters, folder / ADAPTER_FOLDER, base_model=base)
    if ranks.leader:
        (folder / STATE_FILE).parent.mkdir(exist_ok=True)  # apart: some readers take every file of weights
    ranks.barrier()
    name = f"optimizer-{ranks.place + 1:05}-of-{ranks.size:05}.safetensors"
    parts = _write_moments(folder / STATE_FILE, name, pieces, optimizer, device)
    found: list[tuple[str, dict[str, Any]]] = ranks.exchange((name, parts))
    if ranks.leader:
        state = {
            "format": FORMAT,
            "steps_taken": optimizer.steps_taken,
            **counts,
            "parts": dict(found),
        }
        (folder / STATE_FILE).write_text(json.dumps(state) + "\n")
        sync_tree(folder)


def _write_moments(
    beside: Path, name: str, pieces: Sequence[Piece], optimizer: ClippedAdamW, device: Device
) -> dict[str, Any]:
    """Write this rank's own moments; return step count and box of each parameter that is in the file."""
    tensors: dict[str, Tensor] = {HOST_RNG: torch.get_rng_state(), DEVICE_RNG: device.rng_state()}
    parts: dict[str, Any] = {}
    for piece in pieces:
        state = optimizer.state_of(piece.name)
        if state and piece.owned and num_elements(piece.box):
            parts[piece.name] = {"step": float(state["step"]), "box": piece.box}
            tensors |= {f"{moment}.{piece.name}": state[moment] for moment in MOMENTS}
    specs = [spec_of(key, tensor) for key, tensor in tensors.items()]
    write_tensors(beside.with_name(name), specs, tensors.items())
    return parts


def load_state(
    folder: Path,
    policy: Policy,
    optimizer: ClippedAdamW,
    device: Device,
    ranks: Ranks,
    config: TrainEngineConfig,
) -> dict[str, int]:
    """Read what `export_weights` and `save_state` wrote, on any number of ranks.

    Returns:
        The counters.

    Raises:
        ModelError: a file is missing or cut short, or the checkpoint is of another model.
    """
    state, pieces = _read_state(folder), policy.pieces
    has_adapters = (folder / ADAPTER_FOLDER).is_dir()
    if config.lora_rank and not has_adapters:
        raise ModelError(f"{folder} holds no adapters, yet lora_rank is set; resume with lora_rank = 0")
    if has_adapters and not config.lora_rank:
        raise ModelError(f"{folder} was saved with LoRA; resume with the same lora_rank")
    with _Moments(folder, state.pop("parts", None)) as moments:
        if has_adapters:
            _read_adapters(folder / ADAPTER_FOLDER, [piece for piece in pieces if piece.name.endswith(ADAPTERS)])
        else:
            read_weights(folder, pieces, config, ranks)
        moments.check({piece.name: piece.shape for piece in pieces})
        optimizer.load_state({piece.name: moments.read(piece) for piece in pieces}, state.pop("steps_taken"))
        _set_random_state(moments.random_state(ranks), device)
    return state


class _Moments:
    """The optimizer's files of a checkpoint, of format 1 or 2. A context manager."""

    def __init__(self, folder: Path, parts: Mapping[str, Mapping[str, Any]] | None) -> None:
        self._folder = folder
        trainer = folder / Path(STATE_FILE).parent
        self._files = sorted(parts) if parts is not None else [FORMAT_1_FILE]
        missing = [name for name in self._files if not (trainer / name).is_file()]
        if missing:
            raise ModelError(
                f"{folder} is not a whole checkpoint of this engine: {missing[0]} is missing; take another"
            )
        self._readers = {name: TensorReader(trainer, name) for name in self._files}
        self._prefix = "" if parts is not None else "adam."
        self._parts: dict[str, list[tuple[str, float, Box]]] = {}
        for file, found in parts.items() if parts is not None else [(FORMAT_1_FILE, self._format_1_parts())]:
            for name, part in found.items():
                box = tuple((int(start), int(stop)) for start, stop in part["box"])
                self._parts.setdefault(name, []).append((file, part["step"], box))

    def _format_1_parts(self) -> dict[str, Any]:
        reader = self._readers[FORMAT_1_FILE]
        steps = {name.removeprefix("adam.step."): name for name in reader.names if name.startswith("adam.step.")}
        return {
            name: {"step": float(reader.read(key, ())), "box": whole_box(reader.shape(f"adam.{MOMENTS[0]}.{name}"))}
            for name, key in steps.items()
        }

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ModelError unless the boxes are those of a model of these shapes."""
        unknown = sorted(set(self._parts) - set(shapes))
        if unknown:
            raise ModelError(f"optimizer state is of another model: it knows {unknown[0]}, the model does not")
        for name, parts in self._parts.items():
            if sum(num_elements(box) for *_, box in parts) != num_elements(whole_box(shapes[name])):
                raise ModelError(f"optimizer state of {name} has another shape than the parameter")

    def read(self, piece: Piece) -> dict[str, Tensor]:
        """Step count and moments of one piece; empty for a parameter that never had a gradient."""
        parts = self._parts.get(piece.name)
        if not parts:
            return {}
        state = {moment: torch.zeros_like(piece.local) for moment in MOMENTS}
        for file, _, box in parts:
            shared = overlap(box, piece.box)
            if num_elements(shared):
                within = tuple((part.start, part.stop) for part in slices(shared, box))
                for moment, tensor in state.items():
                    read = self._readers[file].read(f"{self._prefix}{moment}.{piece.name}", within)
                    tensor[slices(shared, piece.box)] = read.to(tensor.device)
        return {"step": torch.tensor(parts[0][1], device=piece.local.device), **state}

    def random_state(self, ranks: Ranks) -> list[Tensor]:
        """Of this rank, or of the leader when the number of ranks has changed."""
        reader = self._readers[self._files[ranks.place if len(self._files) == ranks.size else 0]]
        return [reader.read(name, whole_box(reader.shape(name))) for name in (HOST_RNG, DEVICE_RNG)]

    def __enter__(self) -> "_Moments":
        return self

    def __exit__(self, *error: object) -> None:
        for reader in self._readers.values():
            reader.__exit__(None, None, None)


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} is not a whole checkpoint of this engine: {error}; take an older one") from error
    got = state.pop("format", None)
    if got not in (1, FORMAT):
        raise ModelError(
            f"{folder}: checkpoint formats 1 to {FORMAT} are read, got {got}; use the version that wrote it"
        )
    return state


@torch.no_grad()
def _read_adapters(folder: Path, pieces: Sequence[Piece]) -> None:
    """Read what `save_adapter` wrote."""
    wanted = {peft_name(piece.name): piece for piece in pieces}
    with TensorReader(folder) as reader:
        wrong = sorted(reader.names ^ set(wanted)) or [n for n, p in wanted.items() if reader.shape(n) != p.shape]
        if wrong:
            raise ModelError(f"{folder}: adapters differ from the model's, first at {wrong[0]}; use the same lora_rank")
        for name, piece in wanted.items():
            piece.local.copy_(reader.read(name, piece.box))


def _set_random_state(found: Sequence[Tensor], device: Device) -> None:
    torch.set_rng_state(found[0])
    if found[1].shape == device.rng_state().shape:  # another kind of device starts from its own seed
        device.set_rng_state(found[1])


def _write_config(whole: Any, folder: Path) -> None:
    """Write config.json and generation_config.json as `save_pretrained` does."""
    whole.config.dtype = str(whole.dtype).removeprefix("torch.")
    whole.config.architectures = [type(whole).__name__]
    whole.config.save_pretrained(folder)
    if whole.can_generate():
        whole.generation_config.save_pretrained(folder)
