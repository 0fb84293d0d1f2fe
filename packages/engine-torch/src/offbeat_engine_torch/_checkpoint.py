"""Writes and reads checkpoints: a Hugging Face folder, and beside it what training needs to go on.

config.json, model*.safetensors   the weights, adapters merged; plain transformers loads the folder
tokenizer files                   copied from the model the run began with
adapter/                          with LoRA: the adapters in PEFT's format
trainer/optimizer.safetensors     moments, step counts and the states of the random generators
trainer/engine.json               format, updates done, updates refused
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from offbeat_dist import Device
from offbeat_engine_torch._lora import ADAPTER_FOLDER, load_adapter, lora_layers, save_adapter
from offbeat_engine_torch._model import CausalModel, load_model
from offbeat_engine_torch._optimizer import ClippedAdamW
from offbeat_types import ModelError

FORMAT = 1
STATE_FILE = "trainer/engine.json"
OPTIMIZER_FILE = "trainer/optimizer.safetensors"
HOST_RNG, DEVICE_RNG = "rng.host", "rng.device"
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)


def export_weights(model: CausalModel, folder: Path, *, tokenizer_from: Path) -> None:
    """Write a Hugging Face folder that plain transformers loads: merged float32 weights, config, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in model.weights()}
    model.whole.save_pretrained(folder, state_dict=weights)
    for pattern in TOKENIZER_FILES:
        for file in tokenizer_from.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    _sync(folder)


def save_state(
    folder: Path, model: CausalModel, optimizer: ClippedAdamW, device: Device, counts: dict[str, int]
) -> None:
    """Write what training needs beside the weights; `counts` are the engine's own counters."""
    if lora_layers(model.whole):
        save_adapter(model.whole, folder / ADAPTER_FOLDER, base_model=str(model.whole.config.name_or_path))
    tensors = {f"adam.{name}": tensor.contiguous() for name, tensor in optimizer.state().items()}
    tensors |= {HOST_RNG: torch.get_rng_state(), DEVICE_RNG: device.rng_state()}
    (folder / OPTIMIZER_FILE).parent.mkdir(exist_ok=True)  # apart: some readers take every file of weights
    save_file(tensors, folder / OPTIMIZER_FILE)
    state = {"format": FORMAT, "steps_taken": optimizer.steps_taken, **counts}
    (folder / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")
    _sync(folder)


def load_state(folder: Path, model: CausalModel, optimizer: ClippedAdamW, device: Device) -> dict[str, int]:
    """Read what `export_weights` and `save_state` wrote into `model`, `optimizer` and the random generators.

    Returns:
        The counters.

    Raises:
        ModelError: a file is missing or cut short, or the checkpoint is of another model.
    """
    state, tensors = _read(folder)
    if lora_layers(model.whole):
        if not (folder / ADAPTER_FOLDER).is_dir():
            raise ModelError(f"{folder} holds no adapters, yet lora_rank is set; resume with lora_rank = 0")
        load_adapter(model.whole, folder / ADAPTER_FOLDER)
    else:
        if (folder / ADAPTER_FOLDER).is_dir():
            raise ModelError(f"{folder} was saved with LoRA; resume with the same lora_rank")
        _copy_weights(folder, model)
    adam = {name.removeprefix("adam."): tensor for name, tensor in tensors.items() if name.startswith("adam.")}
    optimizer.load_state(adam, state.pop("steps_taken"))
    torch.set_rng_state(tensors[HOST_RNG])
    if tensors[DEVICE_RNG].shape == device.rng_state().shape:  # another kind of device starts from its own seed
        device.set_rng_state(tensors[DEVICE_RNG])
    return state


def _read(folder: Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Counters and tensors of a checkpoint."""
    try:
        state: dict[str, int] = json.loads((folder / STATE_FILE).read_text())
        tensors = load_file(folder / OPTIMIZER_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{folder} is not a whole checkpoint of this engine: {error}; take an older one") from error
    got = state.pop("format", None)
    if got != FORMAT:
        raise ModelError(f"{folder}: checkpoint format {FORMAT} is read, got {got}; use the version that wrote it")
    return state, tensors


@torch.no_grad()
def _copy_weights(folder: Path, model: CausalModel) -> None:
    """Copy a folder's weights into the model, in place."""
    saved = dict(load_model(str(folder), device=torch.device(model.head.weight.device)).weights())
    own = dict(model.weights())
    wrong = sorted(set(saved) ^ set(own)) or [name for name in own if saved[name].shape != own[name].shape]
    if wrong:
        raise ModelError(f"{folder} is a checkpoint of another model: they differ first at {wrong[0]}")
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def _sync(folder: Path) -> None:
    """Force everything in a folder onto the disk, so that a rename afterwards publishes whole files."""
    for path in [*folder.rglob("*"), folder]:
        handle: Any = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
