"""Low-rank adapters: W + (alpha / rank) B A on every linear layer of the blocks, with W frozen.

Source: LoRA (arXiv:2106.09685); the file format is that of Hugging Face PEFT.
"""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import skip_init

from offbeat_core import ModelError, digest_file, write_digest
from offbeat_training._tensor_files import TensorFolder

log = logging.getLogger(__name__)

ADAPTER_FOLDER = "adapter"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
PEFT_PREFIX = "base_model.model."


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained low-rank update; the update starts at zero.

    The update's weights are those of an optimizer: float32 at least, whatever the format of the layer's.

    Args:
        base: the layer; its parameters stop requiring gradients.
        rank: of the update.
        alpha: the update is scaled by alpha / rank.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.lora_base = base.requires_grad_(requires_grad=False)
        self.rank, self.scale = rank, alpha / rank
        self.active = True
        dtype = torch.promote_types(base.weight.dtype, torch.float32)
        like = {"bias": False, "dtype": dtype, "device": base.weight.device}
        empty: Any = skip_init  # `initial_adapters` gives the values
        self.lora_A: nn.Linear = empty(nn.Linear, base.in_features, rank, **like)
        self.lora_B: nn.Linear = empty(nn.Linear, rank, base.out_features, **like)
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]; in the format of autocast, or of x where that is off.

        Each product is in the format of autocast, or of its own weights: no copy of the frozen ones is made.
        """
        casts = not torch.is_autocast_enabled(x.device.type)
        weight = self.lora_base.weight
        # Not to a format of bytes, which stand for others: a layer that holds them converts.
        out: Tensor = self.lora_base(x.to(weight.dtype) if casts and weight.is_floating_point() else x)
        if self.active:
            low: Tensor = self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype) if casts else x))
            out = out + low * self.scale
        return out.to(x.dtype) if casts else out


def add_lora(backbone: nn.Module, *, rank: int, alpha: float) -> None:
    """Freeze the backbone and put adapters on all its linear layers (the vocabulary head is not part of it).

    Their values are those of `initial_adapters`, once the caller has put them there. Fused experts, which are no linear
    layers, get none: a warning says so.
    """
    backbone.requires_grad_(requires_grad=False)
    places = [
        (parent, name, layer)
        for parent in backbone.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear)
    ]
    if not places:
        raise ModelError(f"LoRA needs linear layers: {type(backbone).__name__} has none; set lora_rank to 0")
    convolutions = {id(layer.weight) for layer in backbone.modules() if isinstance(layer, nn.Conv1d)}
    fused = [name for name, each in backbone.named_parameters() if each.ndim == 3 and id(each) not in convolutions]
    if fused:
        log.warning(
            "lora_rank = %d: %d weights of fused experts, first %s, get no adapters and are not trained; set lora_rank "
            "to 0 to train them",
            *(rank, len(fused), fused[0]),
        )
    for parent, name, layer in places:
        setattr(parent, name, LoraLinear(layer, rank, alpha))


def initial_adapters(shapes: Iterable[tuple[str, Sequence[int]]], seed: int) -> Iterator[tuple[str, Tensor]]:
    """First values, float32: A is drawn, B is 0, so that training starts at the base model.

    Args:
        shapes: (name, shape) of `<layer>.lora_A` and `<layer>.lora_B` of all layers, in the model's order.
        seed: of what is drawn.

    Returns:
        (name, values) in the same order.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes:
        values = torch.zeros(*shape)
        if name.endswith(".lora_A"):
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        yield name, values


def adapter_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of all adapters of a model that holds whole layers, as `initial_adapters` takes them."""
    for name, layer in lora_layers(model).items():
        yield f"{name}.lora_A", (layer.rank, layer.lora_A.in_features)
        yield f"{name}.lora_B", (layer.lora_B.out_features, layer.rank)


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Adapted layers by the Hugging Face name of the layer."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLinear)}


@contextmanager
def without_lora(adapters: Iterable[Any]) -> Iterator[None]:
    """Run the base model.

    Args:
        adapters: all of the model; each takes part while its `active` is True.
    """
    layers = list(adapters)
    for layer in layers:
        layer.active = False
    try:
        yield
    finally:
        for layer in layers:
            layer.active = True


def save_adapter(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path, *, base_model: str) -> None:
    """Write the adapters as PEFT reads them.

    Args:
        model: with adapters.
        tensors: all of `<layer>.lora_A` and `<layer>.lora_B`, whole.
        folder: made when missing.
        base_model: where the frozen weights came from.
    """
    layers = lora_layers(model)
    some = next(iter(layers.values()))
    folder.mkdir(parents=True, exist_ok=True)
    named = {peft_name(name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / ADAPTER_FILE, metadata={"format": "pt"})
    write_digest(folder / ADAPTER_FILE, digest_file(folder / ADAPTER_FILE))
    write_adapter_config(folder, layers, rank=some.rank, alpha=some.scale * some.rank, base_model=base_model)


def write_adapter_config(folder: Path, layers: Iterable[str], *, rank: int, alpha: float, base_model: str) -> None:
    """Write PEFT's adapter_config.json.

    Args:
        folder: of the adapters.
        layers: Hugging Face names of the adapted layers.
        rank: of the updates.
        alpha: updates are scaled by alpha / rank.
        base_model: where the frozen weights came from.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def peft_name(name: str) -> str:
    """PEFT's name of an adapter."""
    return f"{PEFT_PREFIX}{name}.weight"


def check_adapter_folder(folder: Path, *, wanted: bool) -> None:
    """Refuse a checkpoint with adapters for an engine without, and the other way round.

    Raises:
        ModelError: `folder` holds adapters and `wanted` is False, or none and it is True.
    """
    has_adapters = (folder / ADAPTER_FOLDER).is_dir()
    if has_adapters and not wanted:
        raise ModelError(f"{folder} was saved with LoRA; resume with the same lora_rank")
    if wanted and not has_adapters:
        raise ModelError(f"{folder} holds no adapters, yet lora_rank is set; resume with lora_rank = 0")


def open_adapters(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> TensorFolder:
    """Open the adapters of a checkpoint, under the names `<layer>.lora_A` and `<layer>.lora_B`.

    Args:
        folder: of the adapters.
        shapes: of all that there should be.

    Raises:
        ModelError: they are not those of this model, or of another rank.
    """
    names = {peft_name(name): name for name in shapes}
    with TensorFolder(folder) as found:
        wrong = sorted(found.names ^ names.keys()) or [
            stored for stored, name in names.items() if found.shape(stored) != shapes[name]
        ]
        if wrong:
            raise ModelError(f"{folder}: adapters differ from the model's, first at {wrong[0]}; use the same lora_rank")
    return TensorFolder(folder, {name: [((), ADAPTER_FILE, stored)] for stored, name in names.items()})
