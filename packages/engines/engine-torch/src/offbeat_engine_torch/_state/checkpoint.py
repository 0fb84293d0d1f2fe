"""Weights out of the ranks, and checkpoints, in which each rank writes its own moments.

`offbeat_training.TrainerState` says how they lie.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat_core import ModelError, TensorSpec, TrainEngineConfig, copy_tokenizer, drop_model_files, sync_tree
from offbeat_device import Device
from offbeat_engine_torch._model import ADAPTER_SIDES, CausalModel
from offbeat_engine_torch._parallel.ranks import Ranks
from offbeat_engine_torch._pieces import Piece
from offbeat_engine_torch._policy import Policy, read_weights
from offbeat_training import (
    ADAPTER_FOLDER,
    TRAINER_FOLDER,
    ClippedAdamW,
    FileWriter,
    TrainerState,
    check_adapter_folder,
    describe_part,
    find_damage,
    lora_layers,
    num_elements,
    open_adapters,
    peft_name,
    plan_files,
    random_state,
    save_adapter,
    spec_of,
    write_files,
    write_model_index,
    write_state,
)


def iterate_weights(
    model: CausalModel, pieces: Sequence[Piece], ranks: Ranks, *, dtype: torch.dtype | None = None, merge: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) in the model's own order; a tied head once.

    Every rank iterates to the end: each step gathers one tensor from all. What is gathered is rounded to `dtype` first,
    unless it stays in float32; None: float32. A sum of rounded parts is not the rounded sum, so layers to `merge` with
    their adapters are gathered as they are held, and added up in float32. Without `merge` adapters are left out.
    """
    by_name = {piece.name: piece for piece in pieces}
    layers = lora_layers(model.whole) if merge else {}
    scales = {f"{name}.weight": layer.scale for name, layer in layers.items()}
    for name, piece in by_name.items():
        if piece.is_adapter:
            continue
        tensor = ranks.gather(piece, None if name in scales or piece.in_float32 else dtype)
        if name in scales:
            layer = name.removesuffix(".weight")
            low_A, low_B = (ranks.gather(by_name[layer + side]) for side in ADAPTER_SIDES)
            tensor = torch.addmm(tensor.float(), low_B, low_A, alpha=scales[name])
        yield name, tensor if dtype else tensor.to(_exported(tensor.dtype))


def iterate_adapter(
    pieces: Sequence[Piece], ranks: Ranks, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(PEFT's name, whole tensor) of both sides of each layer's adapter; else as `iterate_weights`."""
    for piece in pieces:
        if piece.is_adapter:
            yield peft_name(piece.name), ranks.gather(piece, dtype)


def weight_specs(pieces: Sequence[Piece]) -> list[TensorSpec]:
    """Names, shapes and formats of what `iterate_weights` gives."""
    return [
        TensorSpec(piece.name, str(_exported(piece.dtype)).removeprefix("torch."), piece.shape)
        for piece in pieces
        if not piece.is_adapter
    ]


def _exported(dtype: torch.dtype) -> torch.dtype:
    """Format in which a tensor is exported: a frozen base of bfloat16 in float32, as all weights are."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def export_weights(policy: Policy, ranks: Ranks, folder: Path, tokenizer: Path) -> None:
    """Write a Hugging Face folder that plain transformers loads, with the tokenizer of another.

    All ranks gather, the leader writes.
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
        files = plan_files("model", [[spec] for spec in weight_specs(policy.pieces)], num_ranks=1)
        write_files(folder, files, weights)
        write_model_index(folder, files)
    _write_config(whole, folder)
    copy_tokenizer(tokenizer, folder)
    sync_tree(folder)


def save_state(
    folder: Path,
    policy: Policy,
    optimizer: ClippedAdamW,
    device: Device,
    ranks: Ranks,
    steps_refused: int,
) -> None:
    """Write what training needs beside the weights."""
    model, pieces = policy.model, policy.pieces
    if lora_layers(model.whole):
        adapters = {piece.name: ranks.gather(piece) for piece in pieces if piece.is_adapter}
        if ranks.leader:
            base = str(model.whole.config.name_or_path)
            save_adapter(model.whole, adapters, folder / ADAPTER_FOLDER, base_model=base)
    trainer = folder / TRAINER_FOLDER  # apart: some readers take every file of weights
    if ranks.leader:
        trainer.mkdir(exist_ok=True)
    ranks.barrier()
    name = f"optimizer-{ranks.place + 1:05}-of-{ranks.size:05}.safetensors"
    parts = write_moments(trainer / name, pieces, optimizer, device)
    found: list[tuple[str, dict[str, Any]]] = ranks.exchange((name, parts))
    if ranks.leader:
        write_state(folder, optimizer.steps_taken, steps_refused, dict(found))
        sync_tree(folder)


def write_moments(path: Path, pieces: Sequence[Piece], optimizer: ClippedAdamW, device: Device) -> dict[str, Any]:
    """Write this rank's own moments, in float32; return step count and box of each parameter that is in the file."""
    random, parts, specs = random_state(device), {}, []
    for piece in pieces:
        steps = optimizer.steps_of(piece.name)
        if steps is not None and piece.owned and num_elements(piece.box):
            moments, shape = optimizer.moments_of(piece.name), tuple(piece.local.shape)
            parts[piece.name] = describe_part(steps, piece.box, moments)
            specs += [TensorSpec(f"{moment}.{piece.name}", "float32", shape) for moment in moments]
    with FileWriter(path, [*(spec_of(key, tensor) for key, tensor in random.items()), *specs]) as writer:
        for key, tensor in random.items():
            writer.add(key, tensor)
        for name in parts:  # one after the other: they may be held in fewer bytes
            for moment, values in optimizer.state_of(name).items():
                writer.add(f"{moment}.{name}", values)
    return parts


@torch.no_grad()
def load_state(
    folder: Path,
    policy: Policy,
    optimizer: ClippedAdamW,
    device: Device,
    ranks: Ranks,
    config: TrainEngineConfig,
) -> int:
    """Read what `export_weights` and `save_state` wrote, on any number of ranks; how many steps had been refused."""
    pieces = policy.pieces
    adapters = {piece.name: piece for piece in pieces if piece.is_adapter}
    damages = ranks.exchange(find_damage(folder, ranks.place, ranks.size))
    if any(damages):
        raise ModelError(next(filter(None, damages)))
    with TrainerState(folder) as state:
        check_adapter_folder(folder, wanted=bool(adapters))
        shapes = {piece.name: piece.shape for piece in pieces}
        if adapters:
            with open_adapters(folder / ADAPTER_FOLDER, {name: shapes[name] for name in adapters}) as found:
                state.check(shapes, optimizer.moments_of)
                for name, piece in adapters.items():
                    piece.local.copy_(found.read(name, piece.box))
            trained = [each for each in pieces if each.parameter.requires_grad and not each.is_adapter]
            if trained:  # a score head, which no adapter file holds
                read_weights(folder, trained, config, ranks)
        else:
            state.check(shapes, optimizer.moments_of)
            read_weights(folder, pieces, config, ranks)
        optimizer.load_state(_read_moments(state, pieces, optimizer), state.steps_taken)
        state.restore_random_state(device, ranks.place, ranks.size)
    return state.steps_refused


def _read_moments(
    state: TrainerState, pieces: Sequence[Piece], optimizer: ClippedAdamW
) -> Iterator[tuple[str, float, dict[str, Tensor]]]:
    """Iterate over name, step count and moments of each piece that has had a gradient; this rank's part, float32."""
    for piece in pieces:
        step, names = state.step(piece.name), optimizer.moments_of(piece.name)
        if step is not None:
            read = {moment: state.moments.read(f"{moment}.{piece.name}", piece.box) for moment in names}
            yield piece.name, step, {moment: torch.empty_like(piece.local).copy_(each) for moment, each in read.items()}


def _write_config(whole: Any, folder: Path) -> None:
    """Write config.json and generation_config.json as `save_pretrained` does of a model in float32."""
    whole.config.dtype = "float32"  # of the files, whatever a frozen base is held in
    whole.config.architectures = [type(whole).__name__]
    whole.config.save_pretrained(folder)
    if whole.can_generate():
        whole.generation_config.save_pretrained(folder)
